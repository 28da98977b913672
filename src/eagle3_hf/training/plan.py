"""Which documents are held out, and which the target runs over together."""

from __future__ import annotations

from collections.abc import Sequence


def is_held_out(group: int, share: float) -> bool:
    """Whether a group belongs to the held-out `share`; by a hash, so it stays there when the data grows."""
    return (group * 2654435761 % 2**32) / 2**32 < share


def length_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """All documents, shortest first, in batches of at most `budget` padded tokens (a longer one alone)."""
    out: list[list[int]] = []
    current: list[int] = []
    for position in sorted(range(len(lengths)), key=lengths.__getitem__):
        if current and (len(current) + 1) * lengths[position] > budget:
            out.append(current)
            current = []
        current.append(position)
    return [*out, current] if current else out
