"""Auxiliary hidden states: which ones, where a model's layers are, and how they are captured.

One axis is used everywhere: id `i` is the **input** of decoder layer `i`, which is Hugging Face's
`hidden_states[i]`; id `L` (the number of layers) is the input of the final norm, which `hidden_states[L]` is not. That
one, the final norm's output, is [`FINAL_STATE`]: no draft joins it with others, so it stands alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

FINAL_STATE = -1  # the output of the final norm, Hugging Face's hidden_states[-1]; read by drafts without aux states

_LAYER_LISTS = ("layers", "h", "blocks", "block", "decoder_layers")
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "out_norm", "layer_norm")
_INNER_MODELS = ("model", "language_model", "text_model", "decoder", "transformer", "gpt_neox", "backbone")


def text_config(model: nn.Module) -> Any:
    """The text part of a model's config."""
    config: Any = model.config
    return config.get_text_config()


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The ids that every EAGLE-3 implementation falls back to: `(2, L//2, L-3)`, ascending.

    A shallow model gets them clamped to `0..L` and without repeats, with a warning.
    """
    wanted = (2, num_layers // 2, num_layers - 3)
    ids = tuple(sorted({min(max(i, 0), num_layers) for i in wanted}))
    if ids != wanted:
        logger.warning("a model of %d layers is too shallow for aux layers %s: %s are used", num_layers, wanted, ids)
    return ids


def check_aux_layers(ids: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Validate explicit ids: integers in `0..num_layers`, at least one, no repeats; the order is kept.

    `(FINAL_STATE,)` is valid too.
    """
    ids = tuple(int(i) for i in ids)
    if ids == (FINAL_STATE,):
        return ids
    if not ids:
        raise ValueError("at least one aux layer id is needed")
    bad = [i for i in ids if not 0 <= i <= num_layers]
    if bad:
        raise ValueError(
            f"aux layer ids {bad} are outside 0..{num_layers}: the target has {num_layers} decoder layers "
            f"(id i is the input of layer i, id {num_layers} the input of the final norm; {FINAL_STATE}, its output, "
            "only alone)"
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"aux layer ids {list(ids)} repeat")
    return ids


def _attribute(model: nn.Module, path: str) -> Any:
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            return None
    return value


def find_decoder(model: nn.Module, layers_attribute: str | None = None) -> tuple[Sequence[nn.Module], nn.Module | None]:
    """Find a causal LM's decoder layers and final norm.

    Args:
        model: any decoder-only Hugging Face model.
        layers_attribute: dotted path to the list of layers, where the standard names don't find it.

    Returns:
        The layers, and the module that normalises the last layer's output (`None` if there is none of a known name).

    Raises:
        ValueError: no list of as many layers as the config says; the message says which argument helps.
    """
    expected = getattr(text_config(model), "num_hidden_layers", None)
    if layers_attribute is not None:
        layers = _attribute(model, layers_attribute)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(f"layers_attribute={layers_attribute!r} is no ModuleList of {type(model).__name__}")
        parent = _attribute(model, layers_attribute.rpartition(".")[0]) if "." in layers_attribute else model
        return layers, _final_norm(parent)
    queue, seen = [model], set()
    while queue:
        module = queue.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name in _LAYER_LISTS:
            layers = getattr(module, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) == expected:
                return layers, _final_norm(module)
        queue += [inner for name in _INNER_MODELS if isinstance(inner := getattr(module, name, None), nn.Module)]
    raise ValueError(
        f"cannot find the {expected} decoder layers of {type(model).__name__}: pass "
        "layers_attribute='path.to.layers' to enable_eagle3() or AutoEagle3Target.from_pretrained()"
    )


def _final_norm(module: nn.Module) -> nn.Module | None:
    return next((norm for name in _FINAL_NORMS if isinstance(norm := getattr(module, name, None), nn.Module)), None)


class AuxCapture:
    """Context in which forwards of a model leave the wanted layer inputs in `states`.

    The hooks exist only inside the context, so nothing is captured, and no memory held, when nobody asks.

    Args:
        layers: the model's decoder layers.
        final_norm: its final norm, needed for id `len(layers)`.
        ids: aux ids, in the order the draft's `fc` expects.
    """

    def __init__(self, layers: Sequence[nn.Module], final_norm: nn.Module | None, ids: Sequence[int]):
        self.ids = tuple(ids)
        self.states: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._thread = threading.get_ident()
        self._modules = []
        for i in self.ids:
            module = layers[i] if 0 <= i < len(layers) else final_norm
            if module is None:
                raise ValueError(f"aux layer id {i} needs the model's final norm, and none of a known name was found")
            self._modules.append((i, module))

    def __enter__(self) -> AuxCapture:
        self._thread = threading.get_ident()
        for i, module in self._modules:
            if i == FINAL_STATE:
                self._hooks.append(module.register_forward_hook(self._record_output))
            else:
                self._hooks.append(module.register_forward_pre_hook(self._recorder(i), with_kwargs=True))
        return self

    def _record_output(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if threading.get_ident() == self._thread:
            self.states[FINAL_STATE] = output

    def _recorder(self, i: int):
        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            # Hooks hang on the module: a forward that another thread runs meanwhile comes here too.
            if threading.get_ident() == self._thread:
                self.states[i] = args[0] if args else kwargs["hidden_states"]

        return record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def take(self) -> tuple[torch.Tensor, ...]:
        """The last forward's states, `[batch, sequence, hidden]` each, in the order of `ids`; forgets them."""
        missing = [i for i in self.ids if i not in self.states]
        if missing:
            raise RuntimeError(f"the target's forward never reached aux layers {missing}")
        states = tuple(self.states[i] for i in self.ids)
        odd = {i: tuple(state.shape) for i, state in zip(self.ids, states) if state.dim() != 3}
        if odd:
            raise ValueError(f"aux layer inputs must be [batch, sequence, hidden], this model's are {odd}")
        self.states.clear()
        return states
