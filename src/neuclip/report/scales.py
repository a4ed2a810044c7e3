"""From values to places on an axis, and the ticks in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neuclip.formatting import trim

LOG_SCALE_FROM_RATIO = 10.0  # below this a linear axis still shows the small values
OUTLIERS_FROM_RATIO = 4.0  # one early spike must not press the rest of a curve flat


@dataclass(frozen=True)
class Scale:
    """`Scale(0, 10).share(5)` is 0.5. On a logarithmic scale, values at or below zero lie at the lower end."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies, 0 at the low end and 1 at the high end; outside values are held at the end."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def held(self, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The points with every value outside the scale moved to its nearest end."""
        return [(samples, min(self.high, max(self.low, value))) for samples, value in points]

    def ticks(self, about: int = 5) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, about)


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten: `linear_ticks(0, 1)` is 0, 0.2, 0.4, 0.6, 0.8, 1."""
    step = round_step((high - low) / about)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # A tick at the very end may round to a hair outside of it.
    return [min(high, max(low, index * step)) for index in range(first, last + 1)]


def round_step(rough: float) -> float:
    """The round number nearest to `rough`, as a ratio."""
    power = 10.0 ** math.floor(math.log10(rough))
    return min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda step: abs(math.log(step / rough)))


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, thinned to at most six; with fewer than three of them, also 2 and 5 times each."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 5))
    decades = [10.0**power for power in range(first, last + 1) if power % every == 0]
    inside = [tick for tick in decades if low * 0.999 <= tick <= high * 1.001]
    if len(inside) >= 3:
        return inside
    finer = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    return [tick for tick in finer if low * 0.999 <= tick <= high * 1.001]


def tick_label(tick: float, step: float) -> str:
    """As many decimals as the step needs, so that neighbours look alike: 0.00, 0.05, 0.10."""
    if abs(tick) < step * 1e-6:
        return "0"
    if step < 1e-4 or abs(tick) >= 1e6:
        mantissa, exponent = f"{tick:.2e}".split("e")
        return f"{trim(mantissa)}e{int(exponent)}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**decimals, 6) % 1:  # steps of 2.5, 0.25, ... need one decimal more
        decimals += 1
    return f"{tick:,.{decimals}f}".replace("-", "−")


def value_scale(values: Sequence[float], *, include: Sequence[float] = (), allow_log: bool = False) -> Scale:
    """A scale that shows the values with a little air; a handful of far outliers is left outside the frame."""
    low, high = min([*values, *include]), max([*values, *include])
    positive = [value for value in [*values, *include] if value > 0]
    if allow_log and positive and max(positive) / min(positive) > LOG_SCALE_FROM_RATIO:
        return Scale(min(positive) / 1.3, max(positive) * 1.3, log=True)
    usual_low, usual_high = usual_range(values)
    if high - low > OUTLIERS_FROM_RATIO * (usual_high - usual_low) > 0:
        air = 0.25 * (usual_high - usual_low)
        low, high = max(low, min([usual_low - air, *include])), min(high, max([usual_high + air, *include]))
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    floor = 0.0 if low >= 0 and low - air < 0 else low - air
    return Scale(floor, high + air)


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """From the second to the ninety-eighth percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.02 * last)], ordered[round(0.98 * last)]
