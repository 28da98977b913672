"""`exact="margin"`: tokens that a verification can't settle are decided again, as plain generation decides them.

A forward over several tokens rounds differently from one over a single token. In bfloat16 that moves logits by a few
steps of their own precision, so where the two best tokens lie that close, the argmax may be another one. Such a token
isn't taken: the row stops in front of it. A single-token forward alone wouldn't settle it, because the keys and values
in front carry the other rounding too (measured in docs/exactness.md), so those tokens are run again first, one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .statistics import SpeculationStats
from .tree import chain

if TYPE_CHECKING:
    from .rows import Rows
    from .verifier import Verifier

# Steps of the logits' precision. On SmolLM2 in bfloat16 no verification moved the order of two tokens that were
# further apart than this (docs/exactness.md).
DEFAULT_STEPS = 2


def near_ties(scores: torch.Tensor, bound: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Nodes whose two best tokens are at most the bound apart.

    Args:
        scores: float32 `[batch, nodes, vocab]`, processed logits.
        bound: in logits; `None` for [`DEFAULT_STEPS`] steps of `dtype` at the best token's logit.
        dtype: what the target computes its logits in.

    Returns:
        bool `[batch, nodes]`. A node with one possible token is no tie.
    """
    first, second = scores.topk(2, dim=-1).values.unbind(dim=-1)
    if bound is None:
        # frexp gives 2^exponent above the value, where a step is half as wide as eps times that.
        step = torch.ldexp(torch.full_like(first, torch.finfo(dtype).eps / 2), first.frexp().exponent)
        near = first - second <= DEFAULT_STEPS * step
    else:
        near = first - second <= bound
    return near & second.isfinite()


def hold_back(near: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut each row's accepted path in front of its first token that isn't settled.

    Args:
        near: bool `[batch, nodes]`, nodes whose next token isn't settled.
        path: int64 `[batch, width]`, accepted nodes from the root down.
        counts: int64 `[batch]`, accepted draft tokens.

    Returns:
        int64 `[batch]` accepted draft tokens in front of that token, and int64 `[batch]` bonus tokens: 0 for rows that
        have one, else 1.
    """
    place = torch.arange(path.shape[1], device=path.device)
    unsettled = near.gather(1, path) & (place <= counts[:, None])
    first = torch.where(unsettled, place, path.shape[1]).min(dim=1).values
    return torch.minimum(counts, first), (first == path.shape[1]).long()


class MarginCheck:
    """What `exact="margin"` adds to the loop, for one row.

    Args:
        bound: see [`near_ties`].
        length: tokens of the prompt, whose prefill is plain generation's.
        batch_size, do_sample: of the call.

    Raises:
        ValueError: a call that this can't serve.
    """

    def __init__(self, bound: float | None, length: int, batch_size: int, do_sample: bool):
        if do_sample:
            raise ValueError("exact='margin' is for greedy decoding, a draw has no best token: set do_sample=False")
        if batch_size > 1:
            raise ValueError(
                f"exact='margin' takes one row, the batch has {batch_size}: plain generation runs padded rows "
                "together, and forwards of other shapes round differently. Generate the rows one by one"
            )
        self.bound = bound
        self.settled = length  # cache rows that are as plain generation's
        self.waiting = False  # for a single-token forward

    def cut(
        self, scores: torch.Tensor, dtype: torch.dtype, path: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted draft tokens and bonus tokens of a verification, see [`hold_back`]."""
        return hold_back(near_ties(scores, self.bound, dtype), path, counts)

    def note(self, held: bool, stats: SpeculationStats) -> None:
        """Say whether the row goes on without a bonus token."""
        self.waiting = held
        stats.redecided += held

    def replay(self, verifier: Verifier, rows: Rows, stats: SpeculationStats) -> None:
        """Where a token waits: run the tokens since the last settled one up to the root's predecessor again.

        One a forward, over their old cache rows. The root's own forward is the loop's next one.
        """
        if not self.waiting:
            return
        cache, pad = verifier.cache, rows.pads[0]
        length = cache.lengths[0]
        for slot in range(self.settled, length):
            cache.set_lengths([slot])
            verifier.forward(chain(rows.ids[:, pad + slot : pad + slot + 1]), rows, None)
        cache.set_lengths([length])
        stats.rounds += length - self.settled
        stats.replayed += length - self.settled
        self.settled = length + 1
