"""EAGLE-3 speculative decoding for transformers: the same output, fewer target forwards.

Names are loaded at first use, so `import eagle3_hf` doesn't import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "AutoEagle3Target": ".target",
    "Eagle3CandidateGenerator": ".decoding.candidate_generator",
    "Eagle3Config": ".configuration_eagle3",
    "Eagle3DraftModel": ".modeling_eagle3",
    "Eagle3TargetMixin": ".target",
    "SpeculationStats": ".decoding.statistics",
    "SpeculationStreamer": ".decoding.streaming",
    "SpeculativeCache": ".decoding.cache",
    "disable_eagle3": ".target",
    "enable_eagle3": ".target",
    "pack_linears": ".packing",
    "resolve_model": ".resolve",
    "unpack_linears": ".packing",
}
__all__ = [*_NAMES, "__version__"]

if TYPE_CHECKING:
    from .configuration_eagle3 import Eagle3Config
    from .decoding.cache import SpeculativeCache
    from .decoding.candidate_generator import Eagle3CandidateGenerator
    from .decoding.statistics import SpeculationStats
    from .decoding.streaming import SpeculationStreamer
    from .modeling_eagle3 import Eagle3DraftModel
    from .packing import pack_linears, unpack_linears
    from .resolve import resolve_model
    from .target import AutoEagle3Target, Eagle3TargetMixin, disable_eagle3, enable_eagle3


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_NAMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
