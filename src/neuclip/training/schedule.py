"""What depends on how far the run is: learning rates, and when a checkpoint or an evaluation is due."""

from __future__ import annotations

import math
import time

# As in FastCLIP's code: near its floor the temperature moves more slowly.
SLOW_TEMPERATURE, SLOWED_TO = 0.03, 1 / 3


def warmup_then_cosine(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Linear from 0 to `peak` over `warmup` steps, then a half cosine to 0 at step `total`.

    >>> [round(warmup_then_cosine(step, peak=1.0, warmup=2, total=6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:  # steps count from 0, and the first update already moves
        return peak * (step + 1) / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def temperature_rate(schedule: str, *, rate: float, towers_share: float, tau: float) -> float:
    """The temperature's learning rate at one step.

    Only `cosine` warms up and decays, with `towers_share`: the towers' present rate over their peak. `step_threshold`
    looks at tau at each step: the rate is whole again when tau rises above the threshold.

    >>> temperature_rate("step_threshold", rate=3.0, towers_share=0.1, tau=0.02)
    1.0
    """
    if schedule == "cosine":
        return rate * towers_share
    if schedule == "step_threshold" and tau <= SLOW_TEMPERATURE:
        return rate * SLOWED_TO
    return rate


class Interval:
    """True once each time a multiple of `every_samples` is passed, or `every_minutes` have gone by; 0: never."""

    def __init__(self, batch_size: int, *, every_samples: int = 0, every_minutes: float = 0.0):
        self.batch_size = batch_size
        self.every_samples = every_samples
        self.every_seconds = 60 * every_minutes
        self.last_time = time.monotonic()

    def passed(self, samples: int) -> bool:
        """Asked once per step, with the samples seen up to its end."""
        before = samples - self.batch_size
        by_samples = bool(self.every_samples) and samples // self.every_samples > before // self.every_samples
        by_time = bool(self.every_seconds) and time.monotonic() - self.last_time >= self.every_seconds
        if by_samples or by_time:
            self.last_time = time.monotonic()
        return by_samples or by_time
