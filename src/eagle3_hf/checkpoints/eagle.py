"""The layout of EAGLE's authors (yuhuili, SafeAILab): a `.bin` that calls itself a Llama."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..modeling_eagle3 import Eagle3DraftModel
from .aux_ids import TOP
from .layout import WritableLayout, dtype_name, exported_tensors, llama_fields, target_fields, vllm_line, write_json


class EagleLayout(WritableLayout):
    """yuhuili / SafeAILab. Known by its tensors alone: its architecture string is the plain Llama's."""

    name = "eagle"
    # EAGLE's cnets.py knows one plain Llama layer on the three default states, and skips what else it finds.
    carries = frozenset()

    def evidence(self, config: dict[str, Any], names: Iterable[str]) -> str | None:
        names = list(names)
        if any("midlayer." in name for name in names) and any(name.endswith("fc.weight") for name in names):
            return "midlayer tensors, no marker of another publisher"
        if any(name.endswith("fc.weight") for name in names) and "draft_vocab_size" in config:
            return "fc.weight and draft_vocab_size, no marker of another publisher"
        return None

    def refuse_export(self, draft: Eagle3DraftModel) -> list[str]:
        warnings = super().refuse_export(draft)
        config = draft.config
        if config.aux_hidden_state_layers is not None and config.target_num_hidden_layers is None:
            warnings.append(
                f"EAGLE's code always reads the states (2, L//2, L-3); whether {config.aux_hidden_state_layers} are "
                "those can't be checked, as the target's number of layers isn't known"
            )
        return warnings

    def write(self, draft: Eagle3DraftModel, folder: Path, tokens: int) -> None:
        config = draft.config
        content = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **llama_fields(config),
            "draft_vocab_size": config.draft_vocab_size,
            **target_fields(config),
            "torch_dtype": dtype_name(draft),
        }
        if config.aux_hidden_state_layers is not None:
            content[TOP] = list(config.aux_hidden_state_layers)
        write_json(folder, content)
        torch.save(exported_tensors(draft, midlayer=True), folder / "pytorch_model.bin")

    def serving(self, folder: Path, tokens: int) -> dict[str, str]:
        path = json.dumps(str(folder))
        return {
            "vLLM --speculative-config": vllm_line(folder, tokens),
            "EAGLE": f"EaModel.from_pretrained(base_model_path=..., ea_model_path={path}, use_eagle3=True)",
        }
