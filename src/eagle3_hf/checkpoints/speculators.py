"""The layout of speculators (Red Hat, vLLM): a nested config of the decoder layer, own embeddings."""

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
    target_fields,
    variants_of,
    vllm_line,
    write_json,
    write_safetensors,
)

# It saves only what differs from the layer's config class, so what is absent is that class's default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"},
    "qwen3": {
        "num_attention_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "max_position_embeddings": 32768,
    },
}  # fmt: skip
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class SpeculatorsLayout(WritableLayout):
    """RedHatAI / speculators, vLLM's own."""

    name = "speculators"
    carries = frozenset(
        {"layers", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias",
         "mlp_bias", "aux_count", "aux_ids", "sliding_window", "head_dim", "rope"}
    )  # fmt: skip

    def evidence(self, config: dict[str, Any], names: Iterable[str]) -> str | None:
        if "speculators_model_type" in config:
            return f"speculators_model_type {config['speculators_model_type']}"
        if "transformer_layer_config" in config:
            return "transformer_layer_config"
        return None

    def fields(self, config: dict[str, Any]) -> Shown:
        kind = config.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type {kind!r} isn't supported, only 'eagle3'")
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise ValueError(f"transformer_layer_config must be an object, got {layer!r}")
        warnings = []
        if "norm_before_residual" not in config:
            warnings.append(
                "norm_before_residual is missing: false is used, the default of speculators' own class; vLLM takes "
                "true. `eagle3-hf probe` compares both"
            )
        defaults = dict(_DEFAULTS.get(layer.get("model_type", "qwen3"), _DEFAULTS["llama"]))
        if "rope_parameters" in layer:
            defaults.pop("rope_theta")
        fields = lift({**defaults, **layer, **{key: value for key, value in config.items() if value is not None}})
        if layer.get("model_type", "qwen3") == "qwen3" and not layer.get("use_sliding_window"):
            fields.pop("sliding_window", None)
        fields["qk_norm"] = layer.get("model_type") == "qwen3"  # its layers never come without
        verifier = (config.get("speculators_config") or {}).get("verifier") or {}
        fields.setdefault("target_name_or_path", verifier.get("name_or_path"))
        fields.setdefault("target_architectures", verifier.get("architectures"))
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        fields.setdefault("num_assistant_tokens", methods[0].get("speculative_tokens"))
        return fields, warnings

    def refuse_export(self, draft: Eagle3DraftModel) -> list[str]:
        warnings = super().refuse_export(draft)
        if draft.config.qk_norm and draft.config.mlp_bias:
            raise ValueError("format 'speculators' can't hold this draft: its qk-norm layers (qwen3) have no mlp_bias")
        if "sliding_window" in variants_of(draft.config) and not draft.config.qk_norm:
            raise ValueError(
                "format 'speculators' can't hold this draft: of its layer kinds only qwen3 has a sliding_window, and "
                "that needs norms of queries and keys"
            )
        if not draft.config.own_embeddings:
            warnings.append("the draft has no embeddings of its own; vLLM uses the target's then")
        return warnings

    def write(self, draft: Eagle3DraftModel, folder: Path, tokens: int) -> None:
        config = draft.config
        target = target_fields(config)
        layer = {"model_type": "qwen3" if config.qk_norm else "llama", **llama_fields(config)}
        if config.sliding_window is not None:
            layer |= {"use_sliding_window": True, "max_window_layers": 0}
        content: dict[str, Any] = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
                "verifier": {
                    "name_or_path": target.pop("target_name_or_path", None),
                    "architectures": target.pop("target_architectures", None) or [],
                },
            },
            "transformer_layer_config": layer,
            "draft_vocab_size": config.draft_vocab_size,
            **{name: getattr(config, name) for name in _FLAGS},
            **target,
            "tie_word_embeddings": False,
            "torch_dtype": dtype_name(draft),
        }
        if config.aux_hidden_state_layers is not None:
            content[TOP] = list(config.aux_hidden_state_layers)
        write_json(folder, content)
        write_safetensors(folder, exported_tensors(draft, midlayer=False))

    def serving(self, folder: Path, tokens: int) -> dict[str, str]:
        return {"vLLM --speculative-config": vllm_line(folder, tokens)}
