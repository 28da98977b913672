"""Values of a published `config.json`, checked for their kind before anything is computed from them."""

from __future__ import annotations

import math
from typing import Any

_COUNTS = (
    "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers",
    "num_key_value_heads", "num_aux_hidden_states", "target_num_hidden_layers", "max_position_embeddings",
    "sliding_window", "num_assistant_tokens",
)  # fmt: skip
# No shape shows these, so a value that is merely truthy ("false", for one) would decide how the draft is run.
_FLAGS = (
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state", "use_last_layernorm",
    "use_input_layernorm_in_first_layer",
)  # fmt: skip


def check_structure(config: dict[str, Any]) -> None:
    """Check the parts that layouts are recognised by and read from.

    Raises:
        ValueError: one is of another kind; names it and shows its value.
    """
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"architectures must be a list of names, got {names!r}")
    for key in ("eagle_config", "speculators_config", "quantization_config"):
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"{key} must be an object, got {config[key]!r}")
    nested = config.get("speculators_config") or {}
    methods, verifier = nested.get("proposal_methods") or [], nested.get("verifier") or {}
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise ValueError(f"speculators_config.proposal_methods must be a list of objects, got {methods!r}")
    if not isinstance(verifier, dict):
        raise ValueError(f"speculators_config.verifier must be an object, got {verifier!r}")


def check_values(fields: dict[str, Any]) -> None:
    """Check the flattened config.

    Args:
        fields: its keys and values, nested parts lifted.

    Raises:
        ValueError: a value is of another kind than its key needs; names both.
    """
    for key in _COUNTS:
        value = fields.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"{key} must be a whole number, got {value!r}")
    for key in _FLAGS:
        if fields.get(key) not in (None, True, False):
            raise ValueError(f"{key} must be true or false, got {fields[key]!r}")
    act = fields.get("hidden_act")
    if act is not None and not isinstance(act, str):
        raise ValueError(f"hidden_act must be a name, got {act!r}")
    scale = fields.get("logit_scale")
    if scale is not None and not is_number(scale, above=0.0):
        raise ValueError(f"logit_scale must be a number above 0, got {scale!r}")


def is_number(value: Any, above: float = -math.inf) -> bool:
    """Whether `value` is a finite number, and greater than `above`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > above
