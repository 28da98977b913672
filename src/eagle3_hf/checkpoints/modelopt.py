"""The layout of NVIDIA's ModelOpt: nested `eagle_config`, no embeddings, no `t2d`, sometimes no final norm or head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .layout import Layout

_MARKERS = (
    "use_last_layernorm",
    "use_input_layernorm_in_first_layer",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
    "parallel_draft_heads_num_layers",
)


class ModelOptLayout(Layout):
    """nvidia / ModelOpt."""

    name = "modelopt"

    def evidence(self, config: dict[str, Any], names: Iterable[str]) -> str | None:
        nested = config.get("eagle_config")
        marker = next((key for key in _MARKERS if isinstance(nested, dict) and key in nested), None)
        return None if marker is None else f"eagle_config.{marker}"
