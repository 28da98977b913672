"""Ending long runs at a safe point when the user or the machine says so."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Context in which SIGINT and SIGTERM set `requested` instead of ending the process at once.

    A second signal acts as it would have without this. Outside the main thread, where Python allows no signal
    handlers, nothing is changed and `requested` can be set by hand.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.signal = True, number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def exit_status(self) -> int:
        """What a shell shows for a process that this signal ended."""
        return 128 + (self.signal or signal.SIGINT)
