"""How a draft starts: from its target's last layers and head, from random weights, or from another draft."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..aux_layers import check_aux_layers, default_aux_layers, find_decoder, text_config
from ..configuration_eagle3 import Eagle3Config
from ..draft_layers import Eagle3DecoderLayer
from ..modeling_eagle3 import Eagle3DraftModel
from ..target import size_differences
from .recipe import DraftSection

logger = logging.getLogger(__name__)

_SWITCHES = (
    "attention_bias", "mlp_bias", "fc_bias", "qk_norm", "norm_before_residual", "norm_before_fc", "fc_norm",
    "norm_output", "final_norm", "own_embeddings",
)  # fmt: skip
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def draft_config(target_config: Any, section: DraftSection, aux_layers: Sequence[int] | None = None) -> Eagle3Config:
    """The configuration of a new draft: the target's shape, and what the recipe says otherwise.

    Args:
        target_config: the target's config; its text part counts.
        section: the recipe's `draft`.
        aux_layers: those the features were made with; default: the recipe's, else `(2, L//2, L-3)`.

    Raises:
        ValueError: the recipe's layers aren't the features', or sizes that contradict each other.
    """
    source = target_config.get_text_config()
    wanted = section.aux_hidden_state_layers
    if wanted is not None and aux_layers is not None and list(wanted) != list(aux_layers):
        raise ValueError(
            f"draft.aux_hidden_state_layers is {list(wanted)}, the features were made with {list(aux_layers)}: "
            "extract them again, or leave the key out"
        )
    layers = source.num_hidden_layers
    ids = check_aux_layers(wanted or aux_layers or default_aux_layers(layers), layers)
    hidden = section.hidden_size or source.hidden_size
    heads = section.num_attention_heads or source.num_attention_heads
    same_width = hidden == source.hidden_size
    head_dim = section.head_dim or (getattr(source, "head_dim", None) if same_width else None)
    values: dict[str, Any] = {
        "vocab_size": source.vocab_size,
        "draft_vocab_size": section.vocab_size,
        "hidden_size": hidden,
        "target_hidden_size": source.hidden_size,
        "target_num_hidden_layers": layers,
        "intermediate_size": section.intermediate_size or getattr(source, "intermediate_size", None) or 4 * hidden,
        "num_hidden_layers": section.num_hidden_layers or 1,
        "num_attention_heads": heads,
        "num_key_value_heads": section.num_key_value_heads or getattr(source, "num_key_value_heads", None) or heads,
        "head_dim": head_dim,
        "hidden_act": getattr(source, "hidden_act", None) or "silu",
        "rms_norm_eps": getattr(source, "rms_norm_eps", None) or 1e-5,
        "max_position_embeddings": source.max_position_embeddings,
        "aux_hidden_state_layers": list(ids),
    }
    values |= {name: getattr(section, name) for name in _SWITCHES if getattr(section, name) is not None}
    if section.own_embeddings is None and not same_width:
        values["own_embeddings"] = True
    values |= {name: getattr(source, name) for name in _SPECIAL_TOKENS if getattr(source, name, None) is not None}
    rotary = values["head_dim"] or hidden // heads
    if rotary % 2:
        raise ValueError(f"draft.head_dim {rotary} is odd: rotary positions turn pairs")
    return Eagle3Config(**values, **_rope(source))


def _rope(source: Any) -> dict[str, Any]:
    """The target's RoPE settings in either of transformers' forms; those of its full attention where kinds differ."""
    parameters = dict(getattr(source, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        parameters = dict(parameters.get("full_attention") or next(iter(parameters.values())))
    if not parameters:
        scaling = getattr(source, "rope_scaling", None)
        theta = getattr(source, "rope_theta", None)
        return {"rope_scaling": scaling} | ({} if theta is None else {"rope_theta": theta})
    parameters.setdefault("rope_theta", getattr(source, "rope_theta", None))
    return {"rope_parameters": parameters}


@torch.no_grad()
def new_draft(
    target: Any,
    section: DraftSection,
    vocabulary: torch.Tensor | None = None,
    aux_layers: Sequence[int] | None = None,
    layers_attribute: str | None = None,
) -> Eagle3DraftModel:
    """A float32 draft for `target`, started as `section.initialise` says.

    Args:
        target: the loaded target; only read.
        section: the recipe's `draft`.
        vocabulary: int64, ascending target ids of the head's rows. `None`: all, or an existing draft's own.
        aux_layers: see [`draft_config`].
        layers_attribute: dotted path to the target's decoder layers, where the standard names don't find them.

    Raises:
        ValueError: the vocabulary isn't of `section.vocab_size`, an existing draft doesn't fit the target or the
            section, or nothing of this target's layers can be copied.
        OSError: the draft to go on from can't be found.
    """
    if section.initialise not in ("target", "scratch"):
        return _existing(target, section, aux_layers)
    config = draft_config(target.config, section, aux_layers)
    if vocabulary is None:
        vocabulary = torch.arange(config.draft_vocab_size)
        if config.draft_vocab_size < config.vocab_size:
            raise ValueError(f"draft.vocab_size {config.draft_vocab_size} needs a vocabulary: which tokens are kept")
    draft = Eagle3DraftModel(config).float()
    draft.set_draft_vocabulary(vocabulary.cpu())
    if section.initialise == "target":
        copied, left = _copy_from_target(draft, target, vocabulary, section.fc_noise, layers_attribute)
        logger.info("from the target: %s", ", ".join(copied))
        if left:
            logger.warning("no counterpart in the target, random: %s", ", ".join(left))
    _set_drafting(draft, section)
    return draft


def _copy_from_target(
    draft: Eagle3DraftModel, target: Any, vocabulary: torch.Tensor, noise: float, layers_attribute: str | None
) -> tuple[list[str], list[str]]:
    """Copy what the target has; returns the names of what was copied and what wasn't."""
    config, hidden = draft.config, draft.config.hidden_size
    decoder_layers, final_norm = find_decoder(target, layers_attribute)
    copied: list[str] = []
    left: list[str] = []
    done = copied.append
    if hidden == config.target_hidden_size:
        # The highest aux state is nearest to what the target's last layers read.
        draft.fc.weight.normal_(std=noise)
        draft.fc.weight[:, -hidden:] += torch.eye(hidden)
        if draft.fc.bias is not None:
            draft.fc.bias.zero_()
        done("fc")
    else:
        left.append("fc")
    count = len(draft.layers)
    if count > len(decoder_layers):
        raise ValueError(
            f"draft.num_hidden_layers is {count}, the target has {len(decoder_layers)} to copy: take fewer, or "
            "draft.initialise: scratch"
        )
    for index in range(count):
        layer: Any = draft.layers[index]
        source = decoder_layers[len(decoder_layers) - count + index]
        for name, ours, theirs in _pairs(layer, source):
            (copied if theirs is not None and _copy(ours, theirs, layer) else left).append(f"layers.{index}.{name}")
    if not any(name.startswith("layers.") for name in copied):
        raise ValueError(
            f"nothing of {type(decoder_layers[-1]).__name__} fits the draft's layer: use draft.initialise: scratch"
        )
    if isinstance(draft.norm, nn.Identity):
        pass
    elif final_norm is not None and _copy(draft.norm, final_norm):
        done("norm")
    else:
        left.append("norm")
    head = target.get_output_embeddings()
    if hidden == config.target_hidden_size:
        draft.lm_head.weight.copy_(head.weight[vocabulary.to(head.weight.device)])
        done("lm_head")
    else:
        left.append("lm_head")
    if config.own_embeddings:
        table = target.get_input_embeddings().weight
        if table.shape == draft.embed_tokens.weight.shape:
            draft.embed_tokens.weight.copy_(table)
            done("embed_tokens")
        else:
            left.append("embed_tokens")
    return copied, left


