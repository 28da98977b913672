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
