"""A draft's configuration from the shapes of its weights; the config file fills in what shapes can't say."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..compat import normalise_rope
from .provenance import Override

logger = logging.getLogger(__name__)

_LAYER = "layers.0."
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
# RoPE tables for pictures: text has equal coordinates in all of them, which makes it plain RoPE.
_PICTURE_ROPE = ("mrope_section", "mrope_interleaved")


@dataclass
class Derived:
    """Keywords for `Eagle3Config`, and what had to be decided on the way."""

    values: dict[str, Any]
    overridden: list[Override] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    added: dict[str, str] = field(default_factory=dict)

    def shape(self, name: str, stated: Any, value: Any) -> Any:
        """Take a value from the weights; the config's, if it has one and differs, goes on record."""
        if stated is not None and stated != value:
            self.overridden.append(Override(name, stated, value))
        self.values[name] = value
        return value


def _need(weights: dict[str, torch.Tensor], name: str, dims: int = 2) -> torch.Tensor:
    tensor = weights.get(name)
    if tensor is None:
        raise ValueError(
            f"{name} is missing from the checkpoint (it has {', '.join(sorted(set(weights) - {'d2t', 't2d'}))})"
        )
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, it has shape {tuple(tensor.shape)}")
    return tensor


def derive_config(fields: dict[str, Any], weights: dict[str, torch.Tensor], num_ids: int | None) -> Derived:
    """Keywords for `Eagle3Config`.

    Args:
        fields: the flattened config.
        weights: tensors by this package's names. Zero biases are added in place where only some were written.
        num_ids: how many aux ids the config lists, if it lists any.

    Raises:
        ValueError: a tensor is missing, or shapes that no draft can have; the message names them.
    """
    made = Derived({})
    _widths(made, fields, weights, num_ids)
    _heads(made, fields, weights)
    _biases(made, fields, weights)
    layers = {int(name.split(".")[1]) for name in weights if name.startswith("layers.")}
    if layers != set(range(len(layers))):
        raise ValueError(f"layers {sorted(layers)} aren't numbered from 0 without gaps")
    made.shape("num_hidden_layers", fields.get("num_hidden_layers"), len(layers))
    made.shape("intermediate_size", fields.get("intermediate_size"), _need(weights, _intermediate()).shape[0])
    has_norm = "norm.weight" in weights
    if not has_norm and fields.get("use_last_layernorm") is not False:
        # Only ModelOpt leaves it out, and says so; anywhere else the file is incomplete.
        _need(weights, "norm.weight", 1)
    made.shape("final_norm", fields.get("use_last_layernorm"), has_norm)
    for name in ("norm_before_residual", "norm_output"):
        made.values[name] = bool(fields.get(name) or False)
    if made.values["norm_output"] and not has_norm:
        raise ValueError("norm_output is true, but the checkpoint has no norm.weight")
    made.values["hidden_act"] = fields.get("hidden_act") or "silu"
    if made.values["hidden_act"] not in ACT2FN:
        raise ValueError(f"hidden_act {made.values['hidden_act']!r} isn't known to transformers")
    made.values["max_position_embeddings"] = fields.get("max_position_embeddings") or 2048
    eps = fields.get("rms_norm_eps")
    if eps is None:
        eps = 1e-6
        made.warnings.append("rms_norm_eps is missing from the config: 1e-06, the default of LlamaConfig, is used")
    try:
        made.values["rms_norm_eps"] = float(eps)
    except (TypeError, ValueError):
        raise ValueError(f"rms_norm_eps must be a number, got {eps!r}") from None
    made.values["rope_parameters"] = _rope(made, fields)
    if fields.get("sliding_window") and fields.get("use_sliding_window", True):
        made.values["sliding_window"] = int(fields["sliding_window"])
        made.warnings.append(
            f"the draft was trained with a window of {fields['sliding_window']} tokens; it is run with full attention, "
            "which is the same up to that length"
        )
    for name in ("target_name_or_path", "target_architectures", "target_model_type"):
        if fields.get(name):
            made.values[name] = fields[name]
    return made


def _intermediate() -> str:
    return f"{_LAYER}mlp.gate_proj.weight"


