"""Attention of the training-time test: causal over the keys of step 0, its own slot only among those of later steps.

A slot's later steps were drafted for that slot alone, so of the keys of steps 1..k it sees one each. Both parts share
one softmax. Writing that as a mask takes `T x T(k+1)` scores a step; here the causal part runs through a kernel that
also returns its logsumexp, and the few diagonal scores are merged into it. Nothing of size `T x T` is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..draft_layers import AttendingMemory

BACKENDS = ("auto", "flash", "blocks", "flex", "dense")
BLOCK = 256  # query slots that the blockwise kernel takes at a time


@dataclass(eq=False)
class StepLayout:
    """Which keys of step 0 the slots `first..length-1` see: those from their document's start up to their own.

    Attributes:
        length: slots of a row, `T`.
        first: first slot that asks.
        starts: int64 `[B, T]`, first slot of each slot's document; `None`: a row is one document.
    """

    length: int
    first: int = 0
    starts: torch.Tensor | None = None
    _block_mask: Any = field(default=None, init=False, repr=False)

    @cached_property
    def lowest(self) -> list[int]:
        """For each slot the first key that any row of the batch needs. Takes a host-device sync, once a batch."""
        return [0] * self.length if self.starts is None else self.starts.amin(0).tolist()

    def visible(self, start: int, end: int, low: int, device: torch.device) -> torch.Tensor:
        """Bool `[B or 1, end - start, end - low]`: what the slots `start..end-1` see of the keys `low..end-1`."""
        slots = torch.arange(start, end, device=device)[:, None]
        keys = torch.arange(low, end, device=device)[None]
        seen = (keys <= slots)[None]
        return seen if self.starts is None else seen & (keys >= self.starts[:, start:end, None])

    def block_mask(self, device: torch.device) -> Any:
        """Flex-attention's mask, made once for all layers and steps."""
        if self._block_mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            first, starts = self.first, self.starts

            def within(b, h, q, k):
                seen = k <= q + first
                return seen if starts is None else seen & (k >= starts[b, q + first])

            rows = None if starts is None else len(starts)
            self._block_mask = create_block_mask(within, rows, None, self.length - first, self.length, device=device)
        return self._block_mask

    def pieces(self, whole: bool) -> Iterator[tuple[slice, slice, bool, int | None]]:
        """Query rows, keys, causal?, and the lowest key if a mask is needed. Together they cover every visible pair.

        `whole`: the kernel does a causal square by itself and in pieces of its own.
        """
        count = self.length - self.first
        if whole and self.starts is None:
            if self.first:
                yield slice(0, count), slice(0, self.first), False, None
            yield slice(0, count), slice(self.first, self.length), True, None
            return
        for start in range(self.first, self.length, BLOCK):
            end = min(start + BLOCK, self.length)
            low = self.lowest[start]
            yield slice(start - self.first, end - self.first), slice(low, end), False, low


def _flash(query, key, value, mask, causal, scale):
    bias = None if mask is None else _bias(mask, query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )


