"""This package's own layout: what `Eagle3DraftModel.save_pretrained` writes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..configuration_eagle3 import Eagle3Config
from ..modeling_eagle3 import Eagle3DraftModel
from .layout import WritableLayout


class TransformersLayout(WritableLayout):
    """Our own: read by `PreTrainedModel`, holds every variant."""

    name = "transformers"

    def evidence(self, config: dict[str, Any], names: Iterable[str]) -> str | None:
        if config.get("model_type") == Eagle3Config.model_type and "speculators_model_type" not in config:
            return "model_type eagle3"
        return None

    def refuse_export(self, draft: Eagle3DraftModel) -> list[str]:
        return []

    def write(self, draft: Eagle3DraftModel, folder: Path, tokens: int) -> None:
        draft.save_pretrained(folder)
        if tokens != draft.generation_config.num_assistant_tokens:
            options = copy.deepcopy(draft.generation_config)
            options.num_assistant_tokens = tokens
            options.save_pretrained(folder)


def refuse_incomplete(source: str, info: dict[str, Any]) -> None:
    """Turn what `PreTrainedModel` only reports into an error.

    Args:
        source: the checkpoint, as the user named it.
        info: the loading info; mismatched keys come as `(name, stored shape, model's shape)`, on 4.57 as names.

    Raises:
        ValueError: tensors are missing, unknown or of the wrong size; all are named.
    """
    details = []
    for kind in ("missing_keys", "unexpected_keys"):
        if info.get(kind):
            details.append(f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, info[kind])))}")
    if info.get("mismatched_keys"):
        sizes = sorted(map(_mismatch, info["mismatched_keys"]))
        details.append(f"mismatched keys: {', '.join(sizes)}")
    if details:
        raise ValueError(f"{source} is not a complete Eagle3DraftModel checkpoint ({'; '.join(details)})")


def _mismatch(found: Any) -> str:
    if isinstance(found, str):
        return found
    name, stored, wanted = found
    return f"{name} {list(stored)}, not {list(wanted)}"
