"""EAGLE-3 speculative decoding for transformers: the same output, fewer target forwards.

Names are loaded at first use, so `import eagle3_hf` doesn't import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "AutoEagle3Target": ".target",
    "DrafterInvariantSampling": ".decoding.invariant",
    "Eagle3CandidateGenerator": ".decoding.candidate_generator",
    "Eagle3Config": ".configuration_eagle3",
    "Eagle3DraftModel": ".modeling_eagle3",
    "Eagle3TargetMixin": ".target",
    "RejectionLogitsProcessor": ".decoding.residual_processor",
    "SpeculationMetadata": ".decoding.metadata",
    "SpeculationStats": ".decoding.statistics",
    "SpeculationStreamer": ".decoding.streaming",
    "SpeculativeCache": ".decoding.cache",
    "disable_eagle3": ".target",
    "enable_eagle3": ".target",
    "expected_tokens": ".decoding.theory",
    "pack_linears": ".packing",
    "rejection_sample": ".decoding.rejection",
    "rejection_sample_flat": ".decoding.rejection",
    "resolve_model": ".resolve",
    "speculative_decode": ".decoding.reference",
    "unpack_linears": ".packing",
}
__all__ = [*_NAMES, "__version__"]

if TYPE_CHECKING:
    from .configuration_eagle3 import Eagle3Config
    from .decoding.cache import SpeculativeCache
    from .decoding.candidate_generator import Eagle3CandidateGenerator
    from .decoding.invariant import DrafterInvariantSampling
    from .decoding.metadata import SpeculationMetadata
    from .decoding.reference import speculative_decode
    from .decoding.rejection import rejection_sample, rejection_sample_flat
    from .decoding.residual_processor import RejectionLogitsProcessor
    from .decoding.statistics import SpeculationStats
    from .decoding.streaming import SpeculationStreamer
    from .decoding.theory import expected_tokens
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
