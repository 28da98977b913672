"""How good a draft is, while it trains: simulated acceptance length, and real `generate()`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .objective import TrainingTimeTest
from .slots import shift


def chain_counts(result: TrainingTimeTest, loss_mask: torch.Tensor) -> torch.Tensor:
    """Over the slots where generation would draft: how often step `k` was reached, and then right.

    A step is reached where all before it were right. Right means the teacher's first choice: on greedy answers, whose
    tokens are these choices, a chain of right steps is exactly what greedy generation accepts.

    Args:
        result: of a forward with `measure=True`.
        loss_mask: bool `[B, T]`, True on answer tokens.

    Returns:
        int64 `[2, steps]`: reached, right.
    """
    # Generation has sampled token t+1 when it drafts from slot t.
    alive = shift(loss_mask.bool(), 1)
    reached, right = [], []
    for scored, correct in zip(result.scored, result.correct):
        alive = alive & scored
        reached.append(alive.sum())
        alive = alive & correct
        right.append(alive.sum())
    return torch.stack([torch.stack(reached), torch.stack(right)])


def simulated_tau(conditional: Sequence[float]) -> float:
    """Tokens a target forward, bonus included, of a chain whose step `k` is right that often once it is reached."""
    return 1.0 + sum(math.prod(conditional[: k + 1]) for k in range(len(conditional)))


@dataclass
class AcceptanceCounts:
    """Sums over batches, and over processes after a reduction; the numbers come out at the end.

    Attributes:
        table: float64 `[6, steps]`: scored and correct slots, reached and right chain steps, trained slots and their
            summed loss.
    """

    table: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, table: torch.Tensor) -> None:
        """Add the counts of a batch, `[6, steps]`."""
        table = table.double()
        self.table = table if self.table.numel() == 0 else self.table + table

    def metrics(self) -> dict[str, float]:
        """`loss`, `tau`, and for each step `k` `accuracy_k` and `conditional_k`.

        `loss` is the first step's mean. Without a scored slot the result is empty.
        """
        if self.table.numel() == 0 or not bool(self.table[0].sum() > 0):
            return {}
        scored, correct, reached, right, slots, losses = self.table.tolist()
        conditional = [a / max(b, 1) for a, b in zip(right, reached)]
        out = {"loss": losses[0] / max(slots[0], 1), "tau": simulated_tau(conditional)}
        for k, (a, b) in enumerate(zip(correct, scored)):
            out[f"accuracy_{k}"] = a / max(b, 1)
            out[f"conditional_{k}"] = conditional[k]
        return out


@torch.no_grad()
def generation_acceptance(
    target: Any, draft: Any, prompts: Sequence[Sequence[int]], new_tokens: int, **drafting: Any
) -> dict[str, float]:
    """Greedy `generate()` on prompts, one after the other.

    Args:
        target: able to speculate (`enable_eagle3`).
        draft: in eval mode, on the target's device.
        prompts: token ids each.
        new_tokens: tokens to generate for each.
        drafting: options of `generate()`; default: the draft's own.

    Returns:
        `generate_tau`, `generate_acceptance` (accepted of drafted tokens) and `generate_tokens`.
    """
    from ..decoding.statistics import SpeculationStats

    stats, tokens = SpeculationStats(), 0
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=target.device)
        out = target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=draft,
            do_sample=False,
            max_new_tokens=new_tokens,
            **drafting,
        )
        tokens += out.shape[1] - ids.shape[1]
        stats.merge(target.speculation_stats)
    return {
        "generate_tau": float(stats.tau),
        "generate_acceptance": float(stats.acceptance_rate or 0.0),
        "generate_tokens": float(tokens),
    }
