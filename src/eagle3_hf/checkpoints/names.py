"""Tensor names: every published spelling to the one that `Eagle3DraftModel` has."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

_PREFIXES = ("module.", "model.", "eagle_module.", "draft_model.")
_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_MAPS = {"draft_id_to_target_id": "d2t"}
_DROPPED = (
    (re.compile(r"(^|\.)rotary_emb\."), "RoPE tables are computed"),
    (re.compile(r"^verifier_"), "a copy of the target's, used in training only"),
)
_DEEP_NORM = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.weight$")


def normal_name(name: str) -> str:
    """One tensor name in this package's spelling."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name, stripped = name[len(prefix) :], True
    name = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    head, _, rest = name.partition(".")
    if head in _AUX_NORMS:
        name = f"{_AUX_NORMS[head]}.{rest}"
    return _MAPS.get(name, name)


def normalise_names(
    weights: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, str]]:
    """Rename a checkpoint's tensors.

    Args:
        weights: tensors by the file's names.

    Returns:
        The tensors by this package's names; what was renamed (file's name to ours); what was dropped, and why.

    Raises:
        ValueError: two tensors would get the same name; both are named.
    """
    made: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    dropped: dict[str, str] = {}
    for old in weights:
        new = normal_name(old)
        reason = next((reason for pattern, reason in _DROPPED if pattern.search(new)), None)
        if reason is not None:
            dropped[old] = reason
            continue
        if new in origin:
            raise ValueError(f"tensors {origin[new]!r} and {old!r} are both {new!r}: only one can be right")
        made[new], origin[new] = weights[old], old
    # Layers after the first have one norm before attention; two implementations call it differently.
    for new in _deep_norms(made):
        plain = new.replace("hidden_norm", "input_layernorm")
        made[plain], origin[plain] = made.pop(new), origin.pop(new)
    renamed = {old: new for new, old in origin.items() if old != new}
    return made, renamed, dropped


def _deep_norms(names: Iterable[str]) -> list[str]:
    present = set(names)
    found = [name for name in present if _DEEP_NORM.match(name)]
    return sorted(name for name in found if name.replace("hidden_norm", "input_layernorm") not in present)
