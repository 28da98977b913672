"""Where the logits of a speculating batch lie when its rows are one flat sequence of tokens, one behind the other."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class SpeculationMetadata:
    """Index tensors of one verification over a flat batch.

    Each row schedules some tokens; the last `num_draft_tokens[i]` of them are draft tokens. Logits are needed at the
    token before the first draft token, and at every draft token: the last of them gives the bonus token.

    Attributes:
        num_draft_tokens: int64 `[batch]`.
        cu_num_draft_tokens: int64 `[batch]`, inclusive sums of it.
        logits_indices: int64 `[drafts + batch]`, places in the flat batch where logits are needed.
        target_logits_indices: int64 `[drafts]`, which of those logits judge draft tokens.
        bonus_logits_indices: int64 `[batch]`, which of them give the bonus tokens.
        max_spec_len: most draft tokens of a row.
        draft_token_ids: int64 `[drafts]`, or `None` when no `input_ids` were given.
    """

    num_draft_tokens: torch.Tensor
    cu_num_draft_tokens: torch.Tensor
    logits_indices: torch.Tensor
    target_logits_indices: torch.Tensor
    bonus_logits_indices: torch.Tensor
    max_spec_len: int
    draft_token_ids: torch.Tensor | None = None

    @classmethod
    def build(
        cls,
        cu_num_scheduled_tokens: Sequence[int],
        num_draft_tokens: Sequence[int],
        input_ids: torch.Tensor | None = None,
        max_spec_len: int | None = None,
        device: torch.device | str | None = None,
    ) -> SpeculationMetadata:
        """Build the indices; the counts are the scheduler's and live on the host, so nothing is synchronised.

        Args:
            cu_num_scheduled_tokens: `[batch]`, inclusive sums of the tokens that each row schedules.
            num_draft_tokens: `[batch]`, how many of a row's tokens, the last ones, are drafts.
            input_ids: int64 `[total]`, the flat batch; gives `draft_token_ids`.
            max_spec_len: pad to this many instead of the largest count, for static shapes.
            device: of the tensors; default that of `input_ids`, else the CPU.

        Raises:
            TypeError: counts that aren't whole numbers.
            ValueError: lengths differ, a count is negative, a row schedules fewer than `num_draft_tokens + 1` tokens,
                a row drafts more than `max_spec_len`, or `input_ids` aren't as many as are scheduled.
        """
        # index, not int: a fraction is a mistake, not to be cut off.
        ends, counts = list(map(operator.index, cu_num_scheduled_tokens)), list(map(operator.index, num_draft_tokens))
        if len(ends) != len(counts):
            raise ValueError(f"{len(ends)} rows are scheduled, num_draft_tokens has {len(counts)}")
        longest = max(counts, default=0)
        width = longest if max_spec_len is None else max_spec_len
        for row, (end, start, count) in enumerate(zip(ends, [0, *ends[:-1]], counts)):
            if count < 0 or end - start < count + 1:
                raise ValueError(f"row {row} schedules {end - start} tokens, {count} of them drafts: it needs at least "
                                 "the token before the drafts too")  # fmt: skip
            if count > width:
                raise ValueError(f"row {row} has {count} draft tokens, max_spec_len is {width}")
        if input_ids is not None and input_ids.shape != (ends[-1] if ends else 0,):
            raise ValueError(f"{ends[-1] if ends else 0} tokens are scheduled, input_ids must be as many behind one "
                             f"another, got {list(input_ids.shape)}")  # fmt: skip
        device = input_ids.device if device is None and input_ids is not None else device
        num = torch.tensor(counts, dtype=torch.long)
        needed = num + 1
        cu_needed = needed.cumsum(0)
        total = sum(counts)
        # Flat place = own row's start + place within the row; `repeat_interleave` spreads row values over entries.
        entry = torch.arange(total + len(counts))
        shift = torch.tensor(ends, dtype=torch.long) - cu_needed
        logits_indices = entry + shift.repeat_interleave(needed)
        # Target logits skip one bonus logit for every row before their own.
        targets = torch.arange(total) + torch.arange(len(counts)).repeat_interleave(num)
        logits_indices, targets = logits_indices.to(device), targets.to(device)
        drafts = None if input_ids is None else input_ids.to(device)[logits_indices[targets + 1]]
        return cls(
            num_draft_tokens=num.to(device),
            cu_num_draft_tokens=num.cumsum(0).to(device),
            logits_indices=logits_indices,
            target_logits_indices=targets,
            bonus_logits_indices=(cu_needed - 1).to(device),
            max_spec_len=width,
            draft_token_ids=drafts,
        )
