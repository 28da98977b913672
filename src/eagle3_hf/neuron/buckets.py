"""Which compiled shape serves a request: decided on the host, before any graph runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SMALLEST_CONTEXT = 64


def context_buckets(sequence_length: int, smallest: int = SMALLEST_CONTEXT) -> list[int]:
    """Powers of two from `smallest`, and `sequence_length` itself."""
    made, size = [], smallest
    while size < sequence_length:
        made.append(size)
        size *= 2
    return [*made, sequence_length]


def pick(needed: int, buckets: Sequence[int], what: str) -> int:
    """The smallest bucket that holds `needed`.

    Raises:
        ValueError: none does.
    """
    for bucket in buckets:
        if needed <= bucket:
            return bucket
    raise ValueError(f"{what} {needed} is above the largest compiled bucket, {max(buckets)}: export with a larger one")


def decode_threshold(draft_tokens: int) -> int:
    """Most new tokens a row that count as decoding: `1 + K`, the last token and `K` drafts.

    Up to that many go through the graphs compiled for a round; more is a context pass, through a bucket. A scheduler
    that calls only single tokens "decode" would send every verification through the prompt's graphs.
    """
    return 1 + draft_tokens


def paged_slots(positions: torch.Tensor, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where positions lie in a paged memory: `block_table[pos // block_size] * block_size + pos % block_size`.

    The graphs here use one contiguous stretch a row, where the slot is the position. This is the arithmetic for a
    server that keeps its memory in blocks; it is static and has an XLA lowering.

    Args:
        positions: int32 `[batch, n]`, each below `block_table.shape[1] * block_size`.
        block_table: int32 `[batch, blocks]`, the physical number of each block of a row.
        block_size: slots in a block.

    Returns:
        int32 `[batch, n]` physical slots.
    """
    block = torch.div(positions, block_size, rounding_mode="floor")
    physical = block_table.gather(1, block.long())
    return physical * block_size + positions % block_size
