"""From loaded models to what the graphs need: shapes, and weights under fixed names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..aux_layers import FINAL_STATE, text_config
from ..configuration_eagle3 import Eagle3Config
from ..modeling_eagle3 import Eagle3DraftModel
from ..target import AutoEagle3Target, check_draft_fits, disable_eagle3, enable_eagle3
from .layers import Shape

# Families with Llama's decoder: pre-norm, rotary positions, gated MLP; biases and query/key norms may be there.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Frequencies that don't depend on the length of the text, so that a table made once is right.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
_ROPE = "rope.inverse_frequencies"


@dataclass
class Models:
    """A pair, taken apart.

    Attributes:
        target_config, draft_config: as they were loaded.
        target_shape, draft_shape: for the graphs.
        aux_layers: ids of the target states that the draft reads.
        target_names, draft_names: the graphs' own weight names, and under which name each is stored.
        stored: the tensors, `target.*` and `draft.*`.
    """

    target_config: Any
    draft_config: Eagle3Config
    target_shape: Shape
    draft_shape: Shape
    aux_layers: tuple[int, ...]
    target_names: dict[str, str]
    draft_names: dict[str, str]
    stored: dict[str, torch.Tensor]
    generation_config: Any


def check_family(config: Any) -> None:
    """Refuse targets whose decoder isn't the one that the graphs compute.

    Args:
        config: the whole model's, of which text may be a part.

    Raises:
        ValueError: another family, or a feature of one of these that isn't built; named.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise ValueError(
            f"model type {kind!r} can't be exported: the static graphs are Llama-family decoders "
            f"({', '.join(FAMILIES)})"
        )
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    uses_window = getattr(config, "use_sliding_window", kind == "mistral")
    if windowed or (uses_window and getattr(config, "sliding_window", None)):
        raise ValueError(f"this {kind} model has sliding-window layers, which the static graphs don't compute")
    if getattr(config, "quantization_config", None):
        raise ValueError(f"this {kind} model is quantised: export the original weights")


def _rope(module: Any, who: str) -> tuple[torch.Tensor, float]:
    if module.rope_type not in _FIXED_ROPE:
        raise ValueError(
            f"the {who}'s RoPE of type {module.rope_type!r} changes with the text's length, which a static graph "
            f"can't: exportable are {', '.join(_FIXED_ROPE)}"
        )
    return module.inv_freq.detach().float().clone(), float(module.attention_scaling)


def _shape(config: Any, vocab_size: int, rope_scale: float) -> Shape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        eps=config.rms_norm_eps,
        hidden_act=config.hidden_act,
        rope_scale=rope_scale,
    )


def _plain(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def take_apart(target: Any, draft: Eagle3DraftModel) -> Models:
    """Collect what the graphs need from a loaded pair.

    Raises:
        ValueError: the family isn't supported, or the draft doesn't fit the target.
    """
    # Packing would put another class of linear in, and a second copy of the weights.
    changed = not hasattr(target, "get_eagle3_aux_hidden_state_layers")
    check_family(target.config)
    speculating = enable_eagle3(target, pack=False) if changed else target
    try:
        aux_layers = check_draft_fits(speculating, draft)
    finally:
        if changed:
            disable_eagle3(target)
    if aux_layers == (FINAL_STATE,) or not draft.config.use_aux_hidden_state:
        raise ValueError("drafts without fc (use_aux_hidden_state false) aren't supported on Neuron")
    config = text_config(target)
    frequencies, scale = _rope(target.model.rotary_emb, "target")
    state = _plain(target.state_dict())
    names = {name: f"target.{name}" for name in state}
    embeddings = "model.embed_tokens.weight"
    tied = state["lm_head.weight"].data_ptr() == state[embeddings].data_ptr()
    if tied:
        names["lm_head.weight"] = f"target.{embeddings}"
        del state["lm_head.weight"]
    stored = {f"target.{name}": tensor for name, tensor in state.items()}
    stored[f"target.{_ROPE}"] = frequencies
    names[_ROPE] = f"target.{_ROPE}"

    draft_frequencies, draft_scale = _rope(draft.rotary_emb, "draft")
    own = {name: tensor for name, tensor in _plain(draft.state_dict()).items() if name not in ("d2t", "t2d")}
    size = draft.config.draft_vocab_size
    own["draft_to_target"] = (draft.d2t.cpu() + torch.arange(size)).to(torch.int32)
    own[_ROPE] = draft_frequencies
    draft_names = {name: f"draft.{name}" for name in own}
    stored |= {f"draft.{name}": tensor for name, tensor in own.items()}
    if not draft.config.own_embeddings:
        draft_names["embed_tokens.weight"] = f"target.{embeddings}"
    return Models(
        target_config=config,
        draft_config=draft.config,
        target_shape=_shape(config, config.vocab_size, scale),
        draft_shape=_shape(draft.config, size, draft_scale),
        aux_layers=aux_layers,
        target_names=names,
        draft_names=draft_names,
        stored=stored,
        generation_config=target.generation_config,
    )


def load_pair(model: Any, draft_model: Any, dtype: torch.dtype, **kwargs: Any) -> tuple[Any, Eagle3DraftModel]:
    """Load a pair, or take models that are loaded already as they are.

    Args:
        model, draft_model: folder or Hub id, or the model.
        kwargs: for both `from_pretrained` calls (`token`, `revision`, ...: the revision is the target's alone).

    Raises:
        ValueError: a loaded model of another dtype.
    """
    hub = {name: value for name, value in kwargs.items() if value is not None}
    loaded = []
    for given, loader in ((model, AutoEagle3Target), (draft_model, Eagle3DraftModel)):
        if isinstance(given, torch.nn.Module):
            has = next(given.parameters()).dtype
            if has != dtype:
                raise ValueError(f"{type(given).__name__} is loaded in {has}, the export is for {dtype}")
            loaded.append(given.eval())
            continue
        extra: dict[str, Any] = {"pack": False} if loader is AutoEagle3Target else {}
        loaded.append(loader.from_pretrained(given, dtype=dtype, **extra, **hub).eval())
        hub.pop("revision", None)
    return loaded[0], loaded[1]