def _flash_backward(grad, query, key, value, out, lse, mask, causal, scale):
    bias = None if mask is None else _bias(mask, query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _block(query, key, value, mask, causal, scale):
    scores = (_wide(query) @ _wide(key).transpose(-1, -2)).mul_(scale).masked_fill_(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores.sub_(lse[..., None]).exp_() @ _wide(value)).to(query.dtype), lse


def _block_backward(grad, query, key, value, out, lse, mask, causal, scale):
    query, key, value, grad = map(_wide, (query, key, value, grad))
    weights = (query @ key.transpose(-1, -2)).mul_(scale).masked_fill_(~mask, float("-inf"))
    weights = weights.sub_(lse[..., None]).exp_()
    grad_value = weights.transpose(-1, -2) @ grad
    grad_scores = grad @ value.transpose(-1, -2)
    grad_scores = grad_scores.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    return grad_scores @ key, grad_scores.transpose(-1, -2) @ query, grad_value


class _MergedAttention(torch.autograd.Function):
    """One softmax over the causal part (by pieces) and the diagonals.

    The backward kernels rebuild the weights as `exp(score - logsumexp)` and need `sum(grad * out)`; given the merged
    output and logsumexp instead of their own, they return the exact gradients of their share of the merged softmax.
    """

    @staticmethod
    def forward(ctx: Any, layout: StepLayout, scale: float, flash: bool, query: torch.Tensor, *kv: torch.Tensor):
        steps = len(kv) // 2
        keys, values = kv[:steps], kv[steps:]
        batch, heads, count, dim = query.shape
        groups = heads // keys[0].shape[1]
        out = torch.empty(batch, heads, count, dim, dtype=_wide(query[:0]).dtype, device=query.device)
        lse = out.new_empty(batch, heads, count)
        key, value = _repeat(keys[0], groups), _repeat(values[0], groups)
        for rows, columns, causal, low in layout.pieces(flash):
            mask = _mask(layout, rows, columns, low, query.device)
            part, part_lse = (_flash if flash else _block)(
                query[:, :, rows], key[:, :, columns], value[:, :, columns], mask, causal, scale
            )
            if not (causal and layout.first):
                out[:, :, rows], lse[:, :, rows] = part.to(out.dtype), part_lse
                continue
            # The causal square comes after the prefix, for the same rows.
            total = torch.logaddexp(lse, part_lse)
            out = out.mul_((lse - total).exp_()[..., None]).addcmul_(part, (part_lse - total).exp_()[..., None])
            lse = total
        if steps > 1:
            own = _diagonal_scores(query, keys[1:], groups, scale)  # [B, heads, Q, k]
            total = torch.logaddexp(lse, own.logsumexp(-1))
            out *= (lse - total).exp_()[..., None]
            shares = (own - total[..., None]).exp_()
            for step, later in enumerate(values[1:]):
                out += shares[..., step, None] * _repeat(later, groups)
            lse = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, out, lse, *kv)
        ctx.layout, ctx.scale, ctx.flash = layout, scale, flash
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        query, out, lse, *kv = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        steps = len(kv) // 2
        keys, values = kv[:steps], kv[steps:]
        groups = query.shape[1] // keys[0].shape[1]
        wide = lse.dtype
        grad = grad.contiguous()
        grad_query = torch.zeros_like(query, dtype=wide)
        key, value = _repeat(keys[0], groups), _repeat(values[0], groups)
        grad_key, grad_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for rows, columns, causal, low in layout.pieces(ctx.flash):
            mask = _mask(layout, rows, columns, low, query.device)
            part = (_flash_backward if ctx.flash else _block_backward)(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, columns],
                value[:, :, columns],
                out[:, :, rows],
                lse[:, :, rows].contiguous(),
                mask,
                causal,
                scale,
            )
            grad_query[:, :, rows] += part[0]
            grad_key[:, :, columns] += part[1]
            grad_value[:, :, columns] += part[2]
        grads_key, grads_value = [_fold(grad_key, groups)], [_fold(grad_value, groups)]
        if steps > 1:
            shares = (_diagonal_scores(query, keys[1:], groups, scale) - lse[..., None]).exp_()
            grad, mean = grad.to(wide), (grad.to(wide) * out).sum(-1)
            for step, (later, later_value) in enumerate(zip(keys[1:], values[1:])):
                share = shares[..., step]
                inner = share * ((grad * _repeat(later_value, groups)).sum(-1) - mean) * scale
                grad_query += inner[..., None] * _repeat(later, groups)
                grads_key.append(_fold(inner[..., None] * query, groups))
                grads_value.append(_fold(share[..., None] * grad, groups))
        grads = [new.to(old.dtype) for new, old in zip([*grads_key, *grads_value], kv)]
        return None, None, None, grad_query.to(query.dtype), *grads


