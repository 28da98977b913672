"""The layouts, in the order in which they are tried: the most telling markers first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .angelslim import AngelSlimLayout
from .eagle import EagleLayout
from .layout import Layout, WritableLayout
from .modelopt import ModelOptLayout
from .own import TransformersLayout
from .specforge import SpecForgeLayout
from .speculators import SpeculatorsLayout

LAYOUTS: tuple[Layout, ...] = (
    TransformersLayout(),
    SpeculatorsLayout(),
    AngelSlimLayout(),
    ModelOptLayout(),
    SpecForgeLayout(),
    EagleLayout(),
)
FORMATS: dict[str, WritableLayout] = {layout.name: layout for layout in LAYOUTS if isinstance(layout, WritableLayout)}


def is_own(config: dict[str, Any]) -> bool:
    """Whether this is what `Eagle3DraftModel.save_pretrained` wrote."""
    return LAYOUTS[0].evidence(config, ()) is not None


def detect(config: dict[str, Any], names: Iterable[str]) -> tuple[Layout, str]:
    """The layout of a checkpoint, and what shows it.

    Raises:
        ValueError: none of them; says what an EAGLE-3 draft would have.
    """
    names = list(names)
    for layout in LAYOUTS:
        if (evidence := layout.evidence(config, names)) is not None:
            return layout, evidence
    shown = ", ".join(sorted(names)[:3])
    raise ValueError(
        f"this is no EAGLE-3 draft of a known layout: architectures {config.get('architectures')}, tensors {shown}, "
        "... An EAGLE-3 draft has fc.weight and a decoder layer `midlayer` or `layers.0`"
    )
