"""What acceptance rates promise: expected tokens a round, and the speed-up that follows from costs.

The formulas follow Leviathan et al. (arXiv 2211.17192, sections 2-3). They assume what measurements only approximate;
each function says what.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def acceptance_probability(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Chance that a token drawn from `q` is kept: `sum min(p, q)`, which is one minus their total variation distance.

    Exact for one sampled draft token at one position. For a draft that always proposes token `x` it is `p(x)`, which
    the same sum gives with a one-hot `q`.

    Args:
        target_probs, draft_probs: float `[..., vocab]`, normalised, all processing done.

    Returns:
        float `[...]`.
    """
    return torch.minimum(target_probs, draft_probs).sum(dim=-1)


def _check(acceptance: float, drafted: int) -> None:
    if not 0 <= acceptance <= 1:
        raise ValueError(f"an acceptance rate lies in [0, 1], got {acceptance}")
    if drafted != int(drafted):
        raise ValueError(f"the number of drafted tokens must be whole, got {drafted}")
    if drafted < 0:
        raise ValueError(f"the number of drafted tokens can't be negative, got {drafted}")


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Mean tokens a round of a chain of `drafted` tokens, bonus included: `(1 - a^(K+1)) / (1 - a)`.

    Assumes that every position is accepted with the same chance `a`, independently of the others. Real drafts get
    worse with depth: [`expected_tokens_at`] takes a rate for each position.
    """
    _check(acceptance, drafted)
    if acceptance == 1:
        return drafted + 1.0
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def expected_tokens_at(conditional: Sequence[float]) -> float:
    """Mean tokens a round from each position's acceptance given that all before it were accepted.

    `SpeculationStats.conditional_acceptance` holds such rates. Exact in the mean for a chain whose rounds all draft to
    the full depth and none of which is cut by EOS or the length limit.
    """
    total, alive = 1.0, 1.0
    for rate in conditional:
        _check(rate, 0)
        alive *= rate
        total += alive
    return total


def expected_tokens_tree(reach: Sequence[float]) -> float:
    """Mean tokens a round of a tree: one plus the chance of each node (root not counted) to be on the accepted path."""
    for rate in reach:
        _check(rate, 0)
    return 1.0 + sum(reach)


def speedup(acceptance: float, drafted: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens a second over those of plain decoding.

    Assumes what [`expected_tokens`] does, and that a round costs `K` draft forwards and one verification, nothing else
    (no launch gaps, no processing, no prefill).

    Args:
        acceptance: chance of one draft token to be accepted.
        drafted: draft tokens a round, `K`.
        draft_cost: time of a draft forward over that of a one-token target forward.
        verify_cost: time of the forward over `K + 1` tokens over that of one token. 1 is the paper's assumption (memory
            bound, as on large GPUs); on a CPU it is more.

    Raises:
        ValueError: a rate outside `[0, 1]`, or costs that aren't positive.
    """
    if not (draft_cost >= 0 and verify_cost > 0):
        raise ValueError(f"costs must be positive, got draft {draft_cost} and verification {verify_cost}")
    return expected_tokens(acceptance, drafted) / (drafted * draft_cost + verify_cost)


def best_drafted(
    acceptance: float, draft_cost: float, verify_costs: Sequence[float] | None = None, most: int = 32
) -> int:
    """The number of draft tokens with the largest [`speedup`]; 0 means that drafting doesn't pay.

    Args:
        acceptance, draft_cost: as there.
        verify_costs: cost of verifying 0, 1, 2, ... draft tokens; 1 for any number where `None`.
        most: largest number considered.

    Raises:
        ValueError: as there; or nothing to choose from, `most` below 0 or no costs.
    """
    if most < 0 or (verify_costs is not None and not len(verify_costs)):
        raise ValueError(f"there is no number to choose: most is {most}, verify_costs {verify_costs}")
    costs = [1.0] * (most + 1) if verify_costs is None else list(verify_costs)[: most + 1]
    speeds = [speedup(acceptance, drafted, draft_cost, cost) for drafted, cost in enumerate(costs)]
    return max(range(len(speeds)), key=speeds.__getitem__)
