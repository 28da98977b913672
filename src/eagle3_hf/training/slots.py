"""Which slots a training step scores and trains, and where documents end."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """`out[:, t] = x[:, t + by]`, zero (False) past the end. `x`: `[B, T]`."""
    return F.pad(x[:, by:], (0, min(by, x.shape[1])))


def document_starts(document_ids: torch.Tensor) -> torch.Tensor:
    """First slot of each slot's document, int64 `[B, T]`.

    Args:
        document_ids: int64 `[B, T]`; a run of equal ids is a document, negative ids are padding.
    """
    slots = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    new = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return torch.where(new, slots, torch.zeros_like(slots)).cummax(1).values


class Slots:
    """Slot `t` predicts token `t + 2 + k` at step `k`; its teacher stands on token `t + 1 + k`.

    Args:
        loss_mask: bool `[B, T]`, True on answer tokens.
        lengths: int64 `[B]`, real tokens of each row, or `None`.
        document_ids: int64 `[B, T]`, or `None`: a row is one document.

    Attributes:
        starts: int64 `[B, T]` or `None`, see [`document_starts`].
        positions: int64 `[B or 1, T]`, place in the document.
        answers: bool `[B, T]` by teacher token: the token it predicts is an answer token of the same document.
    """

    def __init__(
        self, loss_mask: torch.Tensor, lengths: torch.Tensor | None = None, document_ids: torch.Tensor | None = None
    ):
        mask = loss_mask.bool()
        slots = torch.arange(mask.shape[1], device=mask.device)
        if lengths is not None:
            mask = mask & (slots < lengths[:, None])
        self.starts = None if document_ids is None else document_starts(document_ids)
        if document_ids is not None:
            mask = mask & (document_ids >= 0)
        self.positions = slots[None] if self.starts is None else slots - self.starts
        self.answers = self.ahead(mask, 1)

    def ahead(self, x: torch.Tensor, by: int) -> torch.Tensor:
        """`out[:, t] = x[:, t + by]` where that is in the same document, else zero (False). `x`: `[B, T]`."""
        moved = shift(x, by)
        if self.starts is None:
            return moved
        # Past the end the shifted start is 0, which may equal the own one; there `moved` is zero already.
        return torch.where(shift(self.starts, by) == self.starts, moved, torch.zeros_like(moved))

    def teachable(self, in_vocabulary: torch.Tensor | None) -> torch.Tensor:
        """Teacher tokens that some slot learns from, bool `[B, T]`: no slot predicts the first two of a document."""
        found = self.answers & (self.positions > 0)
        return found if in_vocabulary is None else found & in_vocabulary

    def first(self, steps: int) -> int:
        """The first slot that is scored in some step, 0 if none is; one host-device sync."""
        any_scored = self.teachable(None).any(0).nonzero()
        # Step k predicts k tokens further on: step `steps - 1` of slot t is the first to reach the answer.
        return max(int(any_scored[0]) - steps, 0) if len(any_scored) else 0
