"""Files that are whole or aren't there."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step: after an error, on a full disk say, what was there before still is.

    Raises:
        OSError: it can't be written.
    """
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
