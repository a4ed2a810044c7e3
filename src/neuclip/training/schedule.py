"""Rates as functions of the step."""

from __future__ import annotations

import math

# As FastCLIP's authors have it: near its floor the temperature moves more slowly.
SLOW_TEMPERATURE, SLOWED_TO = 0.03, 1 / 3


def warmup_steps(warmup: float, total_steps: int) -> int:
    """`warmup` below 1 is a share of the run, from 1 on a number of steps."""
    return round(warmup * total_steps) if warmup < 1 else int(warmup)


def warmup_then_cosine(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Linear from 0 to `peak` over `warmup` steps, then a half cosine to 0 at step `total`.

    >>> [round(warmup_then_cosine(step, peak=1.0, warmup=2, total=6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:  # steps count from 0, so the first update already moves
        return peak * (step + 1) / warmup
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def temperature_rate(schedule: str, *, rate: float, towers_share: float, tau: float) -> float:
    """The temperature's rate at one step.

    Only `cosine` warms up and decays, with `towers_share`: the towers' present rate over their peak. `step_threshold`
    looks at tau anew each time, so the rate is whole again when tau rises above the threshold.

    >>> temperature_rate("step_threshold", rate=3.0, towers_share=0.1, tau=0.02)
    1.0
    """
    if schedule == "cosine":
        return rate * towers_share
    if schedule == "step_threshold" and tau <= SLOW_TEMPERATURE:
        return rate * SLOWED_TO
    return rate
