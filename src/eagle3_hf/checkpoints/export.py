"""Writing a draft in another published layout."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..modeling_eagle3 import Eagle3DraftModel
from .families import FORMATS

logger = logging.getLogger(__name__)


@dataclass
class Exported:
    """What was written.

    Attributes:
        folder: where.
        format: layout.
        files: names of the files.
        serving: lines to paste, by the tool they are for.
        warnings: what to know before using it.
    """

    folder: Path
    format: str
    files: list[str]
    serving: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def export_draft(
    draft: Eagle3DraftModel, folder: str | os.PathLike, format: str, tokens: int | None = None
) -> Exported:
    """Write `draft` so that other tools load it.

    Args:
        draft: any draft.
        folder: where to; made if need be, must hold no other checkpoint.
        format: `speculators` (vLLM), `specforge` (SGLang, vLLM), `eagle` (EAGLE's own code) or `transformers` (ours).
        tokens: tokens drafted a round, for the lines to paste and the layouts that say so; default: the draft's own.

    Raises:
        ValueError: an unknown format, or a draft that readers of that format would run differently.
        OSError: the folder holds a checkpoint already.
    """
    layout = FORMATS.get(format)
    if layout is None:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    warnings = layout.refuse_export(draft)
    folder = Path(folder)
    present = sorted(file.name for file in folder.glob("*") if file.suffix in {".bin", ".safetensors", ".json"})
    if present:
        raise OSError(
            f"{folder} holds files already ({', '.join(present[:3])}): a mixed checkpoint would be unreadable"
        )
    folder.mkdir(parents=True, exist_ok=True)
    count = tokens or draft.generation_config.num_assistant_tokens
    layout.write(draft, folder, count)
    for text in warnings:
        logger.warning("%s: %s", folder, text)
    return Exported(
        folder,
        format,
        sorted(file.name for file in folder.iterdir()),
        layout.serving(folder.resolve(), count),
        warnings,
    )
