"""Tokenised documents with loss masks: what features are made of, and what online training reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from .data import Conversation, number_of
from .masks import AssistantMasks, MaskError
from .plan import is_held_out

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """One training text.

    Attributes:
        input_ids: int32 `[n]`.
        loss_mask: bool `[n]`, True on the tokens that the target writes.
        group: documents of one group are all training or all held out.
        temperature: the answer was drawn at; NaN where it isn't known.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    group: int
    temperature: float = float("nan")

    @property
    def index(self) -> int:
        """63-bit number that stands for the content."""
        return number_of(self.input_ids.tobytes() + self.loss_mask.tobytes())

    def __len__(self) -> int:
        return len(self.input_ids)


def tokenise(
    conversations: Iterable[Conversation],
    masks: AssistantMasks | None,
    *,
    vocab_size: int,
    max_length: int | None = None,
    skip_bad: bool = False,
) -> Iterator[Document]:
    """Documents of conversations.

    A document is cut to `max_length`; one that has no answer token then is left out. How many of each is logged.

    Args:
        conversations: from `read_conversations`.
        masks: of the target; may be `None` where all rows bring their tokens.
        vocab_size: of the target; a larger token id is an error, since the data is then of another model.
        max_length: most tokens a document.
        skip_bad: leave out conversations that have no certain mask instead of stopping at the first.

    Raises:
        ValueError: a bad mask (its sample is shown), tokens of another vocabulary, or nothing left.
    """
    cut = empty = bad = given = 0
    for conversation in conversations:
        if conversation.tokens is not None:
            parts = [conversation.tokens]
        elif masks is None:
            raise ValueError(f"row {conversation.index + 1} has no token ids, and no chat template was given")
        else:
            try:
                parts = [(part.input_ids, part.loss_mask) for part in masks(conversation.messages)]
            except MaskError as error:
                if not skip_bad:
                    raise MaskError(f"row {conversation.index + 1}: {error}") from None
                if not bad:
                    logger.warning("row %d left out: %s", conversation.index + 1, error)
                bad += 1
                continue
        temperature = float("nan") if conversation.temperature is None else conversation.temperature
        for ids, mask in parts:
            tokens, learned = np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=bool)
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                raise ValueError(
                    f"row {conversation.index + 1} has token ids {tokens.min()}..{tokens.max()}, the target's "
                    f"vocabulary has {vocab_size}: these are tokens of another model"
                )
            if max_length is not None and len(tokens) > max_length:
                tokens, learned, cut = tokens[:max_length], learned[:max_length], cut + 1
            # A draft's first guess is the third token: it reads the first one's feature and the second's embedding.
            if not learned[2:].any():
                empty += 1
                continue
            given += 1
            yield Document(tokens, learned, conversation.group, temperature)
    if bad or cut or empty:
        logger.warning(
            "%d conversations without a certain mask left out, %d documents cut to %s tokens, %d without an answer "
            "token left out",
            bad,
            cut,
            max_length,
            empty,
        )
    if not given:
        raise ValueError("no document with an answer token is left")


class SplitDocuments(Dataset):
    """What datasets of documents share: lengths and the held-out split.

    Attributes:
        lengths: tokens of each document.
        greedy: whether its answer was decoded greedily.
        train, held_out: indices of the documents.
    """

    def __init__(self, lengths: Sequence[int], groups: Sequence[int], greedy: Sequence[bool], held_out: float):
        if not 0 <= held_out < 1:
            raise ValueError(f"the held-out share must be at least 0 and below 1; got {held_out}")
        self.lengths, self.greedy = list(lengths), list(greedy)
        apart = [is_held_out(group, held_out) for group in groups]
        self.train = [i for i, out in enumerate(apart) if not out]
        self.held_out = [i for i, out in enumerate(apart) if out]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def train_lengths(self) -> list[int]:
        """Tokens of each training document, in the order of `train`, for `BatchPlan`."""
        return [self.lengths[document] for document in self.train]


class TokenDataset(SplitDocuments):
    """Documents in memory, for training with the target in the loop.

    An item is `{"input_ids": int64 [n], "loss_mask": bool [n]}`.

    Args:
        documents: from [`tokenise`]; repeated ones are kept once.
        held_out: share of the groups that isn't trained on.
    """

    def __init__(self, documents: Iterable[Document], held_out: float = 0.02):
        self.documents = list({document.index: document for document in documents}.values())
        super().__init__(
            [len(document) for document in self.documents],
            [document.group for document in self.documents],
            [document.temperature == 0 for document in self.documents],
            held_out,
        )

    def __getitem__(self, document: int) -> dict[str, torch.Tensor]:
        found = self.documents[document]
        return {
            "input_ids": torch.from_numpy(found.input_ids).long(),
            "loss_mask": torch.from_numpy(found.loss_mask),
        }

    def answers(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and mask of each training document, for `count_tokens`."""
        for document in self.train:
            item = self[document]
            yield item["input_ids"], item["loss_mask"]
