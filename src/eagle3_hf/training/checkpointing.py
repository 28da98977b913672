"""Checkpoint folders that are whole or not there.

A `Trainer` writes a checkpoint file by file, and transformers picks the last folder by its name alone. A process that
is killed while it writes would leave a folder that can't be loaded and that hides the good one before it. Here a
folder counts only once `complete.json`, written last and by a rename, lists its files and their sizes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MARKER = "complete.json"
_NAME = re.compile(r"^checkpoint-(\d+)$")


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARKER)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def mark_complete(folder: str | os.PathLike) -> None:
    """Declare that everything in `folder` is written."""
    folder = Path(folder)
    scratch = folder / f".{MARKER}.tmp"
    # Data before marker, also on the disk: after a power cut the marker must not be all there is.
    for name in _sizes(folder):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    content = json.dumps({"files": _sizes(folder)}, indent=1)
    with open(scratch, "w", encoding="utf-8") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(scratch, folder / MARKER)


def unmark(folder: str | os.PathLike) -> None:
    """Take the marker away, before files in `folder` are written anew or removed."""
    Path(folder, MARKER).unlink(missing_ok=True)


def is_complete(folder: str | os.PathLike) -> bool:
    """Whether `folder` has its marker, and every file that it lists in its size."""
    folder = Path(folder)
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def step_of(folder: str | os.PathLike) -> int:
    """The update a checkpoint folder was written at.

    Raises:
        ValueError: not named `checkpoint-N`.
    """
    match = _NAME.match(Path(folder).name)
    if match is None:
        raise ValueError(f"{folder} is no checkpoint folder: its name isn't checkpoint-N")
    return int(match[1])


def checkpoints(output_dir: str | os.PathLike, whole: bool = True) -> list[Path]:
    """Checkpoint folders in `output_dir`, oldest first; with `whole` only complete ones."""
    folder = Path(output_dir)
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.match(path.name) and path.is_dir()]
    return sorted((path for path in found if not whole or is_complete(path)), key=step_of)


def last_checkpoint(output_dir: str | os.PathLike) -> Path | None:
    """The newest complete checkpoint, or `None`."""
    return next(reversed(checkpoints(output_dir)), None)


def rotate(output_dir: str | os.PathLike, keep: int | None, best: str | os.PathLike | None = None) -> list[Path]:
    """Remove the oldest checkpoints beyond `keep`, never the newest or `best`; half-written older ones go too.

    Returns:
        What was removed.
    """
    removed = []
    complete = checkpoints(output_dir)
    if not complete:
        return []
    newest = complete[-1]
    kept = {newest} if best is None else {newest, Path(best)}
    surplus = [path for path in checkpoints(output_dir, whole=False) if path not in complete]
    if keep is not None and keep > 0:
        others = [path for path in complete if path not in kept]
        surplus += others[: max(len(complete) - max(keep, len(kept)), 0)]
    for path in surplus:
        if step_of(path) < step_of(newest) and path not in kept:
            unmark(path)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def load_weights(model: Any, folder: str | os.PathLike) -> None:
    """Load what `save_pretrained` wrote into an existing model, every weight.

    Raises:
        ValueError: weights are missing or unknown.
    """
    from safetensors.torch import load_file

    weights: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        weights |= load_file(path)
    found = model.load_state_dict(weights, strict=False)
    # Tied weights are stored once.
    lacking = sorted(set(found.missing_keys) - set(getattr(model, "_tied_weights_keys", None) or ()))
    if lacking or found.unexpected_keys:
        raise ValueError(f"{folder}: weights {lacking} are missing, {found.unexpected_keys} unknown")
