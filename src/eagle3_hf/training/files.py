"""Files that a process may be killed over: written whole or not at all, by one process at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any


def lock_folder(folder: Path) -> IO[str]:
    """Hold `folder` for this process until the returned handle is closed (or the process ends).

    Raises:
        ValueError: another process holds it.
    """
    handle = (folder / ".lock").open("w")
    try:
        import fcntl
    except ImportError:  # not on Windows; there two runs on one folder are the user's to avoid
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise ValueError(f"another process is writing to {folder}") from None
    return handle


def settings_match(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that a folder is continued with the settings that it was begun with.

    Raises:
        ValueError: it isn't; the message names each difference.
    """
    now = json.loads(json.dumps(now))
    odd = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if odd:
        differ = "; ".join(f"{key}: {before.get(key)!r} before, {now.get(key)!r} now" for key in odd)
        raise ValueError(f"{folder} was begun with other settings ({differ}): use another folder")
