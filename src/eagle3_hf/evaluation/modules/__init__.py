"""The metrics for `evaluate.load`: each file beside this one is a module that it can load.

`evaluate` runs them from a copy, so they import `eagle3_hf` by its full name.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("speculation_acceptance", "speculation_losslessness", "speculation_speedup")


def module_path(name: str) -> str:
    """Path to give to `evaluate.load()`.

    Raises:
        ValueError: there is no module of that name.
    """
    if name not in NAMES:
        raise ValueError(f"no metric module {name!r}; there are {', '.join(NAMES)}")
    return str(Path(__file__).with_name(f"{name}.py"))
