"""Ctrl-C, SIGTERM and the like: finish the step, save, and leave with the signal's exit code; on all ranks together."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO, cast

from neuclip.distributed.collectives import all_gather_int, is_main
from neuclip.errors import RunInterrupted

# Batch systems announce the end of a job with SIGUSR1 or SIGUSR2; a lost terminal sends SIGHUP.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(signal.Signals[name] for name in NAMES if name in signal.Signals.__members__)
BROKEN_PIPE = 13  # SIGPIPE, which Windows does not have

_active: StopRequest | None = None


class StopRequest:
    """Remembers the first signal, and the training loop ends after its step. In `interruptible` work the signal raises
    KeyboardInterrupt at once; a second SIGINT does so everywhere."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.message = "stopped before the first step; start again with the same command"
        self._process = os.getpid()
        self._interruptible = self._shielded = False

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

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Inside, nothing is interruptible: for a checkpoint that is being written."""
        before, self._shielded = self._shielded, True
        try:
            yield
        finally:
            self._shielded = before

    def remember(self, number: int, frame: FrameType | None = None) -> None:
        if os.getpid() != self._process:  # a data worker just forked, without handlers of its own yet
            os._exit(128 + number)
        again = self.signal == signal.SIGINT == number
        self.signal = number
        if again or self._interruptible:
            self._interruptible = False  # what cleans up is not interrupted a second time
            raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, signals are requests to stop, and so is a stderr that nobody reads any more. The outermost of nested ones
    turns an interruption into RunInterrupted, which only the main rank raises; the others exit silently."""
    global _active
    if _active is not None:
        yield _active
        return
    stop = _active = StopRequest()
    # nohup ignores SIGHUP, and so do we then.
    handled = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop.remember) for number in handled}
    stderr = sys.stderr
    sys.stderr = cast(TextIO, WatchedStream(stderr or io.StringIO(), stop))
    try:
        yield stop
    except KeyboardInterrupt:
        if not stop.requested:
            raise
        if is_main():
            raise RunInterrupted(stop.message, stop.exit_code) from None
        raise SystemExit(stop.exit_code) from None
    finally:
        _active, sys.stderr = None, stderr
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, a request to stop raises KeyboardInterrupt at once, and one that came before raises it at the start. Only
    for work in which no other rank takes part: a rank that left a collective would let the others wait."""
    stop = _active
    if stop is None or stop._shielded:
        yield
        return
    before, stop._interruptible = stop._interruptible, True
    try:
        if stop.requested:
            raise KeyboardInterrupt
        yield
    finally:
        stop._interruptible = before


def is_requested() -> bool:
    return _active is not None and _active.requested


def interrupt_exit_code() -> int:
    """Of a KeyboardInterrupt on this rank."""
    return _active.exit_code if _active is not None and _active.requested else 128 + signal.SIGINT


def raise_interrupt(code: int) -> None:
    """Another rank was interrupted and exits with `code`; this one does the same."""
    if _active is not None:
        _active.signal = code - 128
    raise KeyboardInterrupt


class WatchedStream:
    """Stderr. When its reader is gone the run is asked to stop, and what follows is written nowhere: an error from
    `print` would end the run unsaved."""

    def __init__(self, stream: TextIO, stop: StopRequest):
        self.stream, self.stop = stream, stop

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            return self._discard(len(text))

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self._discard(0)

    def _discard(self, count: int) -> int:
        self.stop.signal = self.stop.signal or BROKEN_PIPE
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