def _mask(layout, rows, columns, low, device) -> torch.Tensor | None:
    if low is None:
        return None
    return layout.visible(rows.start + layout.first, rows.stop + layout.first, low, device)[:, None]


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    """`[B, kv_heads, T, D]` for every query head: `[B, kv_heads * groups, T, D]`."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _fold(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The transpose of [`_repeat`]: sums over the query heads of a group."""
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def _diagonal_scores(query: torch.Tensor, keys: Any, groups: int, scale: float) -> torch.Tensor:
    """`[B, heads, Q, len(keys)]`, at least fp32: each slot against the keys of its own later steps."""
    grouped = _wide(query).unflatten(1, (-1, groups))
    return torch.stack([(grouped * key.unsqueeze(2)).sum(-1) for key in keys], dim=-1).flatten(1, 2) * scale


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _lse_request() -> dict[str, Any]:
    """How flex-attention is asked for the logsumexp: `return_lse` up to torch 2.8, `return_aux` since."""
    from torch.nn.attention import flex_attention as module

    request = getattr(module, "AuxRequest", None)
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def flex_step_attention(
    layout: StepLayout, scale: float, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """The same through flex-attention, whose block mask skips what no slot of a block sees. For CUDA.

    Its logsumexp carries a gradient, so the merge is ordinary autograd.
    """
    from torch.nn.attention.flex_attention import flex_attention

    kernel = _compiled_flex() if query.is_cuda else flex_attention
    out, lse = kernel(
        query,
        keys[0],
        values[0],
        block_mask=layout.block_mask(query.device),
        scale=scale,
        enable_gqa=query.shape[1] != keys[0].shape[1],
        **_lse_request(),
    )
    lse = getattr(lse, "lse", lse)
    if len(keys) == 1:
        return out
    groups = query.shape[1] // keys[0].shape[1]
    scores = torch.cat(
        [lse[..., None].to(_wide(query[:0]).dtype), _diagonal_scores(query, keys[1:], groups, scale)], -1
    )
    shares = scores.softmax(-1)
    merged = shares[..., :1] * out
    for step, later in enumerate(values[1:]):
        merged = merged + shares[..., step + 1, None] * _repeat(later, groups)
    return merged.to(query.dtype)


def dense_step_attention(
    layout: StepLayout,
    scale: float,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    dropout: float = 0.0,
) -> torch.Tensor:
    """The same with all scores in memory, `[B, heads, Q, T + k]`; the one that knows attention dropout."""
    groups = query.shape[1] // keys[0].shape[1]
    seen = layout.visible(layout.first, layout.length, 0, query.device)[:, None]
    scores = (_wide(query) @ _wide(_repeat(keys[0], groups)).transpose(-1, -2) * scale).masked_fill(
        ~seen, float("-inf")
    )
    if len(keys) > 1:
        scores = torch.cat([scores, _diagonal_scores(query, keys[1:], groups, scale)], -1)
    weights = F.dropout(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
    out = weights[..., : layout.length] @ _wide(_repeat(values[0], groups))
    for step, value in enumerate(values[1:]):
        out = out + weights[..., layout.length + step, None] * _repeat(value, groups)
    return out.to(query.dtype)


@torch.compiler.disable
def _merged(layout, scale, flash, query, keys, values) -> torch.Tensor:
    return _MergedAttention.apply(layout, scale, flash, query, *keys, *values)


def step_attention(
    layout: StepLayout,
    scale: float,
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    backend: str = "auto",
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of step `len(keys) - 1` for the slots `layout.first..T-1`, exact, with gradients.

    Args:
        layout: which step-0 keys are visible.
        scale: factor of the scores.
        query: `[B, heads, Q, D]`, `Q = T - layout.first`.
        keys, values: `[B, kv_heads, T, D]` of step 0, then `[B, kv_heads, Q, D]` of each later step; dtype of `query`.
        backend: `"flash"` (PyTorch's CPU kernel), `"blocks"` (any device, [`BLOCK`] slots at a time), `"flex"`
            (flex-attention), `"dense"` (all scores at once); `"auto"` is flex on CUDA, flash on a CPU, blocks
            elsewhere, and dense with dropout.
        dropout: attention dropout, only dense knows it.

    Returns:
        `[B, heads, Q, D]`.

    Raises:
        ValueError: unknown backend, or one that can't do this.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}: one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "dense" if dropout else {"cuda": "flex", "cpu": "flash"}.get(query.device.type, "blocks")
    if dropout and backend != "dense":
        raise ValueError(f"attention_dropout {dropout} needs attention='dense' (or 'auto'), not {backend!r}")
    if backend == "dense":
        return dense_step_attention(layout, scale, query, keys, values, dropout)
    if backend == "flex":
        return flex_step_attention(layout, scale, query, keys, values)
    if backend == "flash" and query.device.type != "cpu":
        raise ValueError(f"attention='flash' is PyTorch's CPU kernel, the draft is on {query.device}: use 'auto'")
    return _merged(layout, scale, backend == "flash", query, keys, values)


class StepMemory(AttendingMemory):
    """Stands in for a layer's cache during one training step: what [`Eagle3Attention`] calls instead of `update`.

    Pure: it reads the keys of earlier steps and keeps the new ones in `key` and `value`, so a checkpointed layer can
    be run twice.
    """

    def __init__(self, layout: StepLayout, keys: list[torch.Tensor], values: list[torch.Tensor], backend: str = "auto"):
        self.layout, self.keys, self.values, self.backend = layout, keys, values, backend
        self.key: torch.Tensor | None = None
        self.value: torch.Tensor | None = None

    def attend(self, attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[B, heads, Q, D]` queries to `[B, Q, heads, D]`, the layout of transformers' attention functions."""
        kind = query.device.type
        # RoPE's fp32 tables lift queries and keys out of autocast; kernels want one dtype.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        query, self.key, self.value = query.to(dtype), key.to(dtype), value.to(dtype)
        dropout = attention.attention_dropout if attention.training else 0.0
        keys, values = [*self.keys, self.key], [*self.values, self.value]
        with torch.autocast(kind, enabled=False):
            out = step_attention(self.layout, attention.scaling, query, keys, values, self.backend, dropout)
        return out.transpose(1, 2)
