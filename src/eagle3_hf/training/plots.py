"""Curves of a training run as PNG files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def _series(history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in history if key in entry and "step" in entry]
    return [step for step, _ in points], [value for _, value in points]


def plot_training(history: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> Path:
    """Draw loss, accuracy of each step, and acceptance length over updates.

    Args:
        history: `trainer.state.log_history`.
        path: the PNG to write.

    Returns:
        `path`.

    Raises:
        ImportError: matplotlib isn't installed.
        ValueError: nothing in the history to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = sorted({key for entry in history for key in entry}, key=lambda key: (len(key), key))  # 2 before 10
    panels = [
        ("loss", [("loss", "training")] + [(key, f"step {key[5:]}") for key in keys if key.startswith("loss_")]),
        ("accuracy (training)", [(key, f"step {key[9:]}") for key in keys if key.startswith("accuracy_")]),
        ("accuracy (held-out)", [(key, f"step {key[14:]}") for key in keys if key.startswith("eval_accuracy_")]),
        ("tokens a target forward", [("eval_tau", "simulated"), ("eval_generate_tau", "generate()")]),
    ]
    panels[0][1].append(("eval_loss", "held-out, step 0"))
    if not any(_series(history, key)[0] for _, curves in panels for key, _ in curves):
        raise ValueError("nothing to draw: the run has logged neither a loss nor an accuracy yet")
    # No pyplot: its global state and its choice of a window system aren't ours to touch.
    figure = Figure(figsize=(12, 8))
    # Fixed margins: a layout engine draws everything several times, and gives up on long legends.
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.07, top=0.95, wspace=0.12, hspace=0.28)
    FigureCanvasAgg(figure)
    for axis, (title, curves) in zip(figure.subplots(2, 2).flat, panels):
        drawn = False
        for key, label in curves:
            steps, values = _series(history, key)
            if steps:
                axis.plot(steps, values, label=label, marker="." if len(steps) < 30 else None)
                drawn = True
        axis.set_title(title)
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
        if drawn:
            many = len(axis.lines) > 8
            axis.legend(loc="upper right", ncols=1 + len(axis.lines) // 9, fontsize="x-small" if many else "medium")
    path = Path(path)
    scratch = path.with_name(f".{path.name}.tmp")
    figure.savefig(scratch, format="png", dpi=100)
    os.replace(scratch, path)
    return path
