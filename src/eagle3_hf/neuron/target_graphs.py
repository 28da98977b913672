"""The target's graphs: prefill, verification and one-token decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layers import Shape, Step, Weights, attention, best_token, embedding, linear, make_step, mlp, rms_norm
from .rejection import draw, reject

Memory = Sequence[torch.Tensor]


def decoder(
    ids: torch.Tensor, weights: Weights, shape: Shape, aux_layers: Sequence[int], step: Step, memory: Memory
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """All layers of a Llama-family model.

    Args:
        ids: int32 `[batch, n]`.
        aux_layers: id `i` is the input of layer `i`, id `num_layers` that of the final norm.
        memory: keys and values of layer 0, of layer 1, ...: `[batch, kv_heads, capacity, head_dim]` each.

    Returns:
        The last state after the final norm `[batch, n, hidden]`, the aux states side by side
        `[batch, n, len(aux_layers) * hidden]`, and the new memory.
    """
    hidden = embedding(ids, weights, "model.embed_tokens", shape)
    states: dict[int, torch.Tensor] = {}
    new: list[torch.Tensor] = []
    for i in range(shape.num_layers):
        states[i] = hidden
        name = f"model.layers.{i}"
        normed = rms_norm(hidden, weights[f"{name}.input_layernorm.weight"], shape.eps, shape.real_hidden)
        mixed, pair = attention(normed, weights, f"{name}.self_attn", shape, step, (memory[2 * i], memory[2 * i + 1]))
        new += pair
        hidden = hidden + mixed
        normed = rms_norm(hidden, weights[f"{name}.post_attention_layernorm.weight"], shape.eps, shape.real_hidden)
        hidden = hidden + mlp(normed, weights, f"{name}.mlp", shape)
    states[shape.num_layers] = hidden
    aux = torch.cat([states[i] for i in aux_layers], dim=-1)
    return rms_norm(hidden, weights["model.norm.weight"], shape.eps, shape.real_hidden), aux, new


def next_tokens(state: torch.Tensor, weights: Weights, shape: Shape, sampling: Sequence[torch.Tensor]) -> torch.Tensor:
    """The token that the target writes after each state, int32 `[batch, n]`; `sampling` as for the graphs."""
    logits = linear(state, weights, "lm_head")
    greedy = best_token(logits, weights, shape)
    if not sampling:
        return greedy
    return draw(shape.group.gather(logits)[..., : shape.vocab_size], greedy, *sampling)


def prefill(
    ids: torch.Tensor,
    lengths: torch.Tensor,
    sampling: Sequence[torch.Tensor],
    weights: Weights,
    shape: Shape,
    aux_layers: Sequence[int],
    memory: Memory,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Read right-padded prompts.

    Args:
        ids: int32 `[batch, S]`.
        lengths: int32 `[batch]`; a row of length 0 leaves its memory alone but for the scratch slot.
        sampling: nothing, or temperature `[batch]` and uniforms `[batch, 1]`.

    Returns:
        next token int32 `[batch]`, aux states `[batch, S, F]`, memory.
    """
    batch, size = ids.shape
    positions = torch.arange(size, dtype=torch.int32, device=ids.device).expand(batch, -1)
    step = make_step(positions, positions < lengths[:, None], weights, shape, memory[0].shape[2], size, memory[0].dtype)
    state, aux, new = decoder(ids, weights, shape, aux_layers, step, memory)
    last = (lengths.long() - 1).clamp(min=0)[:, None, None].expand(-1, 1, state.shape[2])
    return next_tokens(state.gather(1, last), weights, shape, sampling)[:, 0], aux, new


def verify(
    ids: torch.Tensor,
    positions: torch.Tensor,
    sampling: Sequence[torch.Tensor],
    weights: Weights,
    shape: Shape,
    aux_layers: Sequence[int],
    read: int,
    memory: Memory,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One round's check: the last token of each row and K drafted ones in one pass, rejection inside.

    With `K = 0` this is plain one-token decoding.

    Args:
        ids: int32 `[batch, 1 + K]`, the row's last token, then the drafts.
        positions: int32 `[batch]`, position of the last token. A row not in use is put at `capacity - 1`.
        sampling: nothing, or temperature `[batch]` and uniforms `[batch, 1 + K]`.
        read: slots that attention reads.

    Returns:
        out int32 `[batch, 1 + K]` (-1 behind the new tokens), count int32 `[batch]`, the target's choice at every
        place int32 `[batch, 1 + K]`, aux `[batch, 1 + K, F]`, memory.
    """
    capacity = memory[0].shape[2]
    places = positions[:, None] + torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    step = make_step(places, None, weights, shape, capacity, read, memory[0].dtype)
    state, aux, new = decoder(ids, weights, shape, aux_layers, step, memory)
    chosen = next_tokens(state, weights, shape, sampling)
    if ids.shape[1] == 1:
        # Nothing to reject; and a compiler has no cumulative sum over no columns.
        return chosen, torch.ones_like(positions), chosen, aux, new
    # A draft in the scratch slot wasn't read from a place of its own.
    out, count = reject(ids[:, 1:], chosen, places[:, 1:] < capacity - 1)
    return out, count, chosen, aux, new
