"""Ctrl-C and SIGTERM: finish the step, save, and leave with the signal's exit code; on all ranks together."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from neuclip.distributed.collectives import all_gather_int


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is remembered and the loop ends after its step; a second SIGINT
    interrupts at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> StopRequest:
        self._previous: dict[int, Any] = {
            number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal is not None

    def on_any_rank(self) -> bool:
        """Collective. Whether any rank was asked to stop; then all know the signal."""
        self.signal = max(all_gather_int(self.signal or 0)) or None
        return self.requested

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or 0)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
        # torchrun signals the whole group, and the data workers may die too. Their death must not interrupt the step.
        self._previous.setdefault(signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL))
