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
from .cache import SpeculativeCache
from .candidate_generator import Eagle3CandidateGenerator
from .options import DraftingOptions
from .rows import Rows
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
        synced_gpus: not supported.
        model_kwargs: the model inputs that `generate()` prepared.

    Returns:
        int64 `[batch, prompt + new]`, or a `GenerateDecoderOnlyOutput` (`return_dict_in_generate`) with
        `speculation_stats` on it.

    Raises:
        ValueError: an option that speculation doesn't support, named.
    """
    begin = time.perf_counter()
    _refuse_unsupported(target, input_ids, generation_config, synced_gpus, streamer, model_kwargs)
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
            session.run()
    stats.total_seconds = time.perf_counter() - begin
    return session.result()


def _refuse_unsupported(
    target: Any, input_ids: torch.Tensor, config: GenerationConfig, synced_gpus: bool, streamer: Any, kwargs: dict
) -> None:
    unsupported = {
        "synced_gpus": synced_gpus,
        "output_attentions": config.return_dict_in_generate and config.output_attentions,
        "output_hidden_states": config.return_dict_in_generate and config.output_hidden_states,
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "use_cache=False": not config.use_cache,
        "position_ids of your own": _has_own_positions(input_ids, kwargs),
        "assistant_ensemble_weight": getattr(config, "assistant_ensemble_weight", None) is not None,
    }
    named = [name for name, given in unsupported.items() if given]
    known = {
        "attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep", "cache_position",
        "inputs_tensor", "assistant_tokenizer", "tokenizer", "inputs_embeds", "cache_params",
    }  # fmt: skip
    named += sorted(name for name, value in kwargs.items() if name not in known and value is not None)
    if named:
        raise ValueError(f"not supported with an EAGLE-3 draft: {', '.join(named)}. Generate without assistant_model.")
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(f"a streamer takes one sequence, the batch has {input_ids.shape[0]}")
    past = kwargs.get("cache", kwargs.get("past_key_values"))
    if past is not None and past.get_seq_length() > 0:
        raise ValueError(
            "a filled past_key_values isn't supported with an EAGLE-3 draft yet (the draft needs the hidden states of "
            "the whole text): pass the whole text without it"
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
        text = text_config(target)
        self.max_position = self._position_limit(text)
        if self.max_position is not None and options.max_nodes >= self.max_position:
            raise ValueError(
                f"{options.max_nodes} draft tokens a round don't fit into the target's {self.max_position} positions"
            )
        # Slots: a row never holds more than its text, and past it the nodes under verification.
        slots = max(self.rows.limits) + options.max_nodes + 1
        self.cache = SpeculativeCache(text.num_hidden_layers, max_length=slots)
        self.verifier = Verifier(
            target, self.cache, logits_processor, batch, check_draft_fits(target, draft), bool(config.do_sample)
        )
        keep = config.return_dict_in_generate
        self.scores: list[list[torch.Tensor]] | None = (
            [[] for _ in range(batch)] if keep and config.output_scores else None
        )
        self.logits: list[list[torch.Tensor]] | None = (
            [[] for _ in range(batch)] if keep and config.output_logits else None
        )

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
        limit = getattr(text, "max_position_embeddings", None)
        # Nodes past the end of a row that is nearly done mustn't trip the change either.
        return int(place) if kind == "longrope" and last <= place else limit

    def run(self) -> None:
        """Prefill, then rounds until every row has ended."""
        try:
            self._prefill()
            while self.rows.active:
                self._round()
        finally:
            if self.streamer is not None:
                self.streamer.end()

    def _prefill(self) -> None:
        begin = time.perf_counter()
        rows = self.rows
        ids, lengths = rows.right_padded()
        last, features = self.verifier.prefill(ids, lengths)
        raw, scores, tokens = self.verifier.choose(last[:, None], None, rows)
        counts = torch.ones(len(lengths), dtype=torch.long, device=tokens.device)
        kept, ended = self.stopper.cut(tokens, counts, rows.budgets(tokens.device))
        survivors = self._commit(tokens, kept, ended, torch.zeros_like(counts), raw, scores, torch.zeros_like(tokens))
        if rows.active and len(survivors) < len(lengths):
            self.cache.select_rows(survivors)
        if rows.active and self._depth() > 0:
            at = torch.tensor(survivors, device=features.device)
            following = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)[at.to(ids.device)]
            prompt = [lengths[row] for row in survivors]
            ends = torch.tensor(prompt, device=ids.device)[:, None] - 1
            following = following.scatter(1, ends, rows.roots()[:, None].to(ids.device))
            self.generator.extend(features[at], following, prompt)
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
        if depth > 0 and generator.cache.lengths:
            tree = generator.propose(rows.roots(), depth)
        now = time.perf_counter()
        stats.draft_seconds += now - clock
        clock = now
        logits, features = self.verifier.forward(tree, rows, self.max_position)
        stats.target_seconds += time.perf_counter() - clock
        raw, scores, selected = self.verifier.choose(logits, tree, rows)
        new, counts, path = self.verifier.accept(tree, selected)
        if self.max_position is not None and max(rows.text_lengths()) + depth > self.max_position:
            # Shorter rows are still drafted for; those at the end of the position table go on token by token.
            room = [max(self.max_position - length, 0) for length in rows.text_lengths()]
            counts = torch.minimum(counts, torch.tensor(room, device=counts.device))
        kept, ended = self.stopper.cut(new, counts + 1, rows.budgets(new.device))
        # Drafting stops for good once no row has room for it, and then its memory needn't follow.
        following = depth > 0
        features = features.gather(1, path.to(features.device)[..., None].expand(-1, -1, features.shape[-1]))
        roots_before = rows.text_lengths()
        survivors = self._commit(new, kept, ended, counts, raw, scores, path, tree)
        self._advance_cache(survivors, roots_before, path, tree)
        if not rows.active or not following:
            return
        clock = time.perf_counter()
        at = torch.tensor(survivors)
        if len(survivors) < len(roots_before):
            features, new = features[at.to(features.device)], new[at.to(new.device)]
            generator.select_rows(survivors)
        advanced = [after - roots_before[row] for row, after in zip(survivors, rows.text_lengths())]
        width = max(advanced)
        generator.extend(features[:, :width], new[:, :width], advanced)
        stats.draft_seconds += time.perf_counter() - clock

    def _advance_cache(self, survivors: list[int], before: list[int], path: torch.Tensor, tree: Any) -> None:
        """Keep the accepted nodes' keys and values, drop everything of rows that ended."""
        if not survivors:
            return
        if len(survivors) < len(before):
            self.cache.select_rows(survivors)
        lengths = self.rows.text_lengths()
        committed = [length - 1 for length in lengths]
        if tree is None or tree.is_chain:
            self.cache.commit(committed)
            return
        at = torch.tensor(survivors, device=path.device)
        start = torch.tensor([before[row] - 1 for row in survivors], device=path.device)[:, None]
        width = max(length - before[row] for row, length in zip(survivors, lengths))
        source = start + path[at][:, :width]
        self.cache.commit(committed, source, start + torch.arange(width, device=path.device))

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
    ) -> list[int]:
        """Write the new tokens into the rows, count, stream; returns which rows of the batch go on."""
        rows = self.rows
        # The one transfer of a round: everything the host needs, in one tensor.
        packed = torch.cat((kept[:, None], ended.long()[:, None], accepted[:, None], new, path), dim=1).tolist()
        width = new.shape[1]
        block = [line[3 : 3 + line[0]] for line in packed]
        done = [bool(line[1]) for line in packed]
        if self.stopper.others or self.stopper.timers:
            steps = None
            if self.scores is not None:
                nodes = [line[3 + width :][: line[0]] for line in packed]
                steps = [self.scores[row] + list(scores[i, nodes[i]]) for i, row in enumerate(rows.original)]
            asked, stopped = self.stopper.ask(rows.ids, rows.columns, block, rows.original, steps)
            block = [tokens[:count] for tokens, count in zip(block, asked)]
            done = [d or s for d, s in zip(done, stopped)]
        for i, (line, tokens) in enumerate(zip(packed, block)):
            nodes = line[3 + width :][: len(tokens)]
            for store, values in ((self.scores, scores), (self.logits, raw)):
                if store is not None:
                    store[rows.original[i]] += list(values[i, nodes].clone())
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
                else:
                    self.streamer.put(torch.tensor(tokens))
        return rows.append(block, done)

    def result(self) -> Any:
        """What `generate()` returns."""
        sequences = self.rows.sequences()
        if not self.config.return_dict_in_generate:
            return sequences
        steps = {
            "scores": None if self.scores is None else _by_step(self.scores),
            "logits": None if self.logits is None else _by_step(self.logits),
        }
        # The cache isn't handed out: its rows are shortened to those that were still running.
        output = GenerateDecoderOnlyOutput(sequences=sequences, **steps)
        output["speculation_stats"] = self.stats
        return output


def _by_step(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Per-row lists of `[vocab]` to plain generate's form: one `[batch, vocab]` a step; ended rows get zeros."""
    steps = max(map(len, rows))
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(steps))
