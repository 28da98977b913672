"""The draft vocabulary: `d2t`, `t2d`, and the number of tokens on either side, checked before a draft is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..modeling_eagle3 import Eagle3DraftModel
from .provenance import Override

# Below this, a list without neighbours may be chance; a frequency-pruned vocabulary of this size always has some.
_TELLING_SIZE = 32
_MOST_PADDING = 1024


@dataclass
class Vocabulary:
    """What was settled.

    Attributes:
        target_size: tokens of the target, `V`.
        draft_size: rows of the draft's head, `Vd`.
        d2t: int64 `[Vd]`, offsets.
        t2d: bool `[V]`.
        summary: one line for people.
        overridden: config values that lost.
        warnings: see [`Provenance`].
    """

    target_size: int
    draft_size: int
    d2t: torch.Tensor
    t2d: torch.Tensor
    summary: str
    overridden: list[Override] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, it has shape {tuple(tensor.shape)}")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(
            f"{name} is stored as {tensor.dtype}, which doesn't hold token ids exactly (a cast of the whole "
            "checkpoint?): the map is lost, get the original file"
        )
    return tensor


def unfilled_map(d2t: torch.Tensor, size: int, t2d: torch.Tensor | None) -> list[str]:
    """Recognise a `d2t` that was registered and never filled in: all zeros, which reads as the first tokens.

    Args:
        d2t: as stored, `[Vd]`.
        size: tokens of the target.
        t2d: as stored, `[V]`, if it was.

    Returns:
        A warning, where nothing tells the two apart.

    Raises:
        ValueError: `t2d` keeps other tokens.
    """
    count = len(d2t)
    if count >= size or bool(d2t.any()):
        return []
    if t2d is None:
        return [
            f"d2t is all zeros: the draft's vocabulary would be the target's first {count} tokens. A map that was "
            "never filled in looks the same; if no token is ever accepted, that is why"
        ]
    if not _same_set(torch.arange(count, device=t2d.device), t2d):
        raise ValueError(
            f"d2t is all zeros, which means the target's first {count} tokens, but t2d keeps others "
            f"({int(t2d.bool().sum())} tokens): the map was never filled in. Every drafted token would be wrong"
        )
    return []


def _valid(ids: torch.Tensor, size: int) -> bool:
    return bool((ids >= 0).all() and (ids < size).all() and ids.unique().numel() == ids.numel())


def _faults(ids: torch.Tensor, size: int) -> str:
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.numel():
        return f"{outside.numel()} target ids are outside 0..{size - 1} (such as {int(outside[0])})"
    return f"{ids.numel() - ids.unique().numel()} target ids occur twice"


def _target_size(fields: dict[str, Any], weights: dict[str, torch.Tensor], head_rows: int) -> tuple[int, str]:
    """`V` and what says so: `t2d` is as long as the target's vocabulary, own embeddings at least that."""
    if "t2d" in weights:
        return weights["t2d"].shape[0], "t2d"
    stated = fields.get("vocab_size")
    rows = weights["embed_tokens.weight"].shape[0] if "embed_tokens.weight" in weights else None
    if rows is not None:
        return rows, "embed_tokens"
    if stated is None:
        if "d2t" in weights:
            raise ValueError("the target's vocab_size is unknown: neither t2d, embeddings nor the config says it")
        return head_rows, "lm_head"
    return int(stated), "config"


def _map_ids(d2t: torch.Tensor, size: int, kept: torch.Tensor | None) -> tuple[torch.Tensor, str, list[str]]:
    """Target ids of a stored `d2t`, whichever of its two readings is right."""
    raw = d2t.long()
    offset = raw + torch.arange(len(raw))
    fits = {"offsets": _valid(offset, size), "target ids": _valid(raw, size) and bool((raw.diff() > 0).all())}
    readings = {"offsets": offset, "target ids": raw}
    possible = [name for name, fit in fits.items() if fit]
    if not possible:
        raise ValueError(
            f"d2t is broken: read as offsets, {_faults(offset, size)}; read as target ids, {_faults(raw, size)}"
            if not _valid(raw, size)
            else f"d2t is broken: read as offsets, {_faults(offset, size)}; as target ids, they aren't ascending"
        )
    chosen, warnings = possible[0], []
    if len(possible) == 2:
        agree = [name for name in possible if kept is not None and _same_set(readings[name], kept)]
        if len(agree) == 1:
            chosen = agree[0]
        elif len(raw) >= _TELLING_SIZE:
            # Strictly rising offsets would mean that no two neighbouring tokens were kept.
            chosen = "target ids"
        if agree != ["offsets"]:
            warnings.append(f"d2t is valid both as offsets and as target ids: read as {chosen}")
    elif chosen == "target ids":
        warnings.append("d2t holds target ids, not the usual offsets: converted")
    return readings[chosen], chosen, warnings


def _same_set(ids: torch.Tensor, kept: torch.Tensor) -> bool:
    mine = torch.zeros_like(kept, dtype=torch.bool)
    mine[ids] = True
    return bool(torch.equal(mine, kept.bool()))


