"""The decoding loop behind `generate(assistant_model=<Eagle3DraftModel>)`: draft, verify, accept, commit."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..attention import grouped_attention
from ..aux_layers import text_config
from ..compat import rope_switch
from ..modeling_eagle3 import Eagle3DraftModel
from ..packing import pack_linears
from .candidate_generator import Eagle3CandidateGenerator
from .exact import MarginCheck
from .memory import Memory
from .options import DraftingOptions
from .outputs import StepRecorder
from .rows import Rows
from .selfcheck import check_target
from .statistics import SpeculationStats
from .stopping import BlockStopper, length_limit
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
    _refuse_unsupported(target, input_ids, generation_config, streamer, model_kwargs)
    options = DraftingOptions.collect(
        getattr(generation_config, "_eagle3_drafting", {}), assistant_model.generation_config
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


def _refuse_unsupported(
    target: Any, input_ids: torch.Tensor, config: GenerationConfig, streamer: Any, kwargs: dict
) -> None:
    unsupported = {
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "position_ids of your own": _has_own_positions(input_ids, kwargs),
    }
    named = [name for name, given in unsupported.items() if given]
    known = {
        "attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep", "cache_position",
        "inputs_tensor", "tokenizer", "inputs_embeds", "cache_params", "output_attentions",
        "output_hidden_states",
    }  # fmt: skip
    # transformers 5.2x gives vision-language models an empty `mm_encoder_outputs` for a text without images.
    named += sorted(name for name, value in kwargs.items() if name not in known and value is not None and value != {})
    if named:
        raise ValueError(f"not supported with an EAGLE-3 draft: {', '.join(named)}. Generate without assistant_model.")
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(f"a streamer takes one sequence, the batch has {input_ids.shape[0]}")
    wants_attention = config.return_dict_in_generate and config.output_attentions
    if wants_attention and text_config(target)._attn_implementation != "eager":
        raise ValueError(
            f"output_attentions needs the weights, which attn_implementation="
            f"{text_config(target)._attn_implementation!r} doesn't give: target.set_attn_implementation('eager')"
        )


def _has_own_positions(input_ids: torch.Tensor, kwargs: dict) -> bool:
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is None:
        return False
    real = torch.ones_like(input_ids) if mask is None else mask
    return bool(((positions != real.long().cumsum(-1) - 1) & real.bool()).any())


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
            self.exact = MarginCheck(options.exact_margin, lengths[0], batch, bool(config.do_sample))
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
        slots = max(self.rows.limits) + options.max_nodes + 1
        aux_ids = check_draft_fits(target, draft)
        self.memory = Memory(
            model_kwargs, self.rows, target, draft, aux_ids, slots, bool(config.return_dict_in_generate)
        )
        self.cache = self.memory.cache
        self.verifier = Verifier(target, self.cache, logits_processor, batch, aux_ids, bool(config.do_sample))
        self.recorder = StepRecorder(config, self.rows.pads, self.rows.width, self.cache.lengths or [0] * batch)
        self.verifier.wanted = self.recorder.forward_options

    def _position_limit(self, text: Any) -> int | None:
        """Positions that nodes may take, or `None` for any number."""
        # Where RoPE changes with the length of the longest row, a forward of several tokens, or rows that advance by
        # different amounts, would rotate some of them otherwise than plain generation does.
        kind, place = rope_switch(text)
        first, last = min(self.rows.text_lengths()), max(self.rows.limits) - 1
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
        last, features = self.verifier.prefill(ids, lengths)
        self.recorder.add_prefill(self.verifier.states, lengths)
        raw, scores, tokens = self.verifier.choose(last[:, None], None, rows)
        counts = torch.ones(len(lengths), dtype=torch.long, device=tokens.device)
        kept, ended = self.stopper.cut(tokens, counts, rows.budgets(tokens.device))
        going, _ = self._commit(tokens, kept, ended, torch.zeros_like(counts), raw, scores, torch.zeros_like(tokens))
        # Rows that end are remembered where the next call may go on from here.
        staying = list(range(len(lengths))) if self.memory.wanted else going
        if len(going) < len(lengths):
            self.memory.let_go(self.cache, going)
        if staying and (self.memory.wanted or self._depth() > 0):
            ends = torch.tensor(lengths, device=ids.device)[:, None] - 1
            following = torch.cat((ids[:, 1:], ids[:, :1]), dim=1).scatter(1, ends, tokens.to(ids))
            at = torch.tensor(staying)
            counts_new = [lengths[row] for row in staying]
            self.generator.extend(features[at.to(features.device)], following[at.to(ids.device)], counts_new)
            if len(going) < len(staying):
                self.generator.select_rows(going, park=True)
        self.stats.prefill_seconds = time.perf_counter() - begin

    def _depth(self) -> int:
        """Levels worth drafting now: none of them may pass the length limit or the target's position table."""
        room = 0
        for length, limit in zip(self.rows.text_lengths(), self.rows.limits):
            places = limit - length - 1
            if self.max_position is not None:
                places = min(places, self.max_position - length)
            room = max(room, places)
        return max(0, min(self.generator.depth, room))

    def _draw(self, logits: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft tokens for `draft_sampling="sample"`: the target's processors see the draft's own continuation."""
        rows, count = self.rows, drafted.shape[1]
        ids, columns = rows.ids, [columns + count for columns in rows.columns]
        if count:
            ids = torch.nn.functional.pad(ids, (0, count))
            place = torch.tensor(rows.columns, device=ids.device)[:, None] + torch.arange(count, device=ids.device)
            ids = ids.scatter(1, place, drafted.to(ids))
        process = self.verifier.process
        scores = process(logits[:, None].to(rows.device), None, ids, columns, rows.original)[:, 0]
        if not self.config.do_sample:
            return scores.argmax(dim=-1), None
        # A row in which the processors left none of the draft's tokens has no q, and gets a token that counts as none.
        q = scores.softmax(dim=-1).nan_to_num(0.0)
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
        if self.max_position is not None and max(rows.text_lengths()) + depth > self.max_position:
            # Shorter rows are still drafted for; those at the end of the position table go on token by token.
            room = [max(self.max_position - length, 0) for length in rows.text_lengths()]
            counts = torch.minimum(counts, torch.tensor(room, device=counts.device))
        bonus: Any = 1
        if self.exact and tree is not None:
            counts, bonus = self.exact.cut(scores, logits.dtype, path, counts)
        kept, ended = self.stopper.cut(new, counts + bonus, rows.budgets(new.device))
        # Drafting stops for good once no row has room for it, and then its memory needn't follow.
        following = depth > 0 or self.memory.wanted
        features = features.gather(1, path.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
        roots_before = rows.text_lengths()
        going, advanced = self._commit(new, kept, ended, counts, raw, scores, path, tree)
        staying = list(range(len(roots_before))) if self.memory.wanted else going
        self._advance_cache(staying, going, roots_before, advanced, path, tree)
        if not staying or not following:
            return
        clock = time.perf_counter()
        if len(staying) < len(roots_before):
            at = torch.tensor(staying)
            features, new = features[at.to(features.device)], new[at.to(new.device)]
            generator.select_rows(staying)
        steps = [advanced[row] for row in staying]
        if any(steps):
            generator.extend(features[:, : max(steps)], new[:, : max(steps)], steps)
        if len(going) < len(staying):
            generator.select_rows(going, park=True)
        stats.draft_seconds += time.perf_counter() - clock

    def _advance_cache(
        self,
        staying: list[int],
        going: list[int],
        before: list[int],
        advanced: list[int],
        path: torch.Tensor,
        tree: Any,
    ) -> None:
        """Keep the accepted nodes' keys and values, drop (or set aside) everything of rows that ended."""
        if not staying:
            return
        if len(staying) < len(before):
            self.cache.select_rows(staying)
        committed = [before[row] + advanced[row] - 1 for row in staying]
        if tree is None or tree.is_chain:
            self.cache.commit(committed)
        else:
            at = torch.tensor(staying, device=path.device)
            start = torch.tensor([before[row] - 1 for row in staying], device=path.device)[:, None]
            width = max(advanced[row] for row in staying)
            self.cache.commit(committed, start + path[at][:, :width], start + torch.arange(width, device=path.device))
        if len(going) < len(staying):
            self.cache.park(going)

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
    ) -> tuple[list[int], list[int]]:
        """Write the new tokens into the rows, count, stream.

        Returns:
            Which rows of the batch go on, and how many tokens each row of the batch got.
        """
        rows = self.rows
        # The one transfer of a round: everything the host needs, in one tensor.
        packed = torch.cat((kept[:, None], ended.long()[:, None], accepted[:, None], new, path), dim=1).tolist()
        width = new.shape[1]
        block = [line[3 : 3 + line[0]] for line in packed]
        done = [bool(line[1]) for line in packed]
        if self.stopper.others or self.stopper.timers:
            steps = None
            if self.recorder.scores is not None:
                nodes = [line[3 + width :][: line[0]] for line in packed]
                steps = [self.recorder.scores[row] + list(scores[i, nodes[i]]) for i, row in enumerate(rows.original)]
            asked, stopped = self.stopper.ask(rows.ids, rows.columns, block, rows.original, steps)
            block = [tokens[:count] for tokens, count in zip(block, asked)]
            done = [d or s for d, s in zip(done, stopped)]
        counts = list(map(len, block))
        if self.exact:  # a row that goes on without a bonus token was held back
            self.exact.note(not done[0] and counts[0] == packed[0][2], self.stats)
        nodes = [line[3 + width :][:count] for line, count in zip(packed, counts)]
        self.recorder.add_tokens(rows.original, nodes, scores, raw)
        if rows.started:
            starts = [length - 1 for length in rows.text_lengths()]
            self.recorder.add_states(self.verifier.states, rows.original, counts, path, starts)
        for line, tokens in zip(packed, block):
            taken = min(line[2], len(tokens))
            if rows.started:
                drafted = 0 if tree is None else tree.max_depth
                size = 0 if tree is None else tree.size - 1
                self.stats.count_round(drafted, size, taken, len(tokens))
                self.stats.candidates_per_round = max(self.stats.candidates_per_round, size + 1)
            if self.streamer is not None:
                if tree is not None and hasattr(self.streamer, "put_tree"):
                    self.streamer.put_tree(tree)
                if hasattr(self.streamer, "put_block"):
                    self.streamer.put_block(tokens, taken)
                elif tokens:
                    self.streamer.put(torch.tensor(tokens))
        return rows.append(block, done), counts

    def result(self) -> Any:
        """What `generate()` returns."""
        sequences = self.rows.sequences()
        if not self.config.return_dict_in_generate:
            return sequences
        name = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
        output = GenerateDecoderOnlyOutput(sequences=sequences, **self.recorder.result(), **{name: self.cache})
        output["speculation_stats"] = self.stats
        return output
