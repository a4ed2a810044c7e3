"""Progress over collections of very different sizes: counted in images, so that the time left is true."""

from __future__ import annotations

import time

from neuclip.formatting import format_duration
from neuclip.progress import SILENT_SECONDS, StatusLine, progress_text


class CollectionProgress:
    """One status line. `done` grows with each finished collection; `show` adds what the current one has done.

    >>> progress = CollectionProgress("drawing", 30_000)
    >>> progress.show("mdi", 500); progress.done += 7_447; progress.close()
    """

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.done = 0
        self.start = time.monotonic()
        self.status = StatusLine(silent_seconds=SILENT_SECONDS)

    def show(self, prefix: str, more: int = 0) -> None:
        if self.status.due():
            done = min(self.done + more, self.total)
            text = progress_text(self.what, done, self.total, time.monotonic() - self.start, "images")
            self.status.show(f"{text}  ({prefix})")

    def close(self) -> None:
        if self.status.shown and not self.status.live:
            took = format_duration(time.monotonic() - self.start)
            self.status.show(f"{self.what}  {self.done:,} images  in {took}")
        self.status.close()
