"""When something is due: every so many samples, or every so many minutes."""

from __future__ import annotations

import time

from neuclip.distributed.collectives import is_main
from neuclip.training.run import Run


class Interval:
    """True once each time a multiple of `every_samples` has been passed, or `every_minutes` have gone by; 0: never."""

    def __init__(self, *, every_samples: int = 0, every_minutes: float = 0.0):
        self.every_samples = every_samples
        self.every_seconds = 60 * every_minutes
        self.last_time = time.monotonic()

    @classmethod
    def for_checkpoints(cls, run: Run) -> Interval:
        settings = run.settings.checkpoint
        # Clocks differ: the main process looks at its own, and the others follow.
        return cls(every_samples=settings.every_samples, every_minutes=settings.every_minutes if is_main() else 0.0)

    def __call__(self, run: Run) -> bool:
        before = run.samples - run.settings.train.batch_size
        by_samples = bool(self.every_samples) and run.samples // self.every_samples > before // self.every_samples
        by_time = bool(self.every_seconds) and time.monotonic() - self.last_time >= self.every_seconds
        if by_samples or by_time:
            self.last_time = time.monotonic()
        return by_samples or by_time
