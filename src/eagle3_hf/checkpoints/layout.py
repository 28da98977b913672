"""What a published layout is made of: how it is recognised, read, and written."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from ..aux_layers import default_aux_layers
from ..configuration_eagle3 import Eagle3Config
from ..modeling_eagle3 import Eagle3DraftModel

Shown = tuple[dict[str, Any], list[str]]


class Layout(ABC):
    """One published layout, to be read.

    Attributes:
        name: its short name, that of `eagle3-hf export --format` where it can be written.
    """

    name: ClassVar[str]

    @abstractmethod
    def evidence(self, config: dict[str, Any], names: Iterable[str]) -> str | None:
        """What shows that a checkpoint is of this layout, or `None`.

        Args:
            config: its `config.json`.
            names: its tensors' names, as in the file.
        """

    def fields(self, config: dict[str, Any]) -> Shown:
        """The config as one flat dict in this package's key names, and warnings."""
        return lift(config), []


class WritableLayout(Layout):
    """A layout that drafts can be exported to.

    Attributes:
        carries: the variants (keys of `variants_of`) that readers of this layout honour; others can't be exported.
    """

    carries: ClassVar[frozenset[str]] = frozenset()

    def refuse_export(self, draft: Eagle3DraftModel) -> list[str]:
        """Raise ValueError if readers of this layout would run the draft differently; returns warnings."""
        lost = [text for key, text in variants_of(draft.config).items() if key not in self.carries]
        if lost:
            raise ValueError(
                f"format {self.name!r} can't hold this draft: its readers don't know {'; '.join(lost)}. "
                "Formats 'speculators' and 'transformers' hold more"
            )
        return []

    @abstractmethod
    def write(self, draft: Eagle3DraftModel, folder: Path, tokens: int) -> None:
        """Write the draft, made to draft `tokens` a round where the layout says so; `refuse_export` has been called."""

    def serving(self, folder: Path, tokens: int) -> dict[str, str]:
        """Lines to paste, by the tool they are for."""
        return {}


def lift(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the keys of a nested `eagle_config` brought up; top-level keys win."""
    nested = config.get("eagle_config")
    fields = {**(nested if isinstance(nested, dict) else {}), **config}
    if fields.get("fc_norm") is None and fields.get("use_aux_norm") is not None:
        fields["fc_norm"] = fields["use_aux_norm"]
    return fields


def variants_of(config: Eagle3Config) -> dict[str, str]:
    """What sets a draft apart from the plain EAGLE-3 form, as key and words."""
    rope = config.rope_parameters["rope_type"]
    present = {
        "layers": (config.num_hidden_layers > 1, f"{config.num_hidden_layers} layers"),
        "norm_before_residual": (config.norm_before_residual, "norm_before_residual"),
        "norm_before_fc": (config.norm_before_fc, "norm_before_fc"),
        "fc_norm": (config.fc_norm, "fc_norm"),
        "norm_output": (config.norm_output, "norm_output"),
        "qk_norm": (config.qk_norm, "norms of queries and keys"),
        "attention_bias": (config.attention_bias, "attention_bias"),
        "mlp_bias": (config.mlp_bias, "mlp_bias"),
        "fc_bias": (config.fc_bias, "a bias of fc"),
        "final_norm": (not config.final_norm, "a missing final norm"),
        "single_state": (not config.use_aux_hidden_state, "use_aux_hidden_state false (one state, no fc)"),
        "aux_count": (
            config.use_aux_hidden_state and config.num_aux_hidden_states != 3,
            f"{config.num_aux_hidden_states} aux hidden states",
        ),
        "aux_ids": (_other_ids(config), f"aux ids {config.aux_hidden_state_layers} (not the default)"),
        "sliding_window": (config.sliding_window is not None, "sliding_window"),
        "head_dim": (
            config.head_dim * config.num_attention_heads != config.hidden_size,
            f"head_dim {config.head_dim} beside {config.num_attention_heads} heads and width {config.hidden_size}",
        ),
        "rope": (rope not in {"default", "linear", "dynamic"}, f"RoPE of type {rope}"),
    }
    return {key: text for key, (there, text) in present.items() if there}


def _other_ids(config: Eagle3Config) -> bool:
    ids, layers = config.aux_hidden_state_layers, config.target_num_hidden_layers
    if not config.use_aux_hidden_state or ids is None:
        return ids is not None
    if layers is None:
        # The last id says which depth it would have to be: ids that are the default of no model can be told so.
        layers = max(ids) + 3
        return tuple(ids) != (2, layers // 2, layers - 3)
    return tuple(ids) != default_aux_layers(layers)


def llama_fields(config: Eagle3Config) -> dict[str, Any]:
    """The draft's config under the names that `LlamaConfig` and its like use, on all lines of transformers."""
    scaling = {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}
    if scaling["rope_type"] == "default":
        scaling = {key: value for key, value in scaling.items() if key != "rope_type"}
    else:
        scaling["type"] = scaling["rope_type"]  # the older name, which EAGLE's code reads
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": scaling or None,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    if config.sliding_window is not None:
        fields["sliding_window"] = config.sliding_window
    return fields


def target_fields(config: Eagle3Config) -> dict[str, Any]:
    """What is known of the target, top level in every layout that is written."""
    names = ("target_num_hidden_layers", "target_model_type", "target_name_or_path", "target_architectures")
    known = {name: getattr(config, name, None) for name in names}
    if config.target_hidden_size != config.hidden_size:
        known["target_hidden_size"] = config.target_hidden_size
    return {name: value for name, value in known.items() if value is not None}


def exported_tensors(draft: Eagle3DraftModel, midlayer: bool) -> dict[str, torch.Tensor]:
    """The draft's tensors for a file; without the map where there is nothing to map.

    Args:
        draft: the draft.
        midlayer: call the first layer `midlayer`.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in draft.state_dict().items()}
    if tensors["d2t"].numel() == draft.config.vocab_size and not tensors["d2t"].any():
        del tensors["d2t"], tensors["t2d"]
    if midlayer:
        prefix = "layers.0."
        tensors = {
            f"midlayer.{name[len(prefix) :]}" if name.startswith(prefix) else name: tensor
            for name, tensor in tensors.items()
        }
    return tensors


def dtype_name(draft: Eagle3DraftModel) -> str:
    """The dtype of the draft's weights, as a config spells it."""
    return str(draft.lm_head.weight.dtype).removeprefix("torch.")


def write_json(folder: Path, content: dict[str, Any], name: str = "config.json") -> None:
    """Write a JSON file, keys in the order given."""
    (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write `model.safetensors`; every tensor on its own, shared memory isn't allowed in that format."""
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def vllm_line(folder: Path, tokens: int) -> str:
    """The `--speculative-config` of vLLM."""
    return json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": tokens})


def sglang_line(folder: Path, tokens: int) -> str:
    """The flags of SGLang, for a chain."""
    return (
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {folder} --speculative-num-steps {tokens} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
    )
