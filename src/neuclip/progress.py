"""Shows progress of work that takes longer than two seconds: one status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

from neuclip.formatting import format_duration, format_number

T = TypeVar("T")

LINE_EVERY_SECONDS = 10.0  # in a log file
REDRAW_EVERY_SECONDS = 0.2
SILENT_SECONDS = 2.0  # work that takes less time shows nothing


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Print text for people on stderr. If the reader is gone, as after `2>&1 | head`, the work continues and further
    text is dropped."""
    stream = stream or sys.stderr
    try:
        stream.write(f"{text}{end}")
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class StatusLine:
    """One line of progress: rewritten in place on a terminal, printed as a new line every few seconds elsewhere.

    >>> status = StatusLine()
    >>> status.show("drawing  120 of 30208")
    >>> status.close()
    """

    def __init__(self, stream: TextIO | None = None, *, silent_seconds: float = 0.0):
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.next_time = time.monotonic() + silent_seconds
        self.shown = False

    def due(self) -> bool:
        return time.monotonic() >= self.next_time

    def show(self, text: str) -> None:
        """Show `text` now, whether due or not."""
        self.next_time = time.monotonic() + (REDRAW_EVERY_SECONDS if self.live else LINE_EVERY_SECONDS)
        say(f"\r\x1b[2K{text}" if self.live else text, self.stream, end="" if self.live else "\n")
        self.shown = True

    def say(self, text: str) -> None:
        """Print a line that stays, above the status line."""
        say(f"\r\x1b[2K{text}" if self.live else text, self.stream)

    def close(self) -> None:
        """Clear the status line."""
        if self.live and self.shown:
            say("\r\x1b[2K", self.stream, end="")


def track(items: Iterable[T], what: str, total: int, unit: str = "", *, step: int = 1) -> Iterator[T]:
    """Pass items through and show progress: `for x in track(xs, "indexing shards", len(xs))`. Each item counts as
    `step` of the total; with a step above 1 the speed is shown too."""
    status = StatusLine(silent_seconds=SILENT_SECONDS)
    start = time.monotonic()
    for count, item in enumerate(items):
        if status.due():
            done, seconds = min(count * step, total), time.monotonic() - start
            status.show(progress_text(what, done, total, seconds, unit, with_speed=step > 1))
        yield item
    if status.shown and not status.live:
        seconds = time.monotonic() - start
        speed = speed_text(total, seconds, unit) if step > 1 else ""
        status.show(f"{what}  {total:,} {unit}".rstrip() + f"  in {format_duration(seconds)}{speed}")
    status.close()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal what takes a few seconds and has no progress to count, such as an import."""
    with contextlib.closing(StatusLine()) as status:
        if status.live:
            status.show(what)
        yield


def progress_text(what: str, done: int, total: int, seconds: float, unit: str = "", *, with_speed: bool = False) -> str:
    left = f"  {format_duration(seconds / done * (total - done))} left" if done else ""
    speed = speed_text(done, seconds, unit) if with_speed and done else ""
    return f"{what}  {done:,} of {total:,} {unit}".rstrip() + speed + left


def speed_text(done: int, seconds: float, unit: str) -> str:
    return f"  {format_number(done / max(seconds, 1e-9))} {unit} per second"