def settle_vocabulary(fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> Vocabulary:
    """Settle both vocabularies and the map between them. Trims padding of `embed_tokens` and `lm_head` in place.

    Args:
        fields: the flattened config.
        weights: tensors by this package's names; `lm_head.weight` must be there.

    Raises:
        ValueError: a pruned head without a map, or a map that is out of range, repeats, or has the wrong length.
    """
    head = weights["lm_head.weight"].shape[0]
    size, said_by = _target_size(fields, weights, head)
    overridden, warnings = [], []
    stated = fields.get("vocab_size")
    if stated is not None and int(stated) != size:
        overridden.append(Override("vocab_size", stated, f"{size} ({said_by})"))
    rows = weights["embed_tokens.weight"].shape[0] if "embed_tokens.weight" in weights else size
    if rows != size:
        weights["embed_tokens.weight"] = _fit_rows("embed_tokens.weight", weights["embed_tokens.weight"], size)
        warnings.append(f"embed_tokens has {rows} rows, the target {size} tokens: padding rows trimmed or added")
    if "d2t" not in weights:
        if head > size and head - size < _MOST_PADDING:
            weights["lm_head.weight"] = weights["lm_head.weight"][:size].clone()
            warnings.append(f"lm_head has {head} rows for {size} tokens: padding rows trimmed")
            head = size
        if head != size:
            hint = ""
            if "t2d" in weights:
                hint = f" (its t2d keeps {int(weights['t2d'].bool().sum())} tokens, but not in which order)"
            raise ValueError(
                f"d2t is missing: the head has {head} rows, the target {size} tokens, and without the map nothing "
                f"says which{hint}. Every drafted token would be wrong"
            )
        d2t, reading = torch.zeros(head, dtype=torch.long), "full vocabulary"
        ids = torch.arange(head)
    else:
        stored = _whole("d2t", weights["d2t"])
        if len(stored) != head:
            raise ValueError(f"d2t has {len(stored)} entries, lm_head has {head} rows: they must be equal")
        kept = weights.get("t2d")
        warnings += unfilled_map(stored, size, kept)
        ids, reading, found = _map_ids(stored, size, kept)
        warnings += found
        d2t = ids - torch.arange(head)
        if rows <= int(ids.max()):
            raise ValueError(
                f"embed_tokens.weight has {rows} rows, and the draft's vocabulary has token {int(ids.max())}: the "
                "table is cut short"
            )
    stated = fields.get("draft_vocab_size")
    if stated is not None and int(stated) != head:
        overridden.append(Override("draft_vocab_size", stated, f"{head} (lm_head)"))
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[ids] = True
    if "t2d" in weights and not torch.equal(weights["t2d"].bool(), t2d):
        wrong = int((weights["t2d"].bool() != t2d).sum())
        warnings.append(f"t2d contradicts d2t at {wrong} tokens: rebuilt from d2t")
    summary = f"{head} of {size} tokens, map by {reading}" if head < size else f"all {size} tokens"
    if head == size and not torch.equal(ids, torch.arange(size)):
        summary += f", permuted, map by {reading}"
    return Vocabulary(size, head, d2t, t2d, summary, overridden, warnings)


def _fit_rows(name: str, table: torch.Tensor, rows: int) -> torch.Tensor:
    if abs(table.shape[0] - rows) >= _MOST_PADDING:
        raise ValueError(
            f"{name} has {table.shape[0]} rows, the target {rows} tokens: more than padding can explain, they belong "
            "to different tokenizers"
        )
    if table.shape[0] >= rows:
        return table[:rows].clone()
    return torch.cat((table, table.new_zeros(rows - table.shape[0], table.shape[1])))


def fit_target_vocabulary(draft: Eagle3DraftModel, size: int) -> list[str]:
    """Adapt a draft, in place, to a target whose vocabulary is padded differently.

    Only padding differs then: rows are trimmed off the end, or zero rows added that no token ever uses.

    Args:
        draft: the draft.
        size: the target's `vocab_size`.

    Returns:
        What was changed, in words.

    Raises:
        ValueError: the draft's tokens don't fit, or the sizes are too far apart to differ in padding only.
    """
    config, old = draft.config, draft.config.vocab_size
    if old == size:
        return []
    if abs(old - size) >= _MOST_PADDING:
        raise ValueError(
            f"the draft is for a vocabulary of {old} tokens, the target has {size}: not the same tokenizer"
        )
    changed = [f"vocabulary of {old} tokens fitted to the target's {size} (padding)"]
    ids = torch.arange(config.draft_vocab_size, device=draft.d2t.device) + draft.d2t
    if config.draft_vocab_size > size and bool((draft.d2t == 0).all()):
        # A full head with padding rows of its own.
        draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.detach()[:size].clone())
        draft.lm_head.out_features = config.draft_vocab_size = size
        draft.d2t, ids = draft.d2t[:size].clone(), ids[:size]
    if int(ids.max()) >= size:
        raise ValueError(f"the draft's vocabulary has token {int(ids.max())}, the target only {size} tokens")
    draft.t2d = torch.zeros(size, dtype=torch.bool, device=draft.t2d.device)
    draft.t2d[ids] = True
    if config.own_embeddings:
        table = _fit_rows("embed_tokens.weight", draft.embed_tokens.weight.detach(), size)
        draft.embed_tokens = torch.nn.Embedding.from_pretrained(table, freeze=False)
    config.vocab_size = size
    return changed
