"""What a cache keeps from one `generate()` call to the next: its text, the draft's memory of it, and whose it is."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from .cache import SpeculativeCache
from .multimodal import model_offsets

logger = logging.getLogger(__name__)


class Origin:
    """The model that something was made with, without keeping it alive; copies stay, files forget it."""

    def __init__(self, model: Any = None):
        self._model = None if model is None else weakref.ref(model)

    def is_other(self, model: Any) -> bool:
        """Whether it was made with another object than `model`; `False` if that isn't known."""
        return self._model is not None and self._model() is not model

    def __deepcopy__(self, memo: dict) -> Origin:
        return self

    def __reduce__(self) -> tuple:
        return Origin, ()


@dataclass
class DraftMemory:
    """The draft's own keys and values of a text.

    Attributes:
        cache: slot `j` holds the text's position `j + offsets[row]`.
        offsets: tokens at the start of each row that the draft never saw.
        aux_ids: aux hidden states it read.
        origin: the draft.
    """

    cache: SpeculativeCache
    offsets: list[int]
    aux_ids: tuple[int, ...]
    origin: Origin


@dataclass
class KeptText:
    """Beside a target's keys and values of `n` tokens a row.

    Attributes:
        texts: int64 `[n + 1]` for each row: the token whose keys and values come next, too.
        draft: as many tokens in the draft's memory, or `None` if it has none.
        origin: the target.
        offsets: how far each row's positions are ahead of counting, as multimodal RoPE has them behind images; `None`
            for nowhere.
        media_ends: tokens of each row up to its last image, below which it can't be cut; `None` for no images.
    """

    texts: list[torch.Tensor]
    draft: DraftMemory | None
    origin: Origin
    offsets: list[int] | None = None
    media_ends: list[int] | None = None

    def select_rows(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.offsets = self.offsets and [self.offsets[row] for row in rows]
        self.media_ends = self.media_ends and [self.media_ends[row] for row in rows]
        if self.draft is not None:
            self.draft.cache.select_rows(rows)
            self.draft.offsets = [self.draft.offsets[row] for row in rows]

    def shorten(self, lengths: list[int]) -> None:
        self.texts = [text[: length + 1] for text, length in zip(self.texts, lengths)]
        if self.draft is not None:
            self.draft.offsets = [min(offset, length) for offset, length in zip(self.draft.offsets, lengths)]
            self.draft.cache.set_lengths([length - offset for length, offset in zip(lengths, self.draft.offsets)])

    def shared(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
        """How many tokens each row has in common with these left-padded texts, from the start on."""
        width = input_ids.shape[1]
        pads = [0] * len(input_ids)
        if attention_mask is not None:
            pads = (width - attention_mask.long().sum(dim=1)).tolist()
        lengths = [min(len(text), width - pad) for text, pad in zip(self.texts, pads)]
        mine = [text[:length].to(input_ids.device) for text, length in zip(self.texts, lengths)]
        given = [ids[pad : pad + length] for ids, pad, length in zip(input_ids, pads, lengths)]
        same = torch.nn.utils.rnn.pad_sequence(
            [a == b for a, b in zip(mine, given)], batch_first=True, padding_value=False
        )
        return same.long().cumprod(dim=1).sum(dim=1).tolist()


def resume(
    past: Any, input_ids: torch.Tensor, pads: list[int], target: Any, num_layers: int
) -> tuple[SpeculativeCache, KeptText]:
    """The memory that a `past_key_values` of an earlier call holds, ready to go on.

    Args:
        past: a `SpeculativeCache` that `generate()` with a draft returned (used in place, with the draft's memory), or
            a `DynamicCache` of plain `generate()` or a forward (copied; the draft then knows only what comes after).
        input_ids: int64 `[batch, text]`, the whole texts, left-padded.
        pads: columns of padding in front of each row's text.
        target, num_layers: who will go on with it.

    Raises:
        ValueError: the cache belongs to another model, batch or text, or is of a kind that can't be taken over.
    """
    lengths = [input_ids.shape[1] - pad for pad in pads]
    if not isinstance(past, SpeculativeCache):
        past = _from_dynamic(past, pads, num_layers)
        texts = [ids[pad : pad + have + 1] for ids, pad, have in zip(input_ids, pads, past.lengths)]
        # As in plain generation, positions behind images are what the model remembers of its last prompt.
        past.kept = KeptText(texts, None, Origin(target), model_offsets(target, pads))
    kept = past.kept
    if len(past.layers) != num_layers or (kept is not None and kept.origin.is_other(target)):
        raise ValueError("past_key_values is another model's: pass the one that this target's generate() returned")
    if past.lengths and len(past.lengths) != len(lengths):
        raise ValueError(f"past_key_values holds {len(past.lengths)} rows, the input has {len(lengths)}")
    if not any(past.lengths):
        past.reset()
        return past, KeptText([], None, Origin(target))
    if kept is None:
        raise ValueError("past_key_values doesn't know its text: pass one that generate() returned")
    for row, (have, length) in enumerate(zip(past.lengths, lengths)):
        if have >= length:
            raise ValueError(
                f"past_key_values holds {have} tokens of row {row}, whose text has {length}: input_ids must be the "
                "whole text, with at least one token that isn't cached"
            )
    mask = torch.arange(input_ids.shape[1])[None] >= torch.tensor(pads)[:, None]
    shared = kept.shared(input_ids, mask)
    for row, (same, have) in enumerate(zip(shared, past.lengths)):
        if same < have:
            raise ValueError(
                f"past_key_values holds another text: row {row} differs at token {same} of {have}. "
                "past_key_values.trim_to(input_ids, attention_mask) keeps what is the same"
            )
    if kept.draft is not None:
        # The token behind the cached ones (an EOS, say) may have been replaced, and the draft's last slot has read it.
        past.shorten([min(have, same - 1) for same, have in zip(shared, past.lengths)])
    for row, (have, end) in enumerate(zip(past.lengths, kept.media_ends or [])):
        if have < end:
            raise ValueError(
                f"past_key_values holds {have} tokens of row {row}, whose images end at token {end}: it can't go on "
                "from before or inside an image. Run the whole text again, without past_key_values"
            )
    return past, kept


def draft_memory(kept: KeptText, draft: Any, aux_ids: tuple[int, ...]) -> DraftMemory | None:
    """The draft's part, `None` if there is none.

    Raises:
        ValueError: it was made by another draft.
    """
    memory = kept.draft
    if memory is not None and (memory.origin.is_other(draft) or memory.aux_ids != aux_ids):
        raise ValueError(
            "past_key_values was made with another draft: pass that one, or set past_key_values.kept.draft = None "
            "to go on without what it knew of the text"
        )
    return memory


def refuse_other_kinds(past: Any) -> None:
    """Check that a call with a draft can start from this `past_key_values`, which may be empty.

    Raises:
        ValueError: it is neither a `SpeculativeCache` nor a plain `DynamicCache`.
    """
    if isinstance(past, SpeculativeCache):
        return
    kinds = {type(layer).__name__ for layer in getattr(past, "layers", [None])}
    # Other kinds (static, quantised, offloaded) hold their keys in forms of their own.
    if not isinstance(past, Cache) or kinds - {"DynamicLayer", "DynamicSlidingWindowLayer"}:
        name = type(past).__name__
        raise ValueError(
            f"past_key_values of type {name} isn't supported with an EAGLE-3 draft: pass a DynamicCache, or what "
            "generate() with a draft returned"
        )
    if getattr(past, "offloading", False) or type(past) is not DynamicCache:
        raise ValueError(f"past_key_values must be a DynamicCache that isn't offloaded, got {type(past).__name__}")
    if not past.get_seq_length():
        logger.warning(
            "an empty DynamicCache as past_key_values stays empty with a draft: to go on from this call, pass what it "
            "returns with return_dict_in_generate=True"
        )


def _from_dynamic(past: Any, pads: list[int], num_layers: int) -> SpeculativeCache:
    """A copy of a `DynamicCache`, each row's padding left out."""
    columns = past.get_seq_length()
    made = SpeculativeCache(len(past.layers) if past.layers else num_layers)
    if not columns:
        return made
    if len(past.layers[0].keys) != len(pads):
        raise ValueError(f"past_key_values holds {len(past.layers[0].keys)} rows, the input has {len(pads)}")
    lengths = [max(0, columns - pad) for pad in pads]
    made.begin_write(None, max(lengths), batch=len(pads))
    for i, layer in enumerate(past.layers):
        stored = (layer.keys, layer.values)
        # Sliding layers hold the end of the text only; no later token looks at what is left out.
        stored = tuple(torch.nn.functional.pad(t, (0, 0, columns - t.shape[2], 0)) for t in stored)
        device = layer.keys.device
        at = torch.arange(max(lengths), device=device)[None] + torch.tensor(pads, device=device)[:, None]
        rows = torch.arange(len(pads), device=device)[:, None]
        made.layers[i].update(*(t[rows, :, at.clamp(max=columns - 1)].transpose(1, 2) for t in stored))
    made.set_lengths(lengths)
    return made
