"""Acceptance and time counts of one `generate()` call."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class SpeculationStats:
    """What one call of `generate()` did. Counts are sums over the rows of the batch.

    The first token of each row comes from the prefill and counts nowhere here (prefill is no round). The last round
    of a row is cut at EOS or the length limit before it is counted.

    Attributes:
        rounds: target forwards after the prefill, one for each row that took part.
        generated: tokens those rounds produced, bonus tokens included.
        drafted: draft tokens verified (nodes of a tree, the root not counted).
        accepted: draft tokens kept.
        reached: `reached[i]`, rounds that had a draft token at position `i` whose predecessors were all accepted.
        accepted_at: `accepted_at[i]`, rounds whose draft token at position `i` was accepted.
        speculated: `speculated[i]`, rounds that drafted at position `i` at all.
        prefill_seconds, target_seconds, draft_seconds, total_seconds: wall time of the prefill, of the target and draft
            forwards after it, and of the whole call.
        candidates_per_round: most nodes in one verification, root included.
        redecided: tokens that `exact="margin"` held back for a forward of their own.
        replayed: single-token forwards that it ran before those for the tokens in front; `rounds` counts them too.
    """

    rounds: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    speculated: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    total_seconds: float = 0.0
    candidates_per_round: int = 0
    redecided: int = 0
    replayed: int = 0

    @property
    def tau(self) -> float:
        """Acceptance length: tokens a target forward, bonus token included, prefill excluded."""
        return self.generated / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def conditional_acceptance(self) -> list[float]:
        """For each draft position, the share accepted among rounds that had accepted all earlier positions."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted_at, self.reached)]

    @property
    def unconditional_acceptance(self) -> list[float]:
        """For each draft position, the share accepted among rounds that drafted it."""
        return [a / s if s else 0.0 for a, s in zip(self.accepted_at, self.speculated)]

    @property
    def cycle_efficiency(self) -> float:
        """Time in target and draft forwards over wall time, after the prefill."""
        wall = self.total_seconds - self.prefill_seconds
        return (self.target_seconds + self.draft_seconds) / wall if wall > 0 else 0.0

    def count_round(self, drafted_depth: int, nodes: int, accepted: int, generated: int) -> None:
        """Add one row's round: depth and number of its draft nodes, how many were kept, how many tokens came."""
        self.count_rounds(drafted_depth, nodes, np.array([accepted]), np.array([generated]))

    def count_rounds(self, drafted_depth: int, nodes: int, accepted: np.ndarray, generated: np.ndarray) -> None:
        """Add a round of several rows with draft trees of one size.

        Args:
            drafted_depth, nodes: depth and number of each row's draft nodes.
            accepted: int64 `[rows]`, how many of them were kept.
            generated: int64 `[rows]`, how many tokens came.
        """
        rows = len(accepted)
        self.rounds += rows
        self.generated += int(generated.sum())
        self.drafted += rows * nodes
        self.accepted += int(accepted.sum())
        # Rows that accepted at least 0, 1, 2, ... tokens.
        at_least = np.bincount(accepted, minlength=drafted_depth + 1)[::-1].cumsum()[::-1]
        for name, more in (
            ("speculated", np.full(drafted_depth, rows)),
            ("reached", at_least[:drafted_depth]),
            ("accepted_at", at_least[1 : drafted_depth + 1]),
        ):
            counts = getattr(self, name)
            counts.extend([0] * (drafted_depth - len(counts)))
            counts[:drafted_depth] = (more + counts[:drafted_depth]).tolist()

    def merge(self, other: SpeculationStats) -> None:
        """Add another call's counts and times to this one."""
        for name in ("reached", "accepted_at", "speculated"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count
        for name in ("rounds", "generated", "drafted", "accepted", "redecided", "replayed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("prefill_seconds", "target_seconds", "draft_seconds", "total_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.candidates_per_round = max(self.candidates_per_round, other.candidates_per_round)

    def as_dict(self) -> dict[str, float | int | list]:
        """Counts, rates and times as plain numbers (for JSON)."""
        return {
            "rounds": self.rounds,
            "generated": self.generated,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "conditional_acceptance": self.conditional_acceptance,
            "unconditional_acceptance": self.unconditional_acceptance,
            "prefill_seconds": self.prefill_seconds,
            "target_seconds": self.target_seconds,
            "draft_seconds": self.draft_seconds,
            "total_seconds": self.total_seconds,
            "cycle_efficiency": self.cycle_efficiency,
            "candidates_per_round": self.candidates_per_round,
            "redecided": self.redecided,
            "replayed": self.replayed,
        }
