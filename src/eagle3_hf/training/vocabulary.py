"""The draft's vocabulary: the target's most frequent answer tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


def count_tokens(documents: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int) -> torch.Tensor:
    """How often each token is an answer token.

    Args:
        documents: pairs of ids `[n]` (any integer dtype) and bool `[n]`, True on answer tokens.
        vocab_size: of the target.

    Returns:
        int64 `[vocab_size]`.

    Raises:
        ValueError: a token id outside the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, mask in documents:
        found = torch.bincount(torch.as_tensor(ids)[torch.as_tensor(mask)].long(), minlength=vocab_size)
        if len(found) > vocab_size:
            raise ValueError(f"token id {len(found) - 1} is outside the target's vocabulary of {vocab_size}")
        counts += found
    return counts


@dataclass(frozen=True)
class Vocabulary:
    """A chosen draft vocabulary.

    Attributes:
        ids: int64 `[size]`, target ids, ascending.
        coverage: share of the counted tokens that are in it, 0..1.
        seen: number of distinct tokens that were counted.
    """

    ids: torch.Tensor
    coverage: float
    seen: int


def choose_vocabulary(counts: torch.Tensor, size: int, always: Sequence[int] = ()) -> Vocabulary:
    """The `size` most frequent tokens, `always` included; the coverage is logged.

    Args:
        counts: int64 `[vocab_size]`, see [`count_tokens`].
        size: of the draft vocabulary.
        always: ids that must be in it (stop tokens).

    Raises:
        ValueError: nothing was counted, or `size` is too small for `always` or larger than the vocabulary.
    """
    vocab_size = len(counts)
    always = sorted(set(always))
    if not len(always) < size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size} must hold more than the {len(always)} tokens that are always in it, and at "
            f"most the target's {vocab_size}"
        )
    outside = [i for i in always if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"token ids {outside} are outside the target's vocabulary of {vocab_size}")
    total = int(counts.sum())
    if total == 0:
        raise ValueError("there is no answer token to count a draft vocabulary from: the loss masks are empty")
    ranked = counts.clone()
    ranked[always] = counts.max() + 1
    # Stable: where counts are equal (also none at all) the lower id, the earlier merge of the tokenizer, goes first.
    ids = ranked.argsort(descending=True, stable=True)[:size].sort().values
    made = Vocabulary(ids, float(counts[ids].sum()) / total, int((counts > 0).sum()))
    logger.info(
        "draft vocabulary: %d of %d tokens, %d seen in %d answer tokens, %.2f %% of which it covers",
        size,
        vocab_size,
        made.seen,
        total,
        100 * made.coverage,
    )
    return made
