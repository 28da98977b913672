"""Targets: any decoder-only Hugging Face causal LM, made able to speculate with an EAGLE-3 draft."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import types
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationMixin, LogitsProcessorList, PreTrainedModel

from .aux_layers import FINAL_STATE, AuxCapture, check_aux_layers, default_aux_layers, find_decoder, text_config
from .compat import accepts, cache_argument
from .decoding.arguments import settle_fields
from .decoding.cache import SpeculativeCache
from .decoding.kept import refuse_other_kinds
from .decoding.multimodal import refuse_media
from .decoding.options import DraftingOptions
from .decoding.statistics import SpeculationStats
from .modeling_eagle3 import Eagle3DraftModel
from .packing import PackedLinear, pack_linears, unpack_linears

logger = logging.getLogger(__name__)

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_AUX_OUTPUT = "output_aux_hidden_states"


class Eagle3TargetMixin:
    """What a target gains: aux hidden states, and `generate(assistant_model=<Eagle3DraftModel>)`.

    Made by [`enable_eagle3`] or [`AutoEagle3Target`], not by hand. Every other way of generating stays transformers'
    own.
    """

    _eagle3_original_class: type[PreTrainedModel]
    _eagle3_layers_attribute: str | None
    _eagle3_aux_layers: tuple[int, ...] | None
    _eagle3_packed: bool
    _eagle3_checked: Any
    _eagle3_media_checked: set
    speculation_stats: SpeculationStats | None

    def set_aux_hidden_state_layers(self, layers: Iterable[int] | None) -> None:
        """Choose the aux hidden states by id; `None` goes back to the draft's choice or the default.

        Args:
            layers: ids in `0..L`, in the order the draft's `fc` expects; id `i` is the input of layer `i`.

        Raises:
            ValueError: an id is out of range or given twice.
        """
        count = text_config(self).num_hidden_layers
        self._eagle3_aux_layers = None if layers is None else check_aux_layers(layers, count)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The ids set by hand, else the default `(2, L//2, L-3)`."""
        if self._eagle3_aux_layers is not None:
            return self._eagle3_aux_layers
        return default_aux_layers(text_config(self).num_hidden_layers)

    def capture_aux_hidden_states(self, layers: Iterable[int] | None = None) -> AuxCapture:
        """A context in which each forward leaves its aux hidden states to `take()`."""
        ids = self.get_eagle3_aux_hidden_state_layers() if layers is None else tuple(layers)
        decoder_layers, final_norm = find_decoder(self, self._eagle3_layers_attribute)
        return AuxCapture(decoder_layers, final_norm, check_aux_layers(ids, len(decoder_layers)))

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As the original class saves: the architecture's own name goes into the config."""
        speculating = type(self)
        self.__class__ = self._eagle3_original_class
        try:
            return self.save_pretrained(*args, **kwargs)
        finally:
            self.__class__ = speculating

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # pickle (torch.save of a whole model) looks classes up by name, and this one is made at run time.
        return _bare_instance, (self._eagle3_original_class,), self.__dict__

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict, synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        # The first step of `generate()`: what follows is told that the assistant is a draft.
        if isinstance(assistant_model, Eagle3DraftModel):
            if custom_generate is not None:
                raise ValueError("custom_generate takes the place of an EAGLE-3 draft's loop: give one of them")
            if kwargs.get("assistant_tokenizer") is not None:
                raise ValueError(
                    "assistant_tokenizer: an EAGLE-3 draft has its target's vocabulary and needs none. A pipeline asks "
                    "for one where draft.config lacks the target's bos_token_id, eos_token_id and pad_token_id: set "
                    "them, or give assistant_model when calling the pipeline"
                )
            refuse_media(self, kwargs)
            kwargs["_eagle3_draft"] = True
        return super()._extract_generation_mode_kwargs(custom_generate, kwargs, synced_gpus, assistant_model, streamer)

    def _prepare_generation_config(self, generation_config: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        # Drafting options are taken out of the keywords here, before transformers takes them for model inputs, and
        # ride on the prepared config, which is a fresh copy for each call.
        drafting = {name: kwargs.pop(name) for name in DraftingOptions.own_names() if name in kwargs}
        drafting |= {name: kwargs[name] for name in DraftingOptions.shared_names() if kwargs.get(name) is not None}
        with_draft = kwargs.pop("_eagle3_draft", False)
        if with_draft and generation_config is not None:
            drafting = DraftingOptions.set_on(generation_config) | drafting
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)
        prepared._eagle3_drafting = drafting
        if with_draft:
            settle_fields(prepared)
        return prepared, model_kwargs

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any) -> Any:
        # Every other way of generating gets what a speculative cache holds as an ordinary one.
        name = cache_argument(type(self).forward)  # type: ignore[attr-defined]
        past = model_kwargs.get(name)
        if isinstance(past, SpeculativeCache) and not getattr(generation_config, "_eagle3_draft", False):
            model_kwargs[name] = past.to_dynamic_cache(_paddings(past, model_kwargs.get("attention_mask")))
        elif past is not None and getattr(generation_config, "_eagle3_draft", False):
            refuse_other_kinds(past)
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: dict) -> torch.Tensor:
        # Only 5.x has this step. A model that takes a text's image positions from its last prompt may have had other
        # prompts since; a speculative cache remembers its own.
        past = model_kwargs.get(cache_argument(type(self).forward))  # type: ignore[attr-defined]
        if not isinstance(past, SpeculativeCache) or past.kept is None or past.kept.offsets is None:
            return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        counted = GenerationMixin._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)
        return counted[None] + torch.tensor(past.kept.offsets, device=counted.device)[:, None]

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, mode_kwargs: dict) -> None:
        draft = mode_kwargs.get("assistant_model")
        if not isinstance(draft, Eagle3DraftModel):
            if getattr(generation_config, "_eagle3_drafting", None):
                own = sorted(set(generation_config._eagle3_drafting) & set(DraftingOptions.own_names()))
                if own:
                    got = type(draft).__name__
                    raise ValueError(f"{own} need assistant_model to be an Eagle3DraftModel, got {got}")
            return super()._validate_generation_mode(generation_mode, generation_config, mode_kwargs)
        check_draft_fits(self, draft)
        # transformers refuses num_return_sequences > 1 in assisted generation; our loop takes any batch.
        wanted, generation_config.num_return_sequences = generation_config.num_return_sequences, 1
        try:
            super()._validate_generation_mode(generation_mode, generation_config, mode_kwargs)
        finally:
            generation_config.num_return_sequences = wanted

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        # transformers puts a user's processors before temperature, top-k and top-p. Those that need the finished
        # scores go behind them, and those that count a row's own tokens are told its padding.
        processors = super()._get_logits_processor(*args, **kwargs)
        if not any(getattr(processor, "runs_last", False) for processor in processors):
            return processors
        mask = (kwargs.get("model_kwargs") or {}).get("attention_mask")
        if mask is not None and mask.shape[1] != kwargs.get("input_ids_seq_length"):
            mask = None  # inputs_embeds: the processors see no prompt, so no padding either
        ordered = sorted(processors, key=lambda processor: getattr(processor, "runs_last", False))
        return LogitsProcessorList(p.for_batch(mask) if hasattr(p, "for_batch") else p for p in ordered)

    def _assisted_decoding(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        draft = kwargs.get("assistant_model")
        if not isinstance(draft, Eagle3DraftModel):
            return super()._assisted_decoding(input_ids, *args, **kwargs)
        from .decoding.loop import speculate

        # What lasts longer than the call (the cache above all) must be of use outside inference mode too.
        with torch.inference_mode(False), torch.no_grad():
            return speculate(self, input_ids, *args, **kwargs)


def _paddings(past: SpeculativeCache, mask: Any) -> list[int]:
    rows = len(past.lengths)
    if mask is None:
        return [0] * rows
    if rows and len(mask) != rows:
        raise ValueError(f"past_key_values holds {rows} rows, the input has {len(mask)}")
    return (mask.shape[1] - mask.long().sum(dim=1)).tolist()


def size_differences(config: Any, text: Any) -> list[tuple[str, int, int]]:
    """Where a draft's config and a target's text config differ: what, the size it was made for, the target's size."""
    pairs = (
        ("hidden size", config.target_hidden_size, text.hidden_size),
        ("vocabulary", config.vocab_size, text.vocab_size),
        ("number of layers", config.target_num_hidden_layers, text.num_hidden_layers),
    )
    return [(what, made_for, has) for what, made_for, has in pairs if made_for is not None and made_for != has]


def check_draft_fits(target: Any, draft: Eagle3DraftModel) -> tuple[int, ...]:
    """Check that `draft` was made for `target` and settle the aux ids.

    Returns:
        The aux ids to capture: those set on the target by hand, else the draft's, else the default.

    Raises:
        ValueError: sizes differ; the message names both numbers.
    """
    config, text = draft.config, text_config(target)
    for what, made_for, has in size_differences(config, text):
        raise ValueError(
            f"this draft doesn't fit {type(target).__name__}: it was made for a target with {what} {made_for}, "
            f"the target's {what} is {has}"
        )
    if target._eagle3_aux_layers is None and config.aux_hidden_state_layers is None and not config.use_aux_hidden_state:
        ids: tuple[int, ...] = (FINAL_STATE,)
    elif target._eagle3_aux_layers is not None or config.aux_hidden_state_layers is None:
        ids = target.get_eagle3_aux_hidden_state_layers()
    else:
        ids = check_aux_layers(config.aux_hidden_state_layers, text.num_hidden_layers)
    if len(ids) != config.num_aux_hidden_states:
        raise ValueError(f"the draft reads {config.num_aux_hidden_states} aux hidden states, {len(ids)} are set: {ids}")
    return ids


def _check_target(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; EAGLE-3 speculates with decoder-only models")
    text, forward = text_config(model), type(model).forward
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    recurrent = sorted(set(kinds) - _ATTENTION_LAYERS)
    if recurrent:
        raise ValueError(f"{name} has layers of type {recurrent}, whose state can't be rolled back after a rejection")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} keeps a recurrent state, which can't be rolled back after a rejection")
    if not hasattr(model, "generate"):
        raise ValueError(f"{name} has no generate(); pass a causal language model")
    if not accepts(forward, "position_ids") or getattr(text, "alibi", False):
        raise ValueError(f"{name} takes no position_ids, which draft trees and rows of different lengths need")
    if not accepts(forward, cache_argument(forward)):
        raise ValueError(f"{name} has no key/value cache to go back in after a rejection")
    # Families older than transformers' attention interface cut their window by cache slot, not by position.
    windowed = getattr(text, "sliding_window", None) or "local" in (getattr(text, "attention_layers", None) or ())
    if windowed and not model._supports_attention_backend:
        raise ValueError(f"{name} applies its sliding window in a way of its own, which draft trees don't fit into")


@functools.cache
def _speculating_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def forward(self: Any, *args: Any, output_aux_hidden_states: bool = False, **kwargs: Any) -> Any:
        if not output_aux_hidden_states:
            return original.forward(self, *args, **kwargs)
        with self.capture_aux_hidden_states() as capture:
            outputs = original.forward(self, *args, **kwargs)
        states = capture.take()
        if isinstance(outputs, tuple):
            return (*outputs, states)
        outputs["aux_hidden_states"] = states
        return outputs

    # generate() reads the signature to see which inputs a model takes, so the original's is kept and one is added.
    functools.update_wrapper(forward, original.forward)
    signature = inspect.signature(original.forward)
    parameters = list(signature.parameters.values())
    added = inspect.Parameter(_AUX_OUTPUT, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    at = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters.insert(at, added)
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    body = {"forward": forward, "__module__": original.__module__, "_eagle3_original_class": original}
    made = type(original.__name__, (Eagle3TargetMixin, original), body)
    # The plain name stays the original's: transformers' pipelines look supported models up by it.
    made.__qualname__ = f"Eagle3{original.__qualname__}"
    return made


def _bare_instance(original: type[PreTrainedModel]) -> Any:
    made: Any = _speculating_class(original)  # type: ignore[arg-type]
    return made.__new__(made)


def enable_eagle3(
    model: PreTrainedModel,
    aux_hidden_state_layers: Iterable[int] | None = None,
    layers_attribute: str | None = None,
    pack: bool | None = None,
) -> Any:
    """Make a loaded causal LM able to speculate, in place.

    Args:
        model: any decoder-only Hugging Face causal LM.
        aux_hidden_state_layers: see [`Eagle3TargetMixin.set_aux_hidden_state_layers`].
        layers_attribute: dotted path to the decoder layers, for models whose layers aren't found by name.
        pack: run float32 CPU linears on oneDNN-packed weights (one more copy of them in memory, see
            [`pack_linears`]). `None`: yes where it applies.

    Returns:
        The same object, now an instance of [`Eagle3TargetMixin`] too. [`disable_eagle3`] undoes it.

    Raises:
        ValueError: encoder-decoder or recurrent-state models, or layers that can't be found.
    """
    if not isinstance(model, Eagle3TargetMixin):
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"enable_eagle3() takes a transformers PreTrainedModel, got {type(model).__name__}")
        _check_target(model)
        find_decoder(model, layers_attribute)
        made = _speculating_class(type(model))  # type: ignore[arg-type]
        if "forward" in model.__dict__ and hasattr(model, "_old_forward"):
            # accelerate's device hooks keep the class's forward on the instance; theirs must call ours.
            model._old_forward = types.MethodType(made.forward, model)
        model.__class__ = made
    target: Any = model
    target._eagle3_layers_attribute = layers_attribute
    target.speculation_stats = None
    target._eagle3_checked = None
    target._eagle3_media_checked = set()
    target.set_aux_hidden_state_layers(aux_hidden_state_layers)
    if pack is None:
        pack = target.device.type == "cpu" and not target.training
    if pack:
        pack_linears(target)
    else:
        unpack_linears(target)
    target._eagle3_packed = any(isinstance(module, PackedLinear) for module in target.modules())
    return target


def disable_eagle3(model: Any) -> PreTrainedModel:
    """Undo [`enable_eagle3`]: the model gets its class, forward and linears back. Other models pass unchanged."""
    if not isinstance(model, Eagle3TargetMixin):
        return model
    original = model._eagle3_original_class
    model.__class__ = original
    if "forward" in model.__dict__ and hasattr(model, "_old_forward"):
        model._old_forward = types.MethodType(original.forward, model)
    for name in (
        "_eagle3_layers_attribute",
        "_eagle3_aux_layers",
        "_eagle3_packed",
        "_eagle3_checked",
        "_eagle3_media_checked",
        "speculation_stats",
    ):
        model.__dict__.pop(name, None)
    unpack_linears(model)
    return model


class AutoEagle3Target:
    """`AutoModelForCausalLM`, with [`enable_eagle3`] applied to what it loads."""

    def __init__(self) -> None:
        raise OSError("AutoEagle3Target is made by AutoEagle3Target.from_pretrained() or .from_config()")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *args: Any,
        aux_hidden_state_layers: Iterable[int] | None = None,
        layers_attribute: str | None = None,
        pack: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load any causal LM, ready to speculate; arguments as in `AutoModelForCausalLM` and [`enable_eagle3`]."""
        model = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        return enable_eagle3(model, aux_hidden_state_layers, layers_attribute, pack)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """A randomly initialised target of this configuration, ready to speculate."""
        return enable_eagle3(AutoModelForCausalLM.from_config(config, **kwargs).eval())
