"""Published EAGLE-3 checkpoints: recognise, read, check, write. Knows nothing of decoding."""

from __future__ import annotations

from .export import Exported, export_draft
from .families import FORMATS, LAYOUTS, detect
from .files import CheckpointFiles
from .load import load_published, prepare
from .provenance import AuxIds, Override, Provenance
from .vocabulary import fit_target_vocabulary

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "AuxIds",
    "CheckpointFiles",
    "Exported",
    "Override",
    "Provenance",
    "detect",
    "export_draft",
    "fit_target_vocabulary",
    "load_published",
    "prepare",
]