def _pairs(layer: Eagle3DecoderLayer, source: nn.Module) -> list[tuple[str, nn.Module, nn.Module | None]]:
    """Each module of the draft's layer and its counterpart in the target's, by the names most families share."""
    attention, mlp = getattr(source, "self_attn", None), getattr(source, "mlp", None)
    pairs: list[tuple[str, nn.Module, nn.Module | None]] = []
    for name, module in layer.self_attn.named_children():
        pairs.append((f"self_attn.{name}", module, getattr(attention, name, None)))
    for name in ("gate_proj", "up_proj", "down_proj"):
        pairs.append((f"mlp.{name}", getattr(layer.mlp, name), getattr(mlp, name, None)))
    state_norm = layer.hidden_norm if layer.first else layer.input_layernorm
    pairs.append(("hidden_norm" if layer.first else "input_layernorm", state_norm, _norm(source, "input_layernorm")))
    # Gemma norms what attention gives under that name; what its MLP reads goes through another.
    before_mlp = "pre_feedforward_layernorm" if hasattr(source, "pre_feedforward_layernorm") else None
    pairs.append(
        (
            "post_attention_layernorm",
            layer.post_attention_layernorm,
            _norm(source, before_mlp or "post_attention_layernorm"),
        )
    )
    return pairs


