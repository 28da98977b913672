"""Scaled dot-product attention with a mask, without copying the past for grouped-query models.

transformers' own `sdpa` repeats keys and values for every query head as soon as a mask is given, which every
verification needs: a copy of the whole past, several times over, in each layer. Folding the query heads of a group
into the query axis gives the same result on the stored keys and values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "eagle3_sdpa"


def grouped_sdpa_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers' `AttentionInterface`.

    Args:
        module: the attention layer.
        query: `[batch, heads, queries, head_dim]`.
        key, value: `[batch, kv_heads, keys, head_dim]`.
        attention_mask: bool or additive `[batch, 1, queries, keys]`, or `None`.
        dropout, scaling, kwargs: as `sdpa_attention_forward` takes them; anything it must handle goes to it.

    Returns:
        `[batch, queries, heads, head_dim]`, and `None` for the weights.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    plain = attention_mask is None or attention_mask.shape[1] != 1 or heads == kv_heads
    if plain or any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux")):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    groups = heads // kv_heads
    folded = query.reshape(batch, kv_heads, groups * queries, dim)
    mask = attention_mask[..., : key.shape[2]].repeat(1, 1, groups, 1)
    out = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(batch, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_sdpa_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextlib.contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Let a model whose text config says `sdpa` use [`grouped_sdpa_attention_forward`] inside the context.

    Families that don't call attention through transformers' interface (Falcon compares the name itself) keep theirs.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        yield
        return
    # The internal field: the public setter would also rewrite vision and audio parts of a composite model.
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = "sdpa"
