"""Progress where a bar can't be drawn: a line a minute in a log file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console


class ProgressLines:
    """Says how far a run is, for consoles that aren't terminals; on a terminal it is silent, the bar is there.

    Args:
        console: where to.
        done: items that were there at the start; they don't count for the time left.
        every: seconds between two lines at least. The first comes after as long, so short runs say nothing.
        clock: seconds that only grow.
    """

    def __init__(
        self, console: Console, done: int = 0, every: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.begun, self.every, self.clock = console, done, every, clock
        self.start = self.last = clock()

    def __call__(self, done: int, total: int | None, what: str) -> None:
        """Write a line if one is due.

        Args:
            done: items done so far.
            total: items in all, if known.
            what: what is being done, and how it goes.
        """
        now = self.clock()
        if self.console.is_terminal or now - self.last < self.every:
            return
        self.last = now
        line = f"{what}: {done}" if total is None else f"{what}: {done} of {total}"
        if total is not None and done > self.begun:
            minutes = (now - self.start) * (total - done) / (done - self.begun) / 60
            line += f", {minutes:.0f} min left"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
