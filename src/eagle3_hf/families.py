"""Target families that the checklist of docs/adding-a-target.md is run for, and what a user should know of each.

Nothing here is needed to load or run a target: every default comes from the model itself (`aux_layers`, `target`).
The registry says which families are tested, with what shape, and where their limits are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from .aux_layers import default_aux_layers

TINY_LAYERS, TINY_WINDOW, TINY_VOCAB = 8, 8, 16
_TINY = {
    "vocab_size": TINY_VOCAB, "hidden_size": 32, "num_hidden_layers": TINY_LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 96,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
_MIXED = {
    "sliding_window": TINY_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * (TINY_LAYERS // 2),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class TargetFamily:
    """A registered family.

    Attributes:
        model_type: transformers' name of the (text) configuration.
        layers: dotted path to the decoder layers of its causal LM; found without being told.
        aux_layers: aux ids of published drafts that aren't the default, by the number of layers of their target, on
            this package's axis (id `i` is the input of layer `i`).
        note: what is particular about it, and known limits.
        tiny: settings of the smallest configuration that shows what is particular.
        without: settings that its configuration doesn't have.
    """

    model_type: str
    layers: str = "model.layers"
    aux_layers: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: MappingProxyType({}))
    note: str = ""
    tiny: Mapping[str, Any] = field(default_factory=dict, repr=False)
    without: tuple[str, ...] = field(default=(), repr=False)

    def default_aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Aux ids of a draft that doesn't say: `(2, L//2, L-3)`, for every family."""
        return default_aux_layers(num_layers)

    def tiny_config(self) -> PretrainedConfig:
        """A configuration of 8 layers with random-weight models in mind; what the checklist runs on."""
        shape = {name: value for name, value in _TINY.items() if name not in self.without}
        return AutoConfig.for_model(self.model_type, **(shape | dict(self.tiny)))


_REGISTERED = (
    TargetFamily("llama"),
    TargetFamily("qwen2", without=("head_dim",)),
    TargetFamily("qwen3", note="Drafts in Qwen3's own form (norms of queries and keys) are told by their tensors."),
    TargetFamily("qwen3_moe", note="Mixture of experts.", tiny=_EXPERTS),
    TargetFamily("mistral", note="One window for all layers.", tiny={"sliding_window": TINY_WINDOW}),
    TargetFamily(
        "mixtral", note="Mixture of experts.",
        tiny={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    TargetFamily(
        "gemma2", note="Windows in every other layer; embeddings are scaled, which the draft's norm undoes.",
        tiny={"query_pre_attn_scalar": 8, **_MIXED},
    ),
    TargetFamily(
        "gemma3_text", note="Windows in most layers; embeddings are scaled, which the draft's norm undoes.",
        tiny={"query_pre_attn_scalar": 8, **_MIXED},
    ),
    TargetFamily(
        "gpt_oss",
        aux_layers=MappingProxyType({24: (2, 12, 22), 36: (2, 18, 34)}),
        note="Windows in every other layer, mixture of experts, attention sinks. The ids are those of SpecForge's "
        "drafts; NVIDIA's drafts name their own, or read the last state alone.",
        tiny={"num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
    ),
    TargetFamily(
        "phi3", note="Long-context models rotate positions differently past the original length.",
        tiny={"original_max_position_embeddings": 96}, without=("head_dim",),
    ),
    TargetFamily(
        "granite", note="Multipliers on embeddings, residuals and logits.",
        tiny={"embedding_multiplier": 2.0, "residual_multiplier": 0.5}, without=("head_dim",),
    ),
    TargetFamily("olmo2", note="Norms after attention and MLP.", without=("head_dim",)),
    TargetFamily("glm4", note="Norms before and after attention and MLP."),
    TargetFamily("cohere2", note="Attention and MLP in parallel; windows in most layers.", tiny=_MIXED,
                 without=("head_dim",)),
    TargetFamily("smollm3", note="Some layers without RoPE.", without=("head_dim",)),
    TargetFamily(
        "llama4_text", note="Chunked attention in most layers, mixture of experts in some. Text models only.",
        tiny={"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
              "attention_chunk_size": 16, "interleave_moe_layer_step": 2},
    ),
)  # fmt: skip

FAMILIES: Mapping[str, TargetFamily] = MappingProxyType({family.model_type: family for family in _REGISTERED})


def family_of(config: PretrainedConfig) -> TargetFamily | None:
    """The registered family of a model's configuration, by its text part; `None` for others, which may work too."""
    return FAMILIES.get(config.get_text_config().model_type)
