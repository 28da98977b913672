"""The layout of AngelSlim (Tencent)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .aux_ids import ANGELSLIM
from .layout import Layout

_ARCHITECTURES = ("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")


class AngelSlimLayout(Layout):
    """AngelSlim."""

    name = "angelslim"

    def evidence(self, config: dict[str, Any], names: Iterable[str]) -> str | None:
        key = next((key for key in (ANGELSLIM, "modal_type") if key in config), None)
        if key is not None:
            return f"config key {key}"
        found = [name for name in config.get("architectures") or [] if name.startswith(_ARCHITECTURES)]
        return f"architecture {found[0]}" if found else None
