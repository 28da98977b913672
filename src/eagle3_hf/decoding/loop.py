"""The decoding loop behind `generate(assistant_model=<Eagle3DraftModel>)`: draft, verify, accept, commit."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..attention import grouped_attention
from ..aux_layers import text_config
from ..compat import rope_switch
from ..modeling_eagle3 import Eagle3DraftModel
from ..packing import pack_linears
from . import multimodal
from .arguments import refuse_inputs
from .candidate_generator import Eagle3CandidateGenerator
from .exact import MarginCheck
from .memory import Memory
from .options import DraftingOptions
from .outputs import StepRecorder
from .rows import Rows
from .selfcheck import check_target
from .statistics import SpeculationStats
from .stopping import BlockStopper, length_limit
from .streaming import stream_block
from .verifier import Verifier


def speculate(
    target: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: Eagle3DraftModel,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Generate with an EAGLE-3 draft; called by `generate()` in place of transformers' `_assisted_decoding`.

    Greedy output is what plain `generate()` gives; sampled output has its distribution, whatever the processors.

    Args:
        target: a model with [`Eagle3TargetMixin`].
        input_ids: int64 `[batch, prompt]`, left-padded.
        logits_processor, stopping_criteria, generation_config, streamer: as `generate()` prepared them.
        assistant_model: the draft.
        synced_gpus: go on with empty forwards of the target until every process is done (FSDP, ZeRO stage 3). The
            draft itself must not be sharded: processes draft different numbers of tokens.
        model_kwargs: the model inputs that `generate()` prepared.

    Returns:
        int64 `[batch, prompt + new]`, or a `GenerateDecoderOnlyOutput` (`return_dict_in_generate`) with
        `speculation_stats` on it.

    Raises:
        ValueError: an option that speculation doesn't support, named.
    """
    from ..target import check_draft_fits

    with torch.no_grad():
        check_target(target, check_draft_fits(target, assistant_model), input_ids.device)
    begin = time.perf_counter()
    refuse_inputs(target, input_ids, generation_config, streamer, model_kwargs)
    options = DraftingOptions.collect(
        getattr(generation_config, "_eagle3_drafting", {}), assistant_model.generation_config
    )
    if synced_gpus and options.exact is not None:
        raise ValueError(
            f"synced_gpus doesn't go with exact={options.exact!r}: deciding a token again takes forwards that the "
            "other processes don't make. Leave exact out, or generate in one process"
        )
    stats = SpeculationStats()
    target.speculation_stats = stats
    if target._eagle3_packed:
        pack_linears(assistant_model)  # nothing to do where it was done before
    with torch.no_grad():
        session = _Session(
            target, input_ids, logits_processor, stopping_criteria, generation_config, assistant_model, options,
            streamer, model_kwargs, stats,
        )  # fmt: skip
        with grouped_attention(target):
            session.run(synced_gpus)
    stats.total_seconds = time.perf_counter() - begin
    return session.result()


