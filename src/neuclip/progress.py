"""Progress for anything that takes longer than two seconds: one status line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

from neuclip.formatting import format_duration, format_number

T = TypeVar("T")

LINE_EVERY_SECONDS = 10.0  # where nobody watches live, a line now and then is enough
REDRAW_EVERY_SECONDS = 0.2
SILENT_SECONDS = 2.0  # shorter work shows nothing


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Text for people, on stderr. A reader that is gone, as after `2>&1 | head`, never ends the work: what follows is
    written nowhere."""
    stream = stream or sys.stderr
    try:
        stream.write(f"{text}{end}")
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class StatusLine:
    """One line that a person watches: rewritten in place on a terminal, a plain line every few seconds elsewhere.

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
        """A line that stays, above the status line."""
        say(f"\r\x1b[2K{text}" if self.live else text, self.stream)

    def close(self) -> None:
        """Leave a clean line behind: what was done is told by what comes next."""
        if self.live and self.shown:
            say("\r\x1b[2K", self.stream, end="")


def track(items: Iterable[T], what: str, total: int, unit: str = "", *, step: int = 1) -> Iterator[T]:
    """Pass items through and show how far it is: `for x in track(xs, "indexing shards", len(xs))`. Each item is `step`
    of the total; with steps the speed is shown too."""
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
    """Tells whoever watches a terminal what takes a few seconds and cannot be counted, such as an import."""
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
