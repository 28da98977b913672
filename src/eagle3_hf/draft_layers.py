"""Layers of the draft: attention over the past, the MLP, and the decoder layer that joins embedding and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, eager_attention_forward

from .attention import grouped_sdpa_attention_forward
from .configuration_eagle3 import Eagle3Config


class AttendingMemory(ABC):
    """In place of a cache: past keys that also say how they are attended to (the steps of training)."""

    @abstractmethod
    def attend(
        self, attention: Eagle3Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Keep new keys and values, attend: `[batch, heads, queries, head_dim]` to `[batch, queries, heads, ...]`."""


class Eagle3Attention(nn.Module):
    """Grouped-query attention whose q/k/v read `input_size` features (2H in the first layer)."""

    def __init__(self, config: Eagle3Config, layer_idx: int, input_size: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        query, kv, bias = (
            config.num_attention_heads * self.head_dim,
            config.num_key_value_heads * self.head_dim,
            config.attention_bias,
        )
        self.q_proj = nn.Linear(input_size, query, bias=bias)
        self.k_proj = nn.Linear(input_size, kv, bias=bias)
        self.v_proj = nn.Linear(input_size, kv, bias=bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def project(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Rotated queries and keys, and values: `[batch, heads, sequence, head_dim]` each."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        query, key, value = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rope)
        return query, key, value.transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | AttendingMemory | None,
    ) -> torch.Tensor:
        query, key, value = self.project(x, rope)
        if isinstance(cache, AttendingMemory):
            return self.o_proj(cache.attend(self, query, key, value).reshape(*x.shape[:-1], -1))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        name = self.config._attn_implementation
        attend: Callable = grouped_sdpa_attention_forward
        if name != "sdpa":
            attend = eager_attention_forward if name in (None, "eager") else ALL_ATTENTION_FUNCTIONS[name]
        out, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        return self.o_proj(out.reshape(*x.shape[:-1], -1))


class Eagle3MLP(nn.Module):
    """Gated MLP, as in Llama."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Eagle3DecoderLayer(nn.Module):
    """Decoder layer; the first one attends over `cat(embedding, hidden)`, later ones are plain."""

    def __init__(self, config: Eagle3Config, layer_idx: int):
        super().__init__()
        self.first = layer_idx == 0
        self.norm_before_residual = config.norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        if self.first:
            self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.self_attn = Eagle3Attention(config, layer_idx, input_size=2 * size if self.first else size)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = Eagle3MLP(config)

    def attention_input(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and the residual it is added to."""
        if not self.first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat((self.input_layernorm(embeds), normed), dim=-1), residual

    def feed_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The MLP half, residual included."""
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | AttendingMemory | None,
    ) -> torch.Tensor:
        x, residual = self.attention_input(embeds, hidden)
        return self.feed_forward(residual + self.self_attn(x, rope, attention_mask, cache))
