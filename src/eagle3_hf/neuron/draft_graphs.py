"""The draft's graphs: the context pass over true target features, and the recurrent steps."""

from __future__ import annotations

import torch

from ..configuration_eagle3 import Eagle3Config
from . import layers
from .layers import Shape, Step, Weights, attention, embedding, linear, make_step, mlp, rms_norm
from .target_graphs import Memory


def fuse(features: torch.Tensor, weights: Weights, config: Eagle3Config, shape: Shape) -> torch.Tensor:
    """Target features `[batch, n, n_aux * target_hidden]` to draft states `[batch, n, hidden]`."""
    real = shape.real_features
    if config.norm_before_fc:
        together = None if real is None else config.num_aux_hidden_states * real
        features = rms_norm(features, weights["input_norm.weight"], shape.eps, together)
    if config.fc_norm:
        parts = features.chunk(config.num_aux_hidden_states, dim=-1)
        normed = [rms_norm(p, weights[f"fc_norm.{i}.weight"], shape.eps, real) for i, p in enumerate(parts)]
        features = torch.cat(normed, dim=-1)
    return linear(features, weights, "fc")


def decoder(
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    weights: Weights,
    config: Eagle3Config,
    shape: Shape,
    step: Step,
    memory: Memory,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All layers of the draft, on the token after each state (int32 `[batch, n]`, target ids)."""
    embeds, real = embedding(tokens, weights, "embed_tokens", shape).to(hidden.dtype), shape.real_hidden
    new: list[torch.Tensor] = []
    for i in range(shape.num_layers):
        name = f"layers.{i}"
        residual = hidden
        if i == 0:
            normed = rms_norm(hidden, weights[f"{name}.hidden_norm.weight"], shape.eps, real)
            if config.norm_before_residual:
                residual = normed
            own = rms_norm(embeds, weights[f"{name}.input_layernorm.weight"], shape.eps, real)
            x = torch.cat((own, normed), dim=-1)
        else:
            x = rms_norm(hidden, weights[f"{name}.input_layernorm.weight"], shape.eps, real)
        mixed, pair = attention(x, weights, f"{name}.self_attn", shape, step, (memory[2 * i], memory[2 * i + 1]))
        new += pair
        hidden = residual + mixed
        normed = rms_norm(hidden, weights[f"{name}.post_attention_layernorm.weight"], shape.eps, real)
        hidden = hidden + mlp(normed, weights, f"{name}.mlp", shape)
    if config.norm_output:
        hidden = rms_norm(hidden, weights["norm.weight"], shape.eps, real)
    return hidden, new


def best_token(state: torch.Tensor, weights: Weights, config: Eagle3Config, shape: Shape) -> torch.Tensor:
    """The draft's token after each state, int32 `[batch, n]`, as a target id."""
    if config.final_norm and not config.norm_output:
        state = rms_norm(state, weights["norm.weight"], shape.eps, shape.real_hidden)
    best = layers.best_token(linear(state, weights, "lm_head"), weights, shape)
    # One table of target ids: on the device a look-up is cheaper than adding an offset that was looked up.
    return weights["draft_to_target"].index_select(0, best.flatten()).view(best.shape)


def context(
    tokens: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    weights: Weights,
    config: Eagle3Config,
    shape: Shape,
    read: int,
    memory: Memory,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Take in new text: its tokens and the target's features of the tokens before them.

    Args:
        tokens: int32 `[batch, S]`, the token **after** each feature's.
        features: `[batch, S, n_aux * target_hidden]`.
        positions: int32 `[batch]`, position of the first feature.
        counts: int32 `[batch]`, how many of the `S` are real.
        read: slots that attention reads.

    Returns:
        first draft int32 `[batch]`, its recurrent state `[batch, hidden]`, memory.
    """
    steps = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    places = positions[:, None] + steps
    step = make_step(places, steps < counts[:, None], weights, shape, memory[0].shape[2], read, memory[0].dtype)
    hidden, new = decoder(tokens, fuse(features, weights, config, shape), weights, config, shape, step, memory)
    last = (counts.long() - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[2])
    state = hidden.gather(1, last)
    return best_token(state, weights, config, shape)[:, 0], state[:, 0], new


def recurrent(
    token: torch.Tensor,
    state: torch.Tensor,
    positions: torch.Tensor,
    weights: Weights,
    config: Eagle3Config,
    shape: Shape,
    read: int,
    memory: Memory,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """One step on the draft's own state.

    Args:
        token: int32 `[batch]`, the last drafted token.
        state: `[batch, hidden]`, the state it was drafted from.
        positions: int32 `[batch]`, the slot to write: one past the last.

    Returns:
        next draft int32 `[batch]`, its state `[batch, hidden]`, memory.
    """
    step = make_step(positions[:, None], None, weights, shape, memory[0].shape[2], read, memory[0].dtype)
    hidden, new = decoder(token[:, None], state[:, None], weights, config, shape, step, memory)
    return best_token(hidden, weights, config, shape)[:, 0], hidden[:, 0], new


def propose(
    tokens: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    draft_tokens: int,
    weights: Weights,
    config: Eagle3Config,
    shape: Shape,
    read: int,
    memory: Memory,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`context`, then `draft_tokens - 1` unrolled `recurrent` steps: int32 `[batch, draft_tokens]` and memory.

    What the steps write lies past the real text and is overwritten by the next round's context pass.
    """
    token, state, memory = context(tokens, features, positions, counts, weights, config, shape, read, memory)
    drafts = [token]
    last = positions + counts - 1
    for depth in range(1, draft_tokens):
        token, state, memory = recurrent(token, state, last + depth, weights, config, shape, read, memory)
        drafts.append(token)
    return torch.stack(drafts, dim=1), list(memory)
