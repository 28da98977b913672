"""Checkpoints that are known and not supported: each refused by its name, before anything is built from it."""

from __future__ import annotations

import re
from typing import Any

import torch

_QUANTISED_NAMES = re.compile(
    r"\.(weight_scale\w*|weight_packed|weight_zero_point|weight_shape|qweight|qzeros|scales|g_idx|input_scale|absmax"
    r"|weight_scale_inv)$"
)
_MATRICES = re.compile(r"(^(fc|lm_head|embed_tokens)|^layers\.\d+\..*_proj)\.weight$")
_VECTORS = re.compile(r"norm(\.\d+)?\.weight$|\.bias$|^t2d$")
_NARROW = {torch.int8, torch.uint8, torch.int32, torch.int16}


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _NARROW or str(tensor.dtype).startswith("torch.float8") or "float4" in str(tensor.dtype)


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3])


def refuse_unsupported(config: dict[str, Any], fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> list[str]:
    """Refuse what can't be loaded right.

    Args:
        config: the file's `config.json`.
        fields: the same, flattened by the layout's reader.
        weights: tensors by this package's names.

    Returns:
        Warnings: what the config says and the weights don't confirm.

    Raises:
        ValueError: the kind of checkpoint, what shows it, and what to do.
    """
    names = list(weights)
    _refuse_quantised(config, weights)
    latent = [name for name in names if re.search(r"\.(q_a_proj|kv_a_proj_with_mqa|kv_b_proj)\.", name)]
    if latent:
        raise ValueError(f"MLA drafts (DeepSeek, Kimi) aren't supported: latent-attention tensors {_some(latent)}")
    parallel = [name for name in names if name.partition(".")[0] in {"mask_hidden", "mask_embedding"}]
    for key in ("pard_token", "mask_token_id"):
        if fields.get(key) is not None:
            parallel.append(f"config key {key}")
    step = fields.get("parallel_draft_step")
    if (step or 1) > 1 or fields.get("parallel_draft_heads_num_layers"):
        parallel.append(f"config key parallel_draft_step = {step}")
    if parallel:
        raise ValueError(f"parallel drafts (P-EAGLE) aren't supported, this is one by {_some(parallel)}")
    if fields.get("dflash_config") is not None or fields.get("target_layer_ids") is not None:
        raise ValueError("DFlash drafts aren't EAGLE-3 drafts and aren't supported")
    experts = [name for name in names if re.search(r"\.(experts|block_sparse_moe)\.", name)]
    if experts:
        raise ValueError(f"drafts with a mixture of experts aren't supported: {_some(experts)}")
    _check_dimensions(weights)
    fc, query = weights.get("fc.weight"), weights.get("layers.0.self_attn.q_proj.weight")
    if fc is not None and query is not None and fc.shape[1] == 2 * fc.shape[0] and query.shape[1] == fc.shape[0]:
        raise ValueError(
            "this is an EAGLE-1 or EAGLE-2 draft (fc reads embedding and hidden state, attention is of single width); "
            "only EAGLE-3 drafts are supported"
        )
    if fields.get("use_aux_hidden_state") is False:
        _refuse_contradicting_single_state(weights)
    elif fc is None:
        raise ValueError(
            f"this is no EAGLE-3 draft: it has no fc.weight (tensors: {_some(names)}, ...). Pass the draft's folder, "
            "not the target's"
        )
    if fields.get("eh_proj_before_attn"):
        raise ValueError("drafts with eh_proj_before_attn aren't supported")
    if fields.get("use_mtp_layernorm"):
        raise ValueError("drafts with use_mtp_layernorm aren't supported")
    second = weights.get("layers.1.self_attn.q_proj.weight")
    if second is not None and query is not None and second.shape[1] * 2 != query.shape[1]:
        raise ValueError(
            f"drafts whose later layers read the embedding too (next_layer_regular false) aren't supported: "
            f"layers.1.self_attn.q_proj.weight reads {second.shape[1]}, the draft is {query.shape[1] // 2} wide"
        )
    if (fields.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor {fields['partial_rotary_factor']} isn't supported in a draft")
    return _unconfirmed(config) + _unused_first_norm(fields, weights)


def _check_dimensions(weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        dims = 2 if _MATRICES.search(name) else 1 if _VECTORS.search(name) else tensor.dim()
        if tensor.dim() != dims or not tensor.numel():
            raise ValueError(
                f"{name} must have {dims} dimension{'s' * (dims > 1)} and hold values, it has shape "
                f"{tuple(tensor.shape)}: the checkpoint is damaged"
            )


def _refuse_contradicting_single_state(weights: dict[str, torch.Tensor]) -> None:
    """Heads without aux states (NVIDIA's short-context gpt-oss heads) have nothing to join several states with."""
    joining = [name for name in weights if name.partition(".")[0] in {"fc", "fc_norm", "input_norm"}]
    if joining:
        raise ValueError(
            f"use_aux_hidden_state is false, but the checkpoint has {_some(joining)}: a head that reads the target's "
            "last state alone has none. If it does read several states, remove the key from config.json"
        )


def _unused_first_norm(fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> list[str]:
    if fields.get("use_input_layernorm_in_first_layer") is False and "layers.0.input_layernorm.weight" in weights:
        return [
            "use_input_layernorm_in_first_layer is false in the config, but layers.0.input_layernorm.weight is there: "
            "it is used"
        ]
    return []


def _refuse_quantised(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    shown = [name for name in weights if _QUANTISED_NAMES.search(name)]
    shown += [f"{name} ({t.dtype})" for name, t in weights.items() if name.endswith(".weight") and _is_narrow(t)]
    if shown:
        method = (config.get("quantization_config") or {}).get("quant_method")
        raise ValueError(
            f"quantised drafts aren't supported{f' (method {method})' if method else ''}: {_some(shown)}. "
            "Use the unquantised checkpoint"
        )


def _unconfirmed(config: dict[str, Any]) -> list[str]:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        return [f"config has a quantization_config (method {method}), the weights are plain: it is ignored"]
    return []
