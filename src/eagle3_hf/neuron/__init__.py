"""Static-shape export of a target and draft pair, for AWS Neuron and for checking it without."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {"Eagle3NeuronConfig": ".config", "Eagle3NeuronModelForCausalLM": ".model"}
__all__ = ["Eagle3NeuronConfig", "Eagle3NeuronModelForCausalLM"]

if TYPE_CHECKING:
    from .config import Eagle3NeuronConfig
    from .model import Eagle3NeuronModelForCausalLM


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name], __name__), name)