def _norm(source: nn.Module, name: str) -> nn.Module | None:
    return getattr(source, name, None)


def _copy(ours: nn.Module, theirs: nn.Module, layer: Eagle3DecoderLayer | None = None) -> bool:
    """Copy weights of the same shape. q/k/v of a first layer are twice as wide: the second half reads the state."""
    mine, other = getattr(ours, "weight", None), getattr(theirs, "weight", None)
    if (
        mine is None
        or not isinstance(other, torch.Tensor)
        or not other.is_floating_point()
        or mine.dim() != other.dim()
    ):
        return False
    if mine.dim() == 1:
        # Ones through the norm show its real scale: Gemma's is 1 + weight, and a LayerNorm's gives itself away.
        probe = theirs(torch.ones(1, len(other), dtype=other.dtype, device=other.device))[0]
        if not torch.allclose(probe, other, rtol=0.02, atol=1e-3) and not torch.allclose(probe, 1 + other, rtol=0.02):
            return False
        other = other if torch.allclose(probe, other, rtol=0.02, atol=1e-3) else 1 + other
    if mine.shape == other.shape:
        mine.copy_(other)
    elif layer is not None and layer.first and mine.dim() == 2 and mine.shape == (len(other), 2 * other.shape[1]):
        # The embedding half has no counterpart in the target, and starts small.
        mine[:, : other.shape[1]].normal_(std=layer.self_attn.config.initializer_range)
        mine[:, other.shape[1] :].copy_(other)
    else:
        return False
    mine_bias, other_bias = getattr(ours, "bias", None), getattr(theirs, "bias", None)
    if mine_bias is not None:
        if isinstance(other_bias, torch.Tensor):
            mine_bias.copy_(other_bias)
        else:
            mine_bias.zero_()
    return True


def _existing(target: Any, section: DraftSection, aux_layers: Sequence[int] | None) -> Eagle3DraftModel:
    """A draft to go on from, checked against the target, the features and the recipe."""
    from ..resolve import resolve_model

    draft = Eagle3DraftModel.from_pretrained(resolve_model(section.initialise), target=target, dtype=torch.float32)
    config, text = draft.config, text_config(target)
    for what, expected, found in size_differences(config, text):
        raise ValueError(f"draft.initialise {section.initialise}: made for {what} {expected}, the target's is {found}")
    given = {
        one.name: getattr(section, one.name)
        for one in dataclasses.fields(section)
        if one.name in (*_SIZES, *_SWITCHES) and getattr(section, one.name) is not None
    }
    if section.vocab_size is not None:
        given["draft_vocab_size"] = section.vocab_size
    for name, value in given.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"draft.{name.removeprefix('draft_')} is {value} in the recipe and {getattr(config, name)} in "
                f"{section.initialise}, which it goes on from: leave the key out, or start anew"
            )
    has = config.aux_hidden_state_layers or list(default_aux_layers(text.num_hidden_layers))
    for what, wanted in (("draft.aux_hidden_state_layers", section.aux_hidden_state_layers), ("features", aux_layers)):
        if wanted is not None and list(wanted) != list(has):
            raise ValueError(f"{what}: aux layers {list(wanted)}, {section.initialise} reads {list(has)}")
    draft.config.aux_hidden_state_layers = list(has)
    _set_drafting(draft, section)
    return draft


def _set_drafting(draft: Eagle3DraftModel, section: DraftSection) -> None:
    for name in ("num_assistant_tokens", "tree_top_k", "tree_total_tokens"):
        if getattr(section, name) is not None:
            setattr(draft.generation_config, name, getattr(section, name))
