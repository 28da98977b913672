"""Verifier: the target's side of a round - forward over the nodes, processing, selection, acceptance."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList

from ..aux_layers import text_config
from ..compat import accepts, cache_argument
from .cache import SpeculativeCache
from .masks import TargetMasks, visibility
from .processing import NodeProcessor
from .rejection_tree import select_sampled
from .rows import Rows
from .tree import DraftTree
from .verification import accept, select_tokens


class Verifier:
    """Runs the target on prompts and on draft nodes.

    Args:
        target: model with [`Eagle3TargetMixin`].
        cache: the target's memory.
        processors: as `generate()` prepared them.
        batch_size: rows of the original call.
        aux_ids: aux hidden states to capture.
        do_sample: draw tokens instead of argmax.
    """

    def __init__(
        self,
        target: Any,
        cache: SpeculativeCache,
        processors: LogitsProcessorList,
        batch_size: int,
        aux_ids: tuple[int, ...],
        do_sample: bool,
    ):
        self.target, self.cache, self.do_sample = target, cache, do_sample
        self.process = NodeProcessor(processors, batch_size)
        self.masks = TargetMasks(text_config(target), target.dtype)
        self.aux_ids = aux_ids
        self.cache_argument = cache_argument(type(target).forward)
        self.keeps_logits = accepts(type(target).forward, "logits_to_keep")
        self.fixed = {"use_cache": True, "return_dict": True}
        if accepts(type(target).forward, "output_router_logits"):
            # Where a config asks for it, the model computes a loss from them, for which it wants another mask.
            self.fixed["output_router_logits"] = False
        self.wanted: dict[str, bool] = {}  # more that forwards are to return, and then
        self.states: Any = None  # the last forward's output
        # What a prompt with images adds to the positions of later text, int64 `[axes, rows of the call]`.
        self.offsets: torch.Tensor | None = None

    def run(self, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """A forward with these inputs: what the model returns, and features `[batch, width, n_aux * hidden]`."""
        with self.target.capture_aux_hidden_states(self.aux_ids) as capture:
            out = self.target(**inputs | self.wanted | self.fixed)
        for name in (option.removeprefix("output_") for option in self.wanted):
            if getattr(out, name, None) is None:  # Qwen3-VL of transformers 4.57
                raise ValueError(f"output_{name}: {self.target._eagle3_original_class.__name__} returns no {name}")
        self.states = out if self.wanted else None
        states = capture.take()
        device = states[-1].device
        return out, torch.cat([state.to(device) for state in states], dim=-1)

    def _run_text(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, rows: Rows | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.offsets is not None and rows is not None:
            shift = self.offsets[:, torch.tensor(rows.original, device=self.offsets.device)]
            positions = (positions + shift[..., None].to(positions.device)).squeeze(0)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, self.cache_argument: self.cache}
        out, features = self.run(inputs | kwargs)
        return out.logits, features

    def prefill(
        self, ids: torch.Tensor, lengths: list[int], rows: Rows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run right-padded prompts `[batch, width]`, after what the cache holds of each row already.

        Where it holds nothing, causality alone keeps padding out of sight, since it comes last; its keys and values
        are scratch.

        Returns:
            Logits after each row's last token `[batch, vocab]`, and features `[batch, width, n_aux * hidden]`.
        """
        batch, width = ids.shape
        steps = torch.arange(width, device=ids.device)
        past = self.cache.lengths
        if not any(past):
            self.cache.begin_write(None, width, batch=batch)
            # repeat, not expand: XGLM of 4.57 adds to its position ids in place.
            positions, mask = steps[None].repeat(batch, 1), None
        else:
            start = torch.tensor(past, device=ids.device)[:, None]
            ends = torch.tensor(lengths, device=ids.device)[:, None]
            # Padding goes to one slot past the longest row, and to a position that every table has.
            used = max(map(sum, zip(past, lengths)))
            is_padding = steps >= ends
            slots = torch.where(is_padding, used, start + steps)
            positions = torch.where(is_padding, start, start + steps)
            padded = min(lengths) < width
            level = min(past) == max(past) and not padded
            self.cache.begin_write(None if level else slots, width, used=used + padded)
            keys = torch.arange(self.cache.used, device=ids.device)
            mask = self.masks.build(keys <= positions[..., None], positions, keys.expand(batch, -1))
        ends = torch.tensor([length - 1 for length in lengths], device=ids.device)
        distinct, place = ends.unique(return_inverse=True)
        kwargs = {"logits_to_keep": distinct} if self.keeps_logits else {}
        logits, features = self._run_text(ids, positions, mask, rows, **kwargs)
        row = torch.arange(batch, device=logits.device)
        last = logits[row, (place if self.keeps_logits else ends).to(logits.device)]
        self.cache.set_lengths([have + length for have, length in zip(past, lengths)] if past else lengths)
        return last, features

    def idle(self, token: torch.Tensor) -> None:
        """A forward for nothing, while other processes of a sharded model need this one's part of the weights."""
        self.target(input_ids=token, use_cache=False, return_dict=True)

    def forward(
        self, tree: DraftTree | None, rows: Rows, max_position: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the nodes of `tree` (or the roots alone) after each row's past.

        Returns:
            Logits `[batch, nodes, vocab]` and features `[batch, nodes, n_aux * hidden]`.
        """
        ids = rows.roots()[:, None] if tree is None else tree.tokens
        batch, nodes = ids.shape
        lengths = self.cache.lengths
        start = self.cache.lengths_on(ids.device)
        level = min(lengths) == max(lengths)
        slots = None if level else start[:, None] + torch.arange(nodes, device=ids.device)
        self.cache.begin_write(slots, nodes)
        depths = start.new_zeros(batch, 1) if tree is None else tree.depths
        positions = start[:, None] + depths
        if max_position is not None and nodes > 1:
            # Nodes past the position table are cut off afterwards anyway; learned tables must not be overrun.
            positions = positions.clamp(max=max(max_position - 1, max(lengths)))
        mask = None
        if not (level and nodes == 1 and self.masks.full_only):
            ancestors = start.new_ones(batch, 1, 1, dtype=torch.bool) if tree is None else tree.ancestors
            is_chain = tree is None or tree.is_chain
            visible, keys = visibility(start, self.cache.used, depths, ancestors, is_chain)
            mask = self.masks.build(visible, start[:, None] + depths, keys)
        return self._run_text(ids, positions, mask, rows)

    def choose(
        self, logits: torch.Tensor, tree: DraftTree | None, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Raw float32 logits, processed scores `[batch, nodes, vocab]` and the selected token of each node."""
        # float32 as in plain generate(): warpers and softmax run in full precision.
        raw = logits.to(torch.float32, copy=bool(self.process.steps) and logits.dtype == torch.float32)
        raw = raw.to(rows.device)
        scores, void = self.process(raw, tree, rows.ids, rows.columns, rows.original)
        if tree is not None and void is not None:
            tree.counted = ~void if tree.counted is None else tree.counted & ~void
        if tree is not None and tree.draft_probs is not None:
            probs = scores.softmax(dim=-1)
            # Plain generation's draw from such a root raises this; the rule's own draw would take the first token.
            torch._assert_async(
                probs[:, 0].isfinite().all(), "probability tensor contains either `inf`, `nan` or element < 0"
            )
            return raw, scores, select_sampled(tree, probs, tree.draft_probs)
        return raw, scores, select_tokens(scores, self.do_sample)

    def accept(self, tree: DraftTree | None, selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """New tokens `[batch, depth + 1]`, accepted draft tokens `[batch]`, and the accepted path's nodes."""
        if tree is None:
            counts = selected.new_zeros(selected.shape[0])
            return selected, counts, torch.zeros_like(selected)
        outcome = accept(tree, selected)
        return outcome.tokens, outcome.counts, outcome.path
