"""RejectionLogitsProcessor: the rejection rule's second half as a `LogitsProcessor`."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor

from .rejection_tree import reject_child


class RejectionLogitsProcessor(LogitsProcessor):
    """Turns target scores of one position into those of the residual distribution, given what was rejected there.

    Sampling from the result is the step after a rejection (Leviathan et al., arXiv 2211.17192; several candidates as in
    SpecInfer, arXiv 2305.09781), so the rule can be put together from transformers' own parts: reject, then `generate`
    or sample on with this processor.

    The scores it gets must be the fully processed ones, so it stands **last**. `generate()` puts processors that a user
    passes before temperature, top-k and top-p; targets of this package move this one behind them (`runs_last`). With
    other models pass the warpers by hand, in front of it.

    Args:
        rejected: int64 `[batch, C]`, rejected draft tokens in the order they were tried, -1 for none.
        draft_probs: float `[batch, vocab]`, what the first of them was drawn from; `None` for a deterministic draft.
        replacement: later ones were drawn from the same distribution again; else from it without those before.
        length: act only when `input_ids` has this many columns, which is the position of the rejection; `None` always.

    Raises:
        ValueError: shapes don't fit.
    """

    runs_last = True

    def __init__(
        self,
        rejected: torch.Tensor,
        draft_probs: torch.Tensor | None = None,
        replacement: bool = False,
        length: int | None = None,
    ):
        if rejected.dim() != 2:
            raise ValueError(f"rejected must be [batch, candidates], got {list(rejected.shape)}")
        if draft_probs is not None and draft_probs.shape[0] != rejected.shape[0]:
            raise ValueError(f"rejected has {rejected.shape[0]} rows, draft_probs has {draft_probs.shape[0]}")
        self.rejected, self.draft_probs, self.replacement, self.length = rejected, draft_probs, replacement, length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Log-probabilities of the residual, float32 `[batch, vocab]`; -inf where it is zero."""
        if self.length is not None and input_ids.shape[1] != self.length:
            return scores
        if scores.shape[0] != self.rejected.shape[0]:
            raise ValueError(
                f"rejected tokens were given for {self.rejected.shape[0]} rows, scores have {scores.shape[0]}"
            )
        if self.draft_probs is not None and self.draft_probs.shape != scores.shape:
            raise ValueError(f"draft_probs must be {list(scores.shape)}, got {list(self.draft_probs.shape)}")
        probs = scores.float().softmax(dim=-1)
        q = None if self.draft_probs is None else self.draft_probs.to(probs)
        for child in self.rejected.to(scores.device).unbind(dim=1):
            probs, q = reject_child(probs, q, child, self.replacement)
        return probs.log()
