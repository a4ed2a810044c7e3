"""Ctrl-C and SIGTERM: finish the step, save, and leave with the exit code that says why."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is remembered and the loop ends after its step; a second SIGINT
    interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
