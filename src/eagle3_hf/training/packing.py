"""Several documents in one row: no padding, and none sees another.

A packed row carries `document_ids`, which attention and shifts compare, and `position_ids` that start anew with each
document. Padding at the end of a row has document id -1.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

PADDING = -1


def pack(lengths: Sequence[int], documents: Sequence[int], length: int) -> list[list[int]]:
    """Put documents into rows of at most `length` tokens, best fit, longest first.

    Args:
        lengths: tokens of every document of the dataset.
        documents: those to pack, as indices into `lengths`.
        length: tokens a row.

    Returns:
        The documents of each row; every one of `documents` once.

    Raises:
        ValueError: a document is longer than a row.
    """
    rows: list[list[int]] = []
    # (room left, row), ascending: the first with enough room is the best fit.
    room: list[tuple[int, int]] = []
    for document in sorted(documents, key=lambda d: (-lengths[d], d)):
        size = lengths[document]
        if size > length:
            raise ValueError(f"a document of {size} tokens doesn't fit a row of {length}: cut documents to that length")
        at = bisect.bisect_left(room, (size, -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = length, len(rows)
            rows.append([])
        rows[row].append(document)
        bisect.insort(room, (left - size, row))
    return rows


def layout(sizes: Sequence[Sequence[int]], width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Document ids and positions of packed rows.

    Args:
        sizes: tokens of each document of each row.
        width: columns; default: the longest row.

    Returns:
        `document_ids` and `position_ids`, int64 `[rows, width]`. Ids count from 0 in each row; padding has id -1 and
        position 0.
    """
    width = width or max(sum(row) for row in sizes)
    ids = torch.full((len(sizes), width), PADDING, dtype=torch.long)
    positions = torch.zeros(len(sizes), width, dtype=torch.long)
    for row, row_sizes in enumerate(sizes):
        counts = torch.tensor(row_sizes)
        total = int(counts.sum())
        number = torch.repeat_interleave(torch.arange(len(row_sizes)), counts)
        ids[row, :total] = number
        positions[row, :total] = torch.arange(total) - (counts.cumsum(0) - counts)[number]
    return ids, positions


def visible(document_ids: torch.Tensor) -> torch.Tensor:
    """Bool `[B, T, T]`: causal, and within one document. Padding sees padding: no row is empty."""
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return causal & (document_ids[:, :, None] == document_ids[:, None, :])
