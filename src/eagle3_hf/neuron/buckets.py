"""Which compiled shape serves a request: decided on the host, before any graph runs."""

from __future__ import annotations

from collections.abc import Sequence

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
