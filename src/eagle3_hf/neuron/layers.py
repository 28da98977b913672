"""The pieces of the static graphs: pure functions of weights, activations and key/value memory.

Nothing here keeps state, writes in place, or asks a tensor for its value, so each graph is one fixed list of
operations that torch.export records and an HLO compiler takes. Only operations with an XLA lowering are used
(`cumsum` and not `cumprod`, `scatter` and no boolean indexing).

Weights come as a dict by name. What is in it decides about biases and query/key norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .parallel import ALONE, RANK, Group, embed, likeliest

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What a graph must know of a model beyond its weights.

    Attributes:
        num_layers, head_dim: as in the model's config.
        num_kv_heads: those of one rank.
        hidden_size: width of the states, padding included.
        vocab_size: tokens that `lm_head` writes, over all ranks.
        eps: of every RMSNorm.
        hidden_act: name in transformers' `ACT2FN`.
        rope_scale: factor on RoPE's cosines and sines (YaRN; 1 otherwise).
        real_hidden: lanes of a state that aren't padding; `None`: all.
        real_features: the same of each of the target's states that a draft reads.
        group: the ranks that share the model.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    eps: float
    hidden_act: str
    rope_scale: float = 1.0
    real_hidden: int | None = None
    real_features: int | None = None
    group: Group = ALONE

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return ACT2FN[self.hidden_act]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, real: int | None = None) -> torch.Tensor:
    """RMSNorm over the last axis, in float32 inside, in the dtype of `x` outside.

    Args:
        real: lanes that count for the mean, where the others are padding; they are zero and stay zero.
    """
    wide = x.float()
    squares = wide.square()
    mean = squares.mean(dim=-1, keepdim=True) if real is None else squares.sum(dim=-1, keepdim=True) / real
    wide = wide * torch.rsqrt(mean + eps)
    return weight * wide.to(x.dtype)


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """`name`'s linear layer, with its bias where there is one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def embedding(ids: torch.Tensor, weights: Weights, name: str, shape: Shape) -> torch.Tensor:
    """Embeddings `[batch, n, width]` of int32 `[batch, n]` ids, from a table that may be split over ranks."""
    return embed(ids, weights[f"{name}.weight"], weights.get(RANK), shape.group)


def best_token(logits: torch.Tensor, weights: Weights, shape: Shape) -> torch.Tensor:
    """The likeliest token, int32 `[batch, n]`, of logits `[batch, n, vocab]` that may be split over ranks."""
    return likeliest(logits, shape.vocab_size, weights.get(RANK), shape.group)


def rope_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, `[batch, 1, sequence, head_dim]` each.

    Args:
        positions: int32 `[batch, sequence]`.
        inverse_frequencies: float32 `[head_dim / 2]`.
    """
    angles = positions.float()[..., None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE in the half-split form, on `[batch, heads, sequence, head_dim]`."""
    low, high = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat((-high, low), dim=-1) * rope[1]


def write_slots(memory: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A copy of `memory` with new rows in it: a scatter out of place, which a compiler may do in place.

    Args:
        memory: `[batch, kv_heads, capacity, head_dim]`.
        rows: `[batch, kv_heads, n, head_dim]`.
        slots: int64 `[batch, n]`, where each row goes. Several may go to the scratch slot; which one stays is open.
    """
    index = slots[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
    return memory.scatter(2, index, rows)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention without copying the memory for each query head.

    Args:
        query: `[batch, heads, n, head_dim]`.
        key, value: `[batch, kv_heads, keys, head_dim]`.
        visible: bool `[batch, n, keys]`; every query must see at least one key.

    Returns:
        `[batch, n, heads * head_dim]`.
    """
    batch, heads, count, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    folded = query.reshape(batch, kv_heads, groups * count, dim)
    mask = torch.where(visible, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    mask = mask[:, None].repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=dim**-0.5)
    return out.reshape(batch, heads, count, dim).transpose(1, 2).reshape(batch, count, heads * dim)


@dataclass(frozen=True)
class Step:
    """What all layers of one pass share.

    Attributes:
        rope: see `rope_tables`.
        slots: int64 `[batch, n]`, where the new keys and values are written.
        visible: bool `[batch, n, read]`.
        read: how many slots, from the first, attention reads.
    """

    rope: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor
    visible: torch.Tensor
    read: int


def make_step(
    positions: torch.Tensor,
    real: torch.Tensor | None,
    weights: Weights,
    shape: Shape,
    capacity: int,
    read: int,
    dtype: torch.dtype,
) -> Step:
    """Everything that follows from the positions alone.

    Slot `j` holds position `j`; the last slot is scratch. Whatever has no place of its own, padding and positions at
    or past the end, is written there. A query at position `p` sees slots `0..p`, so what lies stale behind it needs
    no rollback: it is overwritten before anyone can see it.

    Args:
        positions: int32 `[batch, n]`.
        real: bool `[batch, n]`, false for padding; `None`: all real.
        capacity: slots of the memory.
        read: slots that attention reads.
    """
    scratch = capacity - 1
    placed = positions.clamp(max=scratch)
    slots = placed if real is None else torch.where(real, placed, torch.full_like(placed, scratch))
    visible = torch.arange(read, dtype=positions.dtype, device=positions.device) <= placed[..., None]
    rope = rope_tables(placed, weights["rope.inverse_frequencies"], shape.rope_scale, dtype)
    return Step(rope=rope, slots=slots.long(), visible=visible, read=read)


def attention(
    x: torch.Tensor,
    weights: Weights,
    name: str,
    shape: Shape,
    step: Step,
    memory: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Self-attention of one layer.

    Args:
        x: `[batch, n, features]`, normed.
        name: prefix of the weights.
        memory: keys and values, `[batch, kv_heads, capacity, head_dim]` each.

    Returns:
        `[batch, n, hidden]`, and the new memory.
    """
    batch, count = x.shape[:2]
    heads = (batch, count, -1, shape.head_dim)
    query, key = linear(x, weights, f"{name}.q_proj").view(heads), linear(x, weights, f"{name}.k_proj").view(heads)
    value = linear(x, weights, f"{name}.v_proj").view(heads).transpose(1, 2)
    if f"{name}.q_norm.weight" in weights:
        query = rms_norm(query, weights[f"{name}.q_norm.weight"], shape.eps)
        key = rms_norm(key, weights[f"{name}.k_norm.weight"], shape.eps)
    query, key = rotate(query.transpose(1, 2), step.rope), rotate(key.transpose(1, 2), step.rope)
    keys, values = write_slots(memory[0], key, step.slots), write_slots(memory[1], value, step.slots)
    out = attend(query, keys[:, :, : step.read], values[:, :, : step.read], step.visible)
    return shape.group.sum(linear(out, weights, f"{name}.o_proj")), (keys, values)


def mlp(x: torch.Tensor, weights: Weights, name: str, shape: Shape) -> torch.Tensor:
    """Gated MLP on `[..., hidden]`."""
    gate = shape.activation(linear(x, weights, f"{name}.gate_proj"))
    return shape.group.sum(linear(gate * linear(x, weights, f"{name}.up_proj"), weights, f"{name}.down_proj"))
