"""The measures as plain functions, on blocks: what each target forward after the prefill gave.

Conventions, the same everywhere here: the bonus token counts, the prefill is no round, and the last round is cut at EOS
or the length limit before it is counted. docs/evaluation.md has the names that other tools use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Block:
    """One round of one row.

    Attributes:
        tokens: ids that the round gave, in order.
        accepted: how many of them, from the first on, are draft tokens. The rest came from the target.
        depth: draft positions: length of a chain, depth of a tree; 0 where nothing was drafted.
        nodes: draft tokens verified; `None` for a chain, which has as many as it is deep.
    """

    tokens: tuple[int, ...]
    accepted: int = 0
    depth: int = 0
    nodes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= min(len(self.tokens), self.depth):
            raise ValueError(
                f"{self.accepted} accepted tokens in a round of {len(self.tokens)} tokens drafted {self.depth} deep"
            )
        if self.nodes is not None and self.nodes < self.depth:
            raise ValueError(f"{self.nodes} draft tokens can't be {self.depth} deep")

    @property
    def verified(self) -> int:
        """Draft tokens verified in this round."""
        return self.depth if self.nodes is None else self.nodes


def cut_blocks(
    blocks: Sequence[Block], eos_token_ids: Collection[int] = (), max_tokens: int | None = None
) -> list[Block]:
    """End the text behind its first EOS token, or after `max_tokens` tokens; later rounds are dropped.

    A round that is cut keeps its draft (that was verified all the same) and loses the tokens behind the cut.
    """
    kept: list[Block] = []
    left = max_tokens
    for block in blocks:
        if left == 0:
            break
        tokens = block.tokens if left is None else block.tokens[:left]
        end = next((place for place, token in enumerate(tokens, start=1) if token in eos_token_ids), None)
        tokens = tokens[:end]
        kept.append(Block(tokens, min(block.accepted, len(tokens)), block.depth, block.nodes))
        if end is not None:
            break
        if left is not None:
            left -= len(tokens)
    return kept


def acceptance_length(blocks: Sequence[Block]) -> float:
    """tau: tokens a round, bonus included. 0 without rounds."""
    return sum(len(block.tokens) for block in blocks) / len(blocks) if blocks else 0.0


def acceptance_rate(blocks: Sequence[Block]) -> float:
    """Accepted over verified draft tokens, in `[0, 1]`. 0 where nothing was drafted."""
    verified = sum(block.verified for block in blocks)
    return sum(block.accepted for block in blocks) / verified if verified else 0.0


def position_counts(blocks: Sequence[Block]) -> tuple[list[int], list[int], list[int]]:
    """For each draft position: rounds that drafted it, rounds whose earlier positions all held, rounds that kept it."""
    depth = max((block.depth for block in blocks), default=0)
    drafted = [sum(block.depth > place for block in blocks) for place in range(depth)]
    reached = [sum(block.depth > place and block.accepted >= place for block in blocks) for place in range(depth)]
    kept = [sum(block.accepted > place for block in blocks) for place in range(depth)]
    return drafted, reached, kept


def conditional_acceptance(blocks: Sequence[Block]) -> list[float]:
    """For each draft position, the share accepted among rounds that had accepted all earlier positions."""
    _, reached, kept = position_counts(blocks)
    return [k / r if r else 0.0 for k, r in zip(kept, reached)]


def unconditional_acceptance(blocks: Sequence[Block]) -> list[float]:
    """For each draft position, the share accepted among all rounds that drafted it."""
    drafted, _, kept = position_counts(blocks)
    return [k / d for k, d in zip(kept, drafted)]


def tokens_per_forward(tokens: int, forwards: int) -> float:
    """All tokens over all target forwards, the prefill and its token counted on both sides. 0 without forwards."""
    return tokens / forwards if forwards else 0.0


def cycle_efficiency(target_seconds: float, draft_seconds: float, wall_seconds: float) -> float:
    """Share of the wall time after the prefill that is spent inside target and draft forwards. 0 without wall time."""
    return (target_seconds + draft_seconds) / wall_seconds if wall_seconds > 0 else 0.0


def losslessness(outputs: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> float:
    """Share of prompts whose token ids are those of plain greedy generation, all of them, in `[0, 1]`.

    Raises:
        ValueError: the two lists don't have the same length, or are empty.
    """
    if len(outputs) != len(plain):
        raise ValueError(f"{len(outputs)} outputs against {len(plain)} of plain generation")
    if len(outputs) == 0:  # may be an array, whose truth is another question
        raise ValueError("no outputs to compare")
    return sum(list(a) == list(b) for a, b in zip(outputs, plain)) / len(outputs)


def speed_ratio(pairs: Sequence[tuple[tuple[int, float], tuple[int, float]]]) -> float:
    """Tokens/s of a method over tokens/s of the baseline: all tokens over all seconds of each.

    Args:
        pairs: for each prompt `((tokens, seconds) of the method, (tokens, seconds) of the baseline)`.

    Raises:
        ValueError: no pair, or no time or no tokens on one of the sides.
    """
    if not pairs:
        raise ValueError("no pairs to compare")
    speeds = []
    for side in (0, 1):
        tokens, seconds = (sum(pair[side][part] for pair in pairs) for part in (0, 1))
        if seconds <= 0 or tokens <= 0:
            raise ValueError(f"can't compare speeds: {tokens} tokens in {seconds} seconds")
        speeds.append(tokens / seconds)
    return speeds[0] / speeds[1]


def bootstrap_interval(
    items: Sequence[_Item],
    statistic: Callable[[Sequence[_Item]], float],
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic: `items` drawn anew with replacement, prompts being the items.

    It says how much another choice of as many prompts would move the number; drift of the machine that all methods
    share isn't in it, nor is what one would see on another machine.

    Args:
        confidence: probability the interval should hold, in `(0, 1)`.
        resamples: draws; the same seed gives the same interval.

    Raises:
        ValueError: no items, no draws, or a confidence outside `(0, 1)`.
    """
    if not items:
        raise ValueError("no items to resample")
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, got {confidence}")
    if resamples < 1:
        raise ValueError(f"a bootstrap needs at least one draw, got {resamples}")
    draw = random.Random(seed)
    values = sorted(statistic(draw.choices(items, k=len(items))) for _ in range(resamples))
    tail = (1 - confidence) / 2
    return values[round(tail * (resamples - 1))], values[round((1 - tail) * (resamples - 1))]


def expected_length_by_depth(conditional: Sequence[float]) -> list[float]:
    """tau that a chain of 1, 2, ... tokens would have, from the rates of a longer one; see `expected_tokens_at`."""
    return list(accumulate(accumulate(conditional, lambda a, b: a * b), initial=1.0))[1:]
