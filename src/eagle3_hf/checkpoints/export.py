"""Writing a draft in another published layout."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..modeling_eagle3 import Eagle3DraftModel
from .families import FORMATS
from .layout import variants_of

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


def _unsettled_ids(draft: Eagle3DraftModel) -> list[str]:
    """Ids whose reading nobody checked are written down as certain: the file's reader has no way to find out."""
    record, config = getattr(draft, "provenance", None), draft.config
    if record is None or not record.aux.source.startswith("eagle_config") or record.aux.written is None:
        return []
    if config.target_num_hidden_layers is not None or record.aux.ids == record.aux.written:
        return []
    if "aux_ids" not in variants_of(config):  # they can be the default ids, which only this reading makes them
        return []
    return [
        f"{record.aux.source} = {list(record.aux.written)} were read as layer outputs, unless the target has "
        f"{max(record.aux.written)} layers; that wasn't checked: pass target= (--target) when loading the draft"
    ]


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
    warnings = layout.refuse_export(draft) + _unsettled_ids(draft)
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
