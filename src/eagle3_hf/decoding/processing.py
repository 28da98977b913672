"""Logits processors over the nodes of a tree: each node is processed with its own path as `input_ids`."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList

from .tree import DraftTree

# Processors that never look at input_ids: one call serves all nodes.
_POINTWISE = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "PLessLogitsWarper",
    "PLessNormLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "LogitNormalization",
    "InfNanRemoveLogitsProcessor",
)
# Processors that treat every row of input_ids by itself: nodes of equal prefix length share a call.
_ROWWISE = (
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "WatermarkLogitsProcessor",
)
# Processors that carry state from one call to the next, which speculation would call out of order.
_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


def _classes(names: Iterable[str]) -> tuple[type, ...]:
    module = transformers.generation.logits_process
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def _for_rows(processor: Any, places: list[int]) -> Any:
    """`processor` for a call whose rows stand at `places` of the batch it was made for."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, torch.Tensor):
        return processor
    # transformers 5.2x: the repetition penalty holds every row's padding.
    processor = copy.copy(processor)
    processor.prompt_ignore_length = ignored[places]
    return processor


class NodeProcessor:
    """Applies a `LogitsProcessorList` to the logits of all nodes at once.

    Args:
        processors: as `generate()` prepared them.
        batch_size: rows of the original call; processors of unknown classes see that many rows, each in its place.

    Raises:
        ValueError: a processor that keeps state between calls.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int):
        stateful = [type(p).__name__ for p in processors if isinstance(p, _classes(_STATEFUL))]
        if stateful:
            raise ValueError(
                f"{stateful} keep state between calls, so they can't run on drafted tokens: generate without a draft"
            )
        pointwise, rowwise = set(_classes(_POINTWISE)), set(_classes(_ROWWISE))
        # Exact classes: a subclass may do anything.
        self.steps = [(p, type(p) in pointwise, type(p) in rowwise) for p in processors]
        self.batch_size = batch_size
        self.needs_prefix = any(not pointwise for _, pointwise, _ in self.steps)

    def __call__(
        self, scores: torch.Tensor, tree: DraftTree | None, ids: torch.Tensor, lengths: list[int], rows: list[int]
    ) -> torch.Tensor:
        """Process node logits.

        Args:
            scores: float32 `[batch, nodes, vocab]`.
            tree: the proposal; `None` when there is one node a row.
            ids: int64 `[batch, width]`, left-padded text as plain `generate()` would hold it.
            lengths: columns of `ids` in use in each row (the last one is the root).
            rows: place of each row in the original batch.

        Returns:
            float32 `[batch, nodes, vocab]`.
        """
        if not self.steps:
            return scores
        batch, nodes, vocab = scores.shape
        groups = self._groups(tree, ids, lengths) if self.needs_prefix else []
        flat = scores.reshape(batch * nodes, vocab)
        for processor, pointwise, rowwise in self.steps:
            if pointwise:
                flat = processor(ids.new_zeros(batch * nodes, 1), flat)
                continue
            out = torch.empty_like(flat)
            for index, prefix in groups:
                places = [rows[at // nodes] for at in index.tolist()]
                if hasattr(processor, "process_rows"):
                    out[index] = processor.process_rows(prefix, flat[index], places)
                elif rowwise:
                    out[index] = _for_rows(processor, places)(prefix, flat[index])
                else:
                    self._one_by_one(processor, index, prefix, flat, out, rows, nodes)
            flat = out
        return flat.view(batch, nodes, vocab)

    def _one_by_one(
        self,
        processor: Any,
        index: torch.Tensor,
        prefix: torch.Tensor,
        flat: torch.Tensor,
        out: torch.Tensor,
        rows: list[int],
        nodes: int,
    ) -> None:
        # A user's processor may use the row number (prefix_allowed_tokens_fn does), so a node's prefix stands in
        # its row of a batch of the original size.
        for at, text in zip(index.tolist(), prefix):
            place = rows[at // nodes]
            batch_ids = text.expand(self.batch_size, -1)
            out[at] = processor(batch_ids, flat[at].expand(self.batch_size, -1).clone())[place]

    def _groups(
        self, tree: DraftTree | None, ids: torch.Tensor, lengths: list[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Nodes by prefix length: flat node indices `[n]` and their prefixes `[n, length]`."""
        if tree is None:
            depths = [[0] for _ in lengths]
            nodes, paths = 1, None
        else:
            depths = [list(range(tree.size))] * len(lengths) if tree.is_chain else tree.depths.tolist()
            nodes = tree.size
            node_at_depth = tree.node_at_depth()
            paths = tree.tokens[:, None, :].expand(-1, nodes, -1).gather(2, node_at_depth)
        by_length: dict[int, list[tuple[int, int]]] = {}
        for row, length in enumerate(lengths):
            for node, depth in enumerate(depths[row]):
                by_length.setdefault(length + depth, []).append((row, node))
        groups = []
        for total, members in by_length.items():
            prefixes = []
            for row, node in members:
                text = ids[row, : lengths[row]]
                drafted = total - lengths[row]
                prefixes.append(
                    text if not drafted or paths is None else torch.cat((text, paths[row, node, 1 : drafted + 1]))
                )
            index = torch.tensor([row * nodes + node for row, node in members], device=ids.device)
            groups.append((index, torch.stack(prefixes)))
        return groups
