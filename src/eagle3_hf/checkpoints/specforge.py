"""The layout of SpecForge (lmsys) and of those who train with it; SGLang's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..modeling_eagle3 import Eagle3DraftModel
from .aux_ids import TOP
from .layout import (
    Shown,
    WritableLayout,
    dtype_name,
    exported_tensors,
    lift,
    llama_fields,
    sglang_line,
    target_fields,
    vllm_line,
    write_json,
    write_safetensors,
)

_AUTOMODEL = "LlamaEagle3DraftModel"


class SpecForgeLayout(WritableLayout):
    """lmsys / SpecForge, and the many heads in its form (nebius, AQ-MedAI, EAGLE-3.1's, NeMo Automodel's)."""

    name = "specforge"
    carries = frozenset(
        {"norm_before_fc", "fc_norm", "norm_output", "fc_bias", "aux_count", "aux_ids", "single_state",
         "sliding_window", "head_dim", "rope"}
    )  # fmt: skip

    def evidence(self, config: dict[str, Any], names: Iterable[str]) -> str | None:
        for name in config.get("architectures") or []:
            if name.endswith("Eagle3") or name == _AUTOMODEL:
                return f"architecture {name}"
        if isinstance(config.get("eagle_config"), dict):
            return "eagle_config"
        plain = config.get("architectures") == ["LlamaForCausalLM"]  # as EAGLE's authors call theirs
        return "target_model_type" if "target_model_type" in config and not plain else None

    def fields(self, config: dict[str, Any]) -> Shown:
        fields, warnings = lift(config), []
        if fields.get("norm_output"):
            warnings.append(
                "norm_output is true: SGLang and vLLM read that as 'the recurrent state is normalised' (EAGLE-3.1), "
                "SpecForge's trainer only as 'normalise before the head'. The servers' reading is used; if acceptance "
                "falls from the second position on, load with norm_output=False (`eagle3-hf probe` compares both)"
            )
        return fields, warnings

    def refuse_export(self, draft: Eagle3DraftModel) -> list[str]:
        warnings = super().refuse_export(draft)
        if not draft.config.use_aux_hidden_state and draft.config.aux_hidden_state_layers is not None:
            raise ValueError(
                f"format 'specforge' can't hold this draft: its readers feed a head without fc from the target's last "
                f"state only, this one reads {draft.config.aux_hidden_state_layers}"
            )
        if 0 in (draft.config.aux_hidden_state_layers or ()):
            raise ValueError(
                "format 'specforge' can't hold this draft: it counts layer outputs, and aux id 0 (the embeddings) is "
                "the output of none. Format 'speculators' can"
            )
        return warnings

    def write(self, draft: Eagle3DraftModel, folder: Path, tokens: int) -> None:
        config = draft.config
        eagle: dict[str, Any] = {"use_aux_hidden_state": config.use_aux_hidden_state}
        content: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **llama_fields(config),
            "draft_vocab_size": config.draft_vocab_size,
            **target_fields(config),
        }
        if config.fc_bias:
            content["bias"] = True
        if config.use_aux_hidden_state and config.num_aux_hidden_states != 3:
            content["num_aux_hidden_states"] = config.num_aux_hidden_states
        for name in ("norm_before_fc", "fc_norm", "norm_output"):
            if getattr(config, name):
                content[name] = eagle[name] = True
        if config.aux_hidden_state_layers is not None:
            # SGLang reads the nested ids and adds one, vLLM reads the top-level ones as they are.
            eagle[TOP] = [i - 1 for i in config.aux_hidden_state_layers]
            content[TOP] = list(config.aux_hidden_state_layers)
        write_json(folder, content | {"eagle_config": eagle, "torch_dtype": dtype_name(draft)})
        write_safetensors(folder, exported_tensors(draft, midlayer=True))

    def serving(self, folder: Path, tokens: int) -> dict[str, str]:
        return {
            "SGLang": sglang_line(folder, tokens),
            "vLLM --speculative-config": vllm_line(folder, tokens),
        }
