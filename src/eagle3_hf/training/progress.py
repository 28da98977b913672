"""What a run has done: tokens, seconds, and the sums behind the next log line. Kept in checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROWS = ("loss", "slots", "correct", "scored")
Reduce = Callable[[torch.Tensor], torch.Tensor]


class DivergedError(ValueError):
    """The loss or a weight stopped being a finite number."""


def diverged(value: float, what: str, update: int, saved: Path | None) -> DivergedError:
    """The error to raise.

    Args:
        value: what isn't finite.
        what: its name.
        update: the last one that was done.
        saved: the newest checkpoint.
    """
    return DivergedError(
        f"{what} is {value} after update {update}: training has diverged. Lower training.learning_rate or "
        "training.max_grad_norm, or look for such numbers in the features. "
        + (f"The last checkpoint is {saved}." if saved else "There is no checkpoint yet.")
    )


class Progress:
    """Counts of one process; sums stay on their device until they are logged.

    Args:
        steps: of the objective.
        reduce: sums a tensor over processes.
    """

    def __init__(self, steps: int, reduce: Reduce):
        self.steps, self.reduce = steps, reduce
        self.tokens, self.seconds = 0, 0.0
        self.logged: tuple[int, float] = (0, 0.0)
        self._clock: float | None = None
        self._window = self._new_window()

    def _new_window(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(self.steps, dtype=torch.float64) for name in ROWS}

    def add(self, **values: torch.Tensor) -> None:
        """Add `[steps]` values to the sums since the last log."""
        for name, value in values.items():
            mine = self._window[name]
            if mine.device != value.device:  # the first of a window moves it; no sync later
                mine = mine.to(value.device, torch.float32 if value.device.type == "mps" else torch.float64)
            self._window[name] = mine + value.detach()

    def gather(self) -> tuple[torch.Tensor, int]:
        """Sums since the last log over all processes, float64 `[4, steps]` on the host, and tokens of all.

        A collective call.
        """
        table = torch.stack([self._window[name] for name in ROWS]).cpu().double()
        tokens = torch.full((1, self.steps), float(self.tokens), dtype=table.dtype)
        both = self.reduce(torch.cat([table, tokens]))
        return both[:-1], int(both[-1, 0])

    def start(self) -> None:
        """Let the clock run."""
        self._clock = time.monotonic()

    def pause(self) -> bool:
        """Stop the clock; returns whether it ran."""
        running = self._clock is not None
        self.tick()
        self._clock = None
        return running

    def tick(self) -> float:
        """Seconds of training so far, over all starts."""
        if self._clock is not None:
            now = time.monotonic()
            self.seconds, self._clock = self.seconds + now - self._clock, now
        return self.seconds

    def log_line(self, step_weights: torch.Tensor) -> dict[str, float]:
        """Loss and accuracy of each step, tokens, tokens/s; begins a new window. A collective call."""
        (loss, slots, correct, scored), tokens = self.gather()
        means = loss / slots.clamp(min=1)
        line = {"loss": float((means * step_weights).sum())}
        for k in range(self.steps):
            line[f"loss_{k}"] = float(means[k])
            if scored.sum() > 0:
                line[f"accuracy_{k}"] = float(correct[k] / scored[k].clamp(min=1))
        seconds = self.tick()
        line["tokens"] = tokens
        if seconds > self.logged[1]:
            line["tokens_per_second"] = (tokens - self.logged[0]) / (seconds - self.logged[1])
        self.logged = (tokens, seconds)
        self._window = self._new_window()
        return line

    def record(self) -> dict[str, Any]:
        """For a checkpoint, summed over processes. A collective call."""
        table, tokens = self.gather()
        window = {name: row.tolist() for name, row in zip(ROWS, table)}
        return {"tokens": tokens, "seconds": self.tick(), "logged": list(self.logged), "window": window}

    def restore(self, record: dict[str, Any], lead: bool) -> None:
        """Continue from `record`; only the `lead` process takes over the sums, which were of all."""
        self.seconds = record["seconds"]
        self.logged = (record["logged"][0], record["logged"][1])
        self.tokens, self._window = (record["tokens"], self._new_window()) if lead else (0, self._new_window())
        if lead:
            self._window = {k: torch.tensor(v, dtype=torch.float64) for k, v in record["window"].items()}