def _widths(made: Derived, fields: dict[str, Any], weights: dict[str, torch.Tensor], num_ids: int | None) -> None:
    if is_single_state(fields, weights):
        _single_state(made, fields, weights)
        return
    fc = _need(weights, "fc.weight")
    hidden = made.shape("hidden_size", fields.get("hidden_size"), fc.shape[0])
    norms = sum(name.startswith("fc_norm.") for name in weights)
    stated = fields.get("target_hidden_size")
    if norms:
        width = _need(weights, "fc_norm.0.weight", 1).shape[0]
    elif stated and fc.shape[1] % stated == 0:
        width = int(stated)
    elif num_ids and fc.shape[1] % num_ids == 0 and _fits(fc, num_ids, "embed_tokens.weight" in weights):
        width = fc.shape[1] // num_ids
    elif fc.shape[1] % hidden == 0:
        width = hidden
    elif fc.shape[1] % 3 == 0:
        width = fc.shape[1] // 3
    else:
        raise ValueError(
            f"fc.weight reads {fc.shape[1]} features, which is no multiple of the target's hidden size "
            f"({stated or hidden})"
        )
    if fc.shape[1] % width:
        raise ValueError(f"fc.weight reads {fc.shape[1]} features, no multiple of fc_norm.0.weight's {width}")
    made.shape("target_hidden_size", stated, width)
    made.shape("num_aux_hidden_states", fields.get("num_aux_hidden_states"), fc.shape[1] // width)
    if norms and norms != fc.shape[1] // width:
        raise ValueError(f"there are {norms} fc_norm tensors for {fc.shape[1] // width} aux hidden states")
    for flag, present, tensors in (
        ("fc_norm", bool(norms), "fc_norm.*.weight"),
        ("norm_before_fc", "input_norm.weight" in weights, "input_norm.weight"),
    ):
        if fields.get(flag) and not present:
            raise ValueError(
                f"{flag} is true in the config, but {tensors} is missing: without that norm every state would be read "
                f"wrong. If the draft was trained without it, set {flag} to false in config.json"
            )
        made.shape(flag, fields.get(flag), present)
    made.values["fc_bias"] = "fc.bias" in weights
    made.values["own_embeddings"] = "embed_tokens.weight" in weights
    if made.values["own_embeddings"] and weights["embed_tokens.weight"].shape[1] != hidden:
        raise ValueError(
            f"embed_tokens.weight is {weights['embed_tokens.weight'].shape[1]} wide, the draft {hidden} (fc.weight)"
        )
    if width != hidden and not made.values["own_embeddings"]:
        raise ValueError(
            f"the draft is {hidden} wide, its target {width}: such a checkpoint must bring embed_tokens.weight, and it "
            "is missing"
        )
    _check_query(weights, hidden)


def _fits(fc: torch.Tensor, num_ids: int, own_embeddings: bool) -> bool:
    """Whether `num_ids` can be the number of states; without own embeddings target and draft are equally wide."""
    return own_embeddings or fc.shape[1] == num_ids * fc.shape[0] or fc.shape[1] % fc.shape[0] != 0


def _check_query(weights: dict[str, torch.Tensor], hidden: int) -> None:
    query = _need(weights, f"{_LAYER}self_attn.q_proj.weight")
    if query.shape[1] != 2 * hidden:
        raise ValueError(
            f"{_LAYER}self_attn.q_proj.weight reads {query.shape[1]} features; an EAGLE-3 draft of width {hidden} "
            f"reads {2 * hidden} (embedding and state)"
        )


def is_single_state(fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> bool:
    """Whether this head reads the target's last state as it is; its config says so, and there is no `fc`."""
    return fields.get("use_aux_hidden_state") is False and "fc.weight" not in weights


def _single_state(made: Derived, fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    gate = _need(weights, _intermediate())
    hidden = made.shape("hidden_size", fields.get("hidden_size"), gate.shape[1])
    made.values["use_aux_hidden_state"] = False
    made.shape("target_hidden_size", fields.get("target_hidden_size"), hidden)
    made.values["num_aux_hidden_states"] = 1
    made.values["own_embeddings"] = "embed_tokens.weight" in weights
    _check_query(weights, hidden)
    name = f"{_LAYER}hidden_norm.weight"
    if name not in weights:
        weights[name] = torch.ones_like(_need(weights, f"{_LAYER}post_attention_layernorm.weight", 1))
        made.added[name] = "ones, as vLLM and SGLang fill it in"
        made.warnings.append(
            f"{name} is missing: the state is normalised without a weight, as vLLM and SGLang do it for such heads"
        )


def _heads(made: Derived, fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    rows = _need(weights, f"{_LAYER}self_attn.q_proj.weight").shape[0]
    kv_rows = _need(weights, f"{_LAYER}self_attn.k_proj.weight").shape[0]
    heads, dim = fields.get("num_attention_heads"), fields.get("head_dim")
    for key, value in (("num_attention_heads", heads), ("head_dim", dim)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{key} must be a whole number above 0, got {value!r}")
    norm = weights.get(f"{_LAYER}self_attn.q_norm.weight")
    if norm is None and fields.get("qk_norm"):
        raise ValueError(
            "the config's layers are of type qwen3, which normalise queries and keys, but "
            f"{_LAYER}self_attn.q_norm.weight is missing. If the draft was trained without, its type is llama"
        )
    if norm is not None:
        size = norm.shape[0]
        if size == rows and size != dim and heads != 1:
            raise ValueError(f"q_norm over all heads at once ({size} values) isn't supported, only one for each head")
    elif heads and rows % heads == 0 and kv_rows % (rows // heads) == 0:
        size = rows // heads
    elif dim and rows % dim == 0 and kv_rows % dim == 0:
        size = int(dim)
    else:
        raise ValueError(
            f"q_proj has {rows} rows and k_proj {kv_rows}, which fits neither num_attention_heads {heads} nor "
            f"head_dim {dim}"
        )
    if rows % size or kv_rows % size:
        raise ValueError(f"q_proj has {rows} rows and k_proj {kv_rows}: not whole heads of {size}")
    made.shape("head_dim", dim, size)
    made.shape("num_attention_heads", heads, rows // size)
    made.shape("num_key_value_heads", fields.get("num_key_value_heads"), kv_rows // size)
    made.values["qk_norm"] = norm is not None


def _biases(made: Derived, fields: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    layers = sorted({name.split(".")[1] for name in weights if name.startswith("layers.")})
    for flag, block, parts, optional in (
        ("attention_bias", "self_attn", _ATTENTION, {"o_proj"}),
        ("mlp_bias", "mlp", _MLP, set()),
    ):
        names = [f"layers.{i}.{block}.{part}.bias" for i in layers for part in parts]
        present = [name for name in names if name in weights]
        made.shape(flag, fields.get(flag), bool(present))
        if not present:
            continue
        for name in names:
            if name in weights:
                continue
            if name.split(".")[3] not in optional:
                raise ValueError(f"{name} is missing, while {present[0]} is there")
            # Qwen's attention has a bias on q, k and v only; a zero bias is the same thing.
            matrix = _need(weights, name.replace(".bias", ".weight"))
            weights[name] = matrix.new_zeros(matrix.shape[0])
            made.added[name] = "zeros, this kind of attention has no bias here"


def _rope(made: Derived, fields: dict[str, Any]) -> dict[str, Any]:
    given = {
        key: fields[key] for key in ("rope_parameters", "rope_scaling", "rope_theta") if fields.get(key) is not None
    }
    for key in ("rope_parameters", "rope_scaling"):
        if key in given and not isinstance(given[key], dict):
            raise ValueError(f"{key} must be an object, got {given[key]!r}")
    known = "rope_theta" in given or any("rope_theta" in given.get(k, {}) for k in ("rope_parameters", "rope_scaling"))
    if not known:
        made.warnings.append("rope_theta is missing from the config: 10000 is used, the target's isn't borrowed")
    try:
        rope = normalise_rope(given)
    except (TypeError, ValueError):
        raise ValueError(f"rope_theta must be a number, the config has {given!r}") from None
    if rope["rope_type"] == "mrope" or any(key in rope for key in _PICTURE_ROPE):
        for key in _PICTURE_ROPE:
            rope.pop(key, None)
        if rope["rope_type"] == "mrope":
            rope["rope_type"] = "default"
        # Its positions are counted, behind images too: the target's several axes would have to reach every draft step.
        made.warnings.append(
            "the draft has multimodal RoPE: it is run as plain RoPE, which is the same on text; behind images its "
            "positions differ from those it was trained with, and fewer of its tokens may be accepted"
        )
    known_types = {"default", *ROPE_INIT_FUNCTIONS}
    if rope["rope_type"] not in known_types:
        raise ValueError(f"RoPE of type {rope['rope_type']!r} isn't known, only {', '.join(sorted(known_types))}")
    if rope["rope_type"] not in {"default", "longrope"} and "factor" not in rope:
        raise ValueError(f"RoPE of type {rope['rope_type']!r} needs a `factor`, the config has {sorted(rope)}")
    return rope
