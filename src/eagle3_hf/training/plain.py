"""Distillation of an ordinary small causal LM against a bigger one, for two-model speculation (`assistant_model`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat import accepts
from .losses import logit_loss, parse_loss
from .slots import Slots


@dataclass
class PlainDistillation:
    """What [`plain_distillation`] returns.

    Attributes:
        loss: scalar, mean over the scored tokens (or their sum over `denominator`).
        count: int64 scalar, scored tokens.
        correct: int64 scalar, those where both models have the same first choice; `None` without `measure`.
    """

    loss: torch.Tensor
    count: torch.Tensor
    correct: torch.Tensor | None = None


def shared_vocabulary(
    student: nn.Module, teacher: nn.Module, student_tokenizer: Any = None, teacher_tokenizer: Any = None
) -> int:
    """How many logits of the two models stand for the same tokens, from id 0 on.

    Models of one family are often padded to different sizes; with both tokenizers the padding is told from tokens.

    Args:
        student, teacher: causal LMs.
        student_tokenizer, teacher_tokenizer: both, or none of them.

    Raises:
        ValueError: other vocabularies, naming the first token that differs; or other sizes and no tokenizers.
    """
    sizes = [model.config.get_text_config().vocab_size for model in (student, teacher)]
    if (student_tokenizer is None) != (teacher_tokenizer is None):
        raise ValueError("pass the tokenizers of both models, or of neither")
    if student_tokenizer is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"vocabulary sizes differ: {sizes[0]} (student) and {sizes[1]} (teacher). If that is padding, pass "
                "both tokenizers; else the student needs the teacher's tokenizer"
            )
        return sizes[0]
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (student_tokenizer, teacher_tokenizer))
    if ours != theirs:
        different = [i for i in sorted(ours.keys() | theirs.keys()) if ours.get(i) != theirs.get(i)]
        first = different[0]
        raise ValueError(
            f"the tokenizers differ in {len(different)} ids; id {first} is {ours.get(first)!r} for the student and "
            f"{theirs.get(first)!r} for the teacher. Distillation needs one vocabulary"
        )
    shared = max(ours) + 1
    if shared > min(sizes):
        raise ValueError(f"the tokenizer has ids up to {shared - 1}, a model only {min(sizes)} logits")
    return shared


def plain_distillation(
    student: nn.Module,
    teacher: nn.Module,
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    shared: int | None = None,
    lengths: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    loss: str = "kl",
    denominator: torch.Tensor | float | None = None,
    measure: bool = True,
    chunk: int | None = None,
) -> PlainDistillation:
    """Loss between the two models' distributions of each answer token.

    Args:
        student: the small causal LM, learns.
        teacher: the big one, in eval mode; runs once, without gradient.
        input_ids: int64 `[B, T]`, right-padded.
        loss_mask: bool `[B, T]`, True on answer tokens.
        shared: logits to compare, from id 0 on; default: [`shared_vocabulary`] of the models alone.
        lengths: int64 `[B]`, real tokens of each row; `None` relies on `loss_mask` being False on padding.
        document_ids: int64 `[B, T]` for packed rows: a run of equal ids is a document, negative is padding.
        loss: see `losses.parse_loss`.
        denominator: what the sum is divided by; default: the number of scored tokens, at least 1.
        measure: count equal first choices.
        chunk: rows of logits taken to fp32 at a time; default: by memory.

    Raises:
        ValueError: vocabularies that don't fit, an unknown loss, packed rows for a model that can't keep documents
            apart.
    """
    parse_loss(loss)
    shared = shared_vocabulary(student, teacher) if shared is None else shared
    slots = Slots(loss_mask, lengths, document_ids)
    # Logits only where some row needs them.
    columns = slots.answers.any(0).nonzero()[:, 0]
    wanted = slots.answers[:, columns]
    count = wanted.sum()
    divisor = count.clamp(min=1) if denominator is None else denominator
    ours = _logits(student, input_ids, slots, columns)[wanted][:, :shared]
    with torch.no_grad():
        theirs = _logits(teacher, input_ids.to(_device(teacher)), slots, columns).to(ours.device)
        theirs = theirs[wanted][:, :shared]
    total = logit_loss(ours, theirs, loss, chunk) / divisor
    correct = (ours.argmax(-1) == theirs.argmax(-1)).sum() if measure else None
    return PlainDistillation(total, count, correct)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _logits(model: nn.Module, input_ids: torch.Tensor, slots: Slots, columns: torch.Tensor) -> torch.Tensor:
    """`[B, len(columns), V]` in the model's own dtype."""
    inputs: dict[str, Any] = {"use_cache": False}
    if slots.starts is not None:
        inputs |= _packed(model, slots, input_ids.device)
    columns = columns.to(input_ids.device)
    if accepts(model.forward, "logits_to_keep"):
        return model(input_ids, logits_to_keep=columns, **inputs).logits
    return model(input_ids, **inputs).logits[:, columns]


def _packed(model: nn.Module, slots: Slots, device: torch.device) -> dict[str, torch.Tensor]:
    """Positions that restart and a mask that keeps documents apart, as additive `[B, 1, T, T]`."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if "layer_types" not in config.to_dict() else None
    if kinds != {"full_attention"} or window is not None or "flash" in (config._attn_implementation or ""):
        raise ValueError(
            f"{type(model).__name__} ({', '.join(sorted(kinds))}, {config._attn_implementation}) can't take the mask "
            "that keeps packed documents apart: pad the rows instead, or load it with attn_implementation='sdpa'"
        )
    assert slots.starts is not None
    starts, keys = slots.starts.to(device), torch.arange(slots.starts.shape[1], device=device)
    seen = (keys[None, :] <= keys[:, None]) & (keys >= starts[:, :, None])
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    return {"attention_mask": mask[:, None], "position_ids": slots.positions.to(device)}