class _Session:
    """State of one `generate()` call."""

    def __init__(
        self,
        target: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        draft: Eagle3DraftModel,
        options: DraftingOptions,
        streamer: Any,
        model_kwargs: dict[str, Any],
        stats: SpeculationStats,
    ):
        from ..target import check_draft_fits

        self.target, self.config, self.draft, self.streamer, self.stats = target, config, draft, streamer, stats
        batch = input_ids.shape[0]
        self.rows = Rows(input_ids, model_kwargs.get("attention_mask"), config, length_limit(stopping_criteria, config))
        self.stopper = BlockStopper(stopping_criteria, batch, self.rows.pad)
        self.generator = Eagle3CandidateGenerator(draft, target.get_input_embeddings(), options)
        if options.draft_sampling == "sample":
            self.generator.draw = self._draw
        self.exact: MarginCheck | None = None
        if options.exact is not None:
            lengths = self.rows.text_lengths()
            self.exact = MarginCheck(options.exact_margin, int(lengths[0]), batch, bool(config.do_sample))
        text = text_config(target)
        self.max_position = self._position_limit(text)
        # Old eager attention (GPT-2 in 4.57, GPT-Neo) cuts its causal mask from a table, which keys mustn't outgrow.
        tables = [b.shape[-1] for name, b in target.named_buffers() if name.endswith(".bias") and b.dim() == 4]
        self.max_keys = min(tables) if tables and text._attn_implementation == "eager" else None
        if self.max_position is not None and options.max_nodes >= self.max_position:
            raise ValueError(
                f"{options.max_nodes} draft tokens a round don't fit into the target's {self.max_position} positions"
            )
        # Slots: a row never holds more than its text, and past it the nodes under verification.
        slots = int(self.rows.limits.max()) + options.max_nodes + 1
        aux_ids = check_draft_fits(target, draft)
        self.memory = Memory(
            model_kwargs, self.rows, target, draft, aux_ids, slots, bool(config.return_dict_in_generate)
        )
        self.cache = self.memory.cache
        self.verifier = Verifier(target, self.cache, logits_processor, batch, aux_ids, bool(config.do_sample))
        if self.memory.offsets is not None:
            self.verifier.offsets = torch.tensor([self.memory.offsets], device=input_ids.device)
        self.inputs = model_kwargs
        cached = self.cache.lengths or [0] * batch
        self.recorder = StepRecorder(config, self.rows.pads.tolist(), self.rows.width, cached)
        self.verifier.wanted = self.recorder.forward_options

    def _position_limit(self, text: Any) -> int | None:
        """Positions that nodes may take, or `None` for any number."""
        # Where RoPE changes with the length of the longest row, a forward of several tokens, or rows that advance by
        # different amounts, would rotate some of them otherwise than plain generation does.
        kind, place = rope_switch(text)
        first, last = int(self.rows.text_lengths().min()), int(self.rows.limits.max()) - 1
        if first <= place < last and (kind == "longrope" or len(self.rows.columns) > 1):
            raise ValueError(
                f"the target's {kind} RoPE rotates differently past position {place}, and the text may grow from "
                f"{first} to {last} tokens: set max_new_tokens so that it stays below, or generate without a draft"
            )
        if kind == "dynamic" and place < last and len(self.rows.columns) > 1:
            raise ValueError(
                f"the target's dynamic RoPE rotates differently with every length past position {place}, and the rows "
                f"of a batch grow to {last} tokens at different speeds: generate them one by one, or without a draft"
            )
        limit = getattr(text, "max_position_embeddings", None)
        # Nodes past the end of a row that is nearly done mustn't trip the change either.
        return int(place) if kind == "longrope" and last <= place else limit

    def run(self, synced_gpus: bool = False) -> None:
        """Prefill, then rounds until every row has ended."""
        try:
            self.memory.lend(self.generator)
            self._prefill()
            while self._any_active(synced_gpus):
                if self.rows.active:
                    self._round()
                else:
                    self.verifier.idle(self.rows.first_token())
            self.memory.keep(self.generator, self.rows)
        except BaseException:
            self.memory.roll_back()
            raise
        finally:
            if self.streamer is not None:
                self.streamer.end()

    def _any_active(self, synced_gpus: bool) -> bool:
        if not synced_gpus:
            return self.rows.active
        return self.target._has_unfinished_sequences(not self.rows.active, True, self.rows.device)

    def _prefill(self) -> None:
        begin = time.perf_counter()
        rows = self.rows
        ids, lengths = rows.right_padded(self.cache.lengths)
        if not any(self.cache.lengths) and multimodal.runs_own_prompt(self.target, self.inputs):
            last, features = multimodal.prefill(self.verifier, rows, self.inputs)
            self.memory.offsets = multimodal.text_offsets(self.verifier)
        else:
            last, features = self.verifier.prefill(ids, lengths, rows)
        self.recorder.add_prefill(self.verifier.states, lengths)
        raw, scores, tokens = self.verifier.choose(last[:, None], None, rows)
        counts = torch.ones(len(lengths), dtype=torch.long, device=tokens.device)
        kept, ended = self.stopper.cut(tokens, counts, rows.budgets())
        going, _ = self._commit(tokens, kept, ended, torch.zeros_like(counts), raw, scores, torch.zeros_like(tokens))
        # Rows that end are remembered where the next call may go on from here.
        staying = np.arange(len(lengths)) if self.memory.wanted else going
        if len(going) < len(lengths):
            self.memory.let_go(self.cache, going.tolist())
        if len(staying) and (self.memory.wanted or self._depth() > 0):
            ends = torch.tensor(lengths, device=ids.device)[:, None] - 1
            following = torch.cat((ids[:, 1:], ids[:, :1]), dim=1).scatter(1, ends, tokens.to(ids))
            if len(staying) < len(lengths):
                at = torch.tensor(staying)
                features, following = features[at.to(features.device)], following[at.to(ids.device)]
            self.generator.extend(features, following, np.array(lengths)[staying].tolist())
            if len(going) < len(staying):
                self.generator.select_rows(going.tolist(), park=True)
        self.stats.prefill_seconds = time.perf_counter() - begin

    def _depth(self) -> int:
        """Levels worth drafting now: none of them may pass the length limit or the target's position table."""
        lengths = self.rows.text_lengths()
        room = self.rows.limits - lengths - 1
        if self.max_position is not None:
            room = np.minimum(room, self.max_position - lengths)
        return max(0, min(self.generator.depth, int(room.max(initial=0))))

    def _draw(self, logits: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens for `draft_sampling="sample"`: the target's processors see the draft's own continuation."""
        rows, process = self.rows, self.verifier.process
        rows.write(drafted)
        columns = rows.columns + drafted.shape[1]
        node = logits[:, None].to(rows.device)
        processed, void = process(node, None, rows.ids, columns, rows.original, drafted=drafted.shape[1] > 0)
        scores = processed[:, 0]
        if not self.config.do_sample:
            return scores.argmax(dim=-1), None
        # A row in which the processors left none of the draft's tokens has no q, and gets a token that counts as none.
        q = scores.softmax(dim=-1).nan_to_num(0.0)
        q = q if void is None else q.masked_fill(void, 0.0)
        return torch.multinomial(torch.where(q.sum(dim=-1, keepdim=True) > 0, q, 1.0), 1)[:, 0], q

    def _round(self) -> None:
        rows, generator, stats = self.rows, self.generator, self.stats
        depth = self._depth()
        clock = time.perf_counter()
        tree = None
        if depth > 0 and generator.cache.lengths and not (self.exact and self.exact.waiting):
            tree = generator.propose(rows.roots(), depth)
            if self.max_keys is not None and self.cache.longest + tree.size > self.max_keys:
                tree = None
        now = time.perf_counter()
        stats.draft_seconds += now - clock
        clock = now
        if self.exact:
            self.exact.replay(self.verifier, rows, stats)
        logits, features = self.verifier.forward(tree, rows, self.max_position)
        stats.target_seconds += time.perf_counter() - clock
        raw, scores, selected = self.verifier.choose(logits, tree, rows)
        new, counts, path = self.verifier.accept(tree, selected)
        lengths = rows.text_lengths()
        if self.max_position is not None and lengths.max() + depth > self.max_position:
            # Shorter rows are still drafted for; those at the end of the position table go on token by token.
            room = np.maximum(self.max_position - lengths, 0)
            counts = torch.minimum(counts, torch.tensor(room, device=counts.device))
        bonus: Any = 1
        if self.exact and tree is not None:
            counts, bonus = self.exact.cut(scores, logits.dtype, path, counts)
        kept, ended = self.stopper.cut(new, counts + bonus, rows.budgets())
        # Drafting stops for good once no row has room for it, and then its memory needn't follow.
        following = depth > 0 or self.memory.wanted
        features = features.gather(1, path.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
        going, advanced = self._commit(new, kept, ended, counts, raw, scores, path, tree)
        staying = np.arange(len(lengths)) if self.memory.wanted else going
        self._advance_cache(staying, going, advanced, path, tree)
        if not len(staying) or not following:
            return
        clock = time.perf_counter()
        steps = advanced[staying]
        if len(staying) < len(lengths):
            at = torch.tensor(staying)
            features, new = features[at.to(features.device)], new[at.to(new.device)]
            generator.select_rows(staying.tolist())
        if steps.any():
            width = int(steps.max())
            generator.extend(features[:, :width], new[:, :width], steps.tolist())
        if len(going) < len(staying):
            generator.select_rows(going.tolist(), park=True)
        stats.draft_seconds += time.perf_counter() - clock

    def _advance_cache(
        self, staying: np.ndarray, going: np.ndarray, advanced: np.ndarray, path: torch.Tensor, tree: Any
    ) -> None:
        """Keep the accepted nodes' keys and values, drop (or set aside) everything of rows that ended."""
        if not len(staying):
            return
        if len(staying) < len(advanced):
            self.cache.select_rows(staying.tolist())
            path, advanced = path[torch.tensor(staying, device=path.device)], advanced[staying]
        committed = (np.array(self.cache.lengths) + advanced).tolist()
        if tree is None or tree.is_chain:
            self.cache.commit(committed)
        else:
            # The root's slot is the first one past a row's length.
            start, width = self.cache.lengths_on(path.device)[:, None], int(advanced.max())
            self.cache.commit(committed, start + path[:, :width], start + torch.arange(width, device=path.device))
        if len(going) < len(staying):
            self.cache.park(going.tolist())

    def _commit(
        self,
        new: torch.Tensor,
        kept: torch.Tensor,
        ended: torch.Tensor,
        accepted: torch.Tensor,
        raw: torch.Tensor,
        scores: torch.Tensor,
        path: torch.Tensor,
        tree: Any = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Write the new tokens into the rows, count, stream.

        Returns:
            Which rows of the batch go on, and how many tokens each row of the batch got.
        """
        rows = self.rows
        # The one transfer of a round: everything the host needs, in one tensor.
        read = torch.cat((kept[:, None], ended.long()[:, None], accepted[:, None], new, path), dim=1).cpu().numpy()
        counts, done, drafted = read[:, 0], read[:, 1] > 0, read[:, 2]
        tokens, nodes = np.split(read[:, 3:], 2, axis=1)
        if self.stopper.others:
            steps = None
            if self.recorder.scores is not None:
                steps = [
                    self.recorder.scores[row] + list(scores[i, nodes[i, : counts[i]].tolist()])
                    for i, row in enumerate(rows.original)
                ]
            counts, done = self.stopper.ask(rows, tokens, counts, done, steps)
        if self.stopper.out_of_time():
            done = np.ones_like(done)
        if self.exact:  # a row that goes on without a bonus token was held back
            self.exact.note(bool(not done[0] and counts[0] == drafted[0]), self.stats)
        if self.recorder.active:
            self.recorder.add_tokens(rows.original.tolist(), counts.tolist(), nodes, scores, raw)
            if rows.started:
                starts = (rows.text_lengths() - 1).tolist()
                self.recorder.add_states(self.verifier.states, rows.original.tolist(), counts.tolist(), path, starts)
        taken = np.minimum(drafted, counts)
        if rows.started:
            depth, size = (0, 0) if tree is None else (tree.max_depth, tree.size - 1)
            self.stats.count_rounds(depth, size, taken, counts)
            self.stats.candidates_per_round = max(self.stats.candidates_per_round, size + 1)
        if self.streamer is not None:  # and then there is one row
            stream_block(self.streamer, tree, tokens[0, : counts[0]].tolist(), int(taken[0]))
        return rows.append(new, counts, done), counts

    def result(self) -> Any:
        """What `generate()` returns."""
        sequences = self.rows.sequences()
        if not self.config.return_dict_in_generate:
            return sequences
        name = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
        output = GenerateDecoderOnlyOutput(sequences=sequences, **self.recorder.result(), **{name: self.cache})
        output["speculation_stats"] = self.stats
        return output
