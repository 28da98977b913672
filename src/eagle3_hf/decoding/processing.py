"""Logits processors over the nodes of a tree: each node is processed with its own path as `input_ids`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LogitsProcessorList
from transformers.utils import logging

from .tree import DraftTree

logger = logging.get_logger(__name__)

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
# Those of them that may drop every token of a row; the others always leave one.
_EMPTYING = ("SuppressTokensLogitsProcessor",)
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
    processor.prompt_ignore_length = ignored[torch.tensor(places, device=ignored.device)]
    return processor


def _numbers(processor: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in getattr(processor, "__dict__", {}).items()
        if isinstance(value, int | float | str)
    }


def _refuse_state(processor: Any, ids: torch.Tensor, scores: torch.Tensor, row: int) -> None:
    """Refuse a processor whose answer for a text changes when it was asked about another text in between.

    Args:
        processor: of a class that isn't known here. One with a true attribute `stateless` isn't tried.
        ids: int64 `[batch, length]`, a text for each row of the call.
        scores: float32 `[vocab]`.
        row: the row whose text this is.

    Raises:
        ValueError: it keeps a state; the message names it.
    """
    if getattr(processor, "stateless", False):
        return
    name = getattr(processor, "__name__", type(processor).__name__)
    devices = [scores.device] if scores.is_cuda else []

    def ask(text: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices):  # one that draws gives the same again, and the call's draws stay
            return processor(text, scores.expand(len(text), -1).clone())[row].clone()

    first = ask(ids)
    before = _numbers(processor)
    again = None
    with contextlib.suppress(Exception):  # the longer text may have ended
        ask(torch.cat((ids, first.argmax().to(ids).expand(len(ids), 1)), dim=1))
    with contextlib.suppress(Exception):  # a grammar's state, say, takes no token twice
        again = ask(ids)
    changed = sorted(key for key, value in _numbers(processor).items() if before.get(key) != value)
    if again is not None and not changed and torch.allclose(first, again, equal_nan=True):
        return
    seen = f"its {', '.join(changed)} changed" if changed else "it answers differently, or fails, when asked again"
    raise ValueError(
        f"the logits processor {name} keeps state between calls ({seen}), and draft nodes are asked about in an order "
        "of their own: generate without assistant_model, make it a function of input_ids, or, if what it keeps "
        "doesn't change its scores, set its attribute stateless = True"
    )


class NodeProcessor:
    """Applies a `LogitsProcessorList` to the logits of all nodes at once.

    Plain generation only asks processors about texts that come about. A drafted one may be none that a constraint
    allows, or one that has ended: a processor may drop all tokens after it, or raise. Such a node is *void* and mustn't
    be accepted. If its text does come about, it is the next round's root, and then what the processor does counts.

    Args:
        processors: as `generate()` prepared them.
        batch_size: rows of the original call; processors of unknown classes see that many rows, each in its place.

    Raises:
        ValueError: a processor that keeps state between calls. Those of unknown classes are tried at the first call.
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
        emptying = set(_classes(_EMPTYING))
        self.may_empty = [type(p) not in pointwise or type(p) in emptying for p in processors]
        self.batch_size = batch_size
        self.tried = False
        self.needs_prefix = any(not pointwise for _, pointwise, _ in self.steps)

    def __call__(
        self,
        scores: torch.Tensor,
        tree: DraftTree | None,
        ids: torch.Tensor,
        lengths: np.ndarray,
        rows: np.ndarray,
        drafted: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Process node logits.

        Args:
            scores: float32 `[batch, nodes, vocab]`.
            tree: the proposal; `None` when there is one node a row.
            ids: int64 `[batch, width]`, left-padded text as plain `generate()` would hold it.
            lengths: int64 `[batch]`, columns of `ids` in use in each row (the last one is the root).
            rows: int64 `[batch]`, place of each row in the original batch.
            drafted: `ids` end with draft tokens, so that the roots may be void too.

        Returns:
            float32 `[batch, nodes, vocab]`, all zeros for void nodes, and which nodes are void, bool `[batch, nodes]`;
            `None` where none can be.
        """
        if not self.steps:
            return scores, None
        batch, nodes, vocab = scores.shape
        groups = self._groups(tree, ids, lengths) if self.needs_prefix else []
        flat = scores.reshape(batch * nodes, vocab)
        void = guesses = None
        if any(self.may_empty) and (nodes > 1 or drafted):
            guesses = (torch.arange(nodes, device=flat.device) >= (not drafted)).repeat(batch)
            void = torch.zeros_like(guesses)
        for step, (processor, pointwise, rowwise) in enumerate(self.steps):
            if pointwise:
                flat = processor(ids.new_zeros(batch * nodes, 1), flat)
            else:
                out = torch.empty_like(flat)
                for members, prefix in groups:
                    places = rows[members // nodes].tolist()
                    index = torch.tensor(members, device=flat.device)
                    if hasattr(processor, "process_rows"):
                        out[index] = processor.process_rows(prefix, flat[index], places)
                    elif rowwise:
                        out[index] = _for_rows(processor, places)(prefix, flat[index])
                    else:
                        guessed = (drafted | (members % nodes > 0)).tolist()
                        self._one_by_one(processor, members.tolist(), places, prefix, guessed, flat, out)
                flat = out
            if guesses is not None and void is not None and self.may_empty[step]:
                # At once, not at the end: some warpers refuse a row in which nothing is left.
                empty = guesses & ~flat.amax(dim=-1).isfinite()
                void, flat = void | empty, flat.masked_fill(empty[:, None], 0.0)
        self.tried = True
        if void is not None:
            void = void.view(batch, nodes)
            flat = flat.masked_fill(void.view(-1, 1), 0.0)
        return flat.view(batch, nodes, vocab), void

    def _one_by_one(
        self,
        processor: Any,
        members: list[int],
        places: list[int],
        prefix: torch.Tensor,
        guessed: list[bool],
        flat: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        # A user's processor may use the row number (prefix_allowed_tokens_fn does), so a node's prefix stands in
        # its row of a batch of the original size. What it does with a batch isn't known: a call for each node.
        for at, place, text, guess in zip(members, places, prefix, guessed):
            batch_ids = text.expand(self.batch_size, -1)
            if not self.tried and at == members[0]:
                _refuse_state(processor, batch_ids, flat[at], place)
            try:
                out[at] = processor(batch_ids, flat[at].expand(self.batch_size, -1).clone())[place]
            except Exception as error:
                if not guess:
                    raise
                # Not the text's fault? Then it's raised at the next root.
                logger.debug("%s on a drafted text: %s", type(processor).__name__, error)
                out[at] = float("-inf")

    def _groups(
        self, tree: DraftTree | None, ids: torch.Tensor, lengths: np.ndarray
    ) -> list[tuple[np.ndarray, torch.Tensor]]:
        """Nodes by prefix length: flat node indices `[n]` (on the host) and their prefixes `[n, length]`."""
        longest = int(lengths.max())
        if tree is None:
            totals, texts = lengths, ids
        else:
            # A dynamic tree's depths come from the draft's scores: the one case where the host has to wait for them.
            depths = tree.depths.tolist() if tree.depth_list is None else tree.depth_list
            totals = (lengths[:, None] + np.array(depths)).flatten()
            path = tree.tokens[:, None, :].expand(-1, tree.size, -1).gather(2, tree.node_at_depth())[:, :, 1:]
            place = torch.tensor(lengths, device=ids.device)[:, None] + torch.arange(path.shape[2], device=ids.device)
            texts = torch.nn.functional.pad(ids[:, :longest], (0, path.shape[2]))[:, None].repeat(1, tree.size, 1)
            texts = texts.scatter_(2, place[:, None].expand_as(path), path.to(texts)).flatten(0, 1)
        groups = []
        for total in np.unique(totals).tolist():
            members = np.flatnonzero(totals == total)
            groups.append((members, texts[torch.tensor(members, device=ids.device), :total]))
        return groups
