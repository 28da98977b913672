"""Everything that differs between transformers 4.57 and 5.x, in one place."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import LlamaConfig

IS_V5 = Version(transformers.__version__) >= Version("5.0.0.dev0")


@lru_cache(maxsize=64)
def _parameters(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def cache_argument(forward: Callable) -> str:
    """Name of the cache keyword of a model's `forward`: `cache` since 5.2x, `past_key_values` before."""
    names = _parameters(getattr(forward, "__func__", forward))
    return "cache" if "cache" in names else "past_key_values"


def accepts(forward: Callable, name: str) -> bool:
    """Whether `forward` names the parameter `name` explicitly."""
    return name in _parameters(getattr(forward, "__func__", forward))


def step_inputs(model: Any, ids: torch.Tensor, kwargs: dict[str, Any], first: bool) -> dict[str, Any]:
    """What plain `generate()` gives to a model's forward: of the whole text (`first`), or of the last token.

    Args:
        model: the model.
        ids: int64 `[batch, columns]`, left-padded.
        kwargs: model inputs as `generate()` keeps them; 4.57's `cache_position` is added to them at the first step.
        first: whether nothing was run yet.
    """
    if hasattr(model, "_get_initial_cache_position"):  # 4.57
        if first:
            model._get_initial_cache_position(ids.shape[1], ids.device, kwargs)
        return model.prepare_inputs_for_generation(ids, **kwargs)
    new = None if first else 1
    return model.prepare_inputs_for_generation(ids, next_sequence_length=new, is_first_iteration=first, **kwargs)


def normalise_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Pop every published form of RoPE settings from `config` and return one flat dict.

    Reads `rope_parameters` (5.x), `rope_scaling` with `type` or `rope_type`, and `rope_theta`. A missing theta is
    10000, the value EAGLE's own code falls back to; the target's is never borrowed.
    """
    parameters = dict(config.pop("rope_parameters", None) or {})
    scaling = dict(config.pop("rope_scaling", None) or {})
    theta = config.pop("rope_theta", None)
    merged = {**scaling, **parameters}
    merged["rope_type"] = merged.pop("rope_type", None) or merged.pop("type", None) or "default"
    merged.pop("type", None)
    given = [value for value in (merged.get("rope_theta"), theta) if value is not None]
    merged["rope_theta"] = float(given[0] if given else 10000.0)
    return merged


def rotary_config(config: Any) -> LlamaConfig:
    """A `LlamaConfig` that makes `LlamaRotaryEmbedding` compute what a draft `config` asks for, on both lines."""
    rope = copy.deepcopy(config.rope_parameters)
    shape: dict[str, Any] = {
        "hidden_size": config.num_attention_heads * config.head_dim,
        "num_attention_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
    }
    if IS_V5:
        return LlamaConfig(**shape, rope_parameters=rope)
    theta = rope.pop("rope_theta")
    original = rope.get("original_max_position_embeddings")
    scaling = None if rope["rope_type"] == "default" else rope
    made = LlamaConfig(**shape, rope_theta=theta, rope_scaling=scaling)
    if original is not None and rope["rope_type"] == "longrope":
        made.original_max_position_embeddings = original
    return made


def rope_switch(config: Any) -> tuple[str, float]:
    """Kind of RoPE of a text config, and the length past which it rotates all positions differently (else infinity)."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        kind = part.get("rope_type") or part.get("type") or "default"
        longest = getattr(config, "max_position_embeddings", None)
        if kind == "dynamic" and longest:
            return kind, longest
        if kind == "longrope":
            own = part.get("original_max_position_embeddings")
            return kind, own or getattr(config, "original_max_position_embeddings", None) or longest or 0
    return "default", math.inf
