"""From records to places in a plot: the points of a curve, smoothed and thinned; scales and their ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuclip.formatting import scientific
from neuclip.report.contents import number

Point = tuple[float, float]  # samples seen, value

SMOOTHING_SHARE = 0.04  # half the window's width, as a share of the records
LOG_SCALE_FROM_RATIO = 10.0  # below this the small values are visible on a linear axis
OUTLIERS_FROM_RATIO = 4.0  # one early spike must not flatten the rest of a curve


def column(records: Iterable[Mapping[str, Any]], key: str) -> list[list[Point]]:
    """The values of `key` over samples seen, in segments: a null ends one, and the line shows a gap there."""
    segments: list[list[Point]] = [[]]
    for record in records:
        samples, value = number(record.get("samples")), number(record.get(key))
        if samples is None:
            continue
        if value is not None:
            segments[-1].append((samples, value))
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


def smooth(points: Sequence[Point], *, log: bool = False) -> list[Point]:
    """Mean over a window centred on each point (geometric mean with `log`), which does not lag as a running mean does.

    At the start, where curves are steep, the window narrows. At the end it only looks back: the last point, which
    readers trust most, must not be a single noisy record.
    """
    values = [math.log(max(value, 1e-300)) if log else value for _, value in points]
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    widest = max(1, round(SMOOTHING_SHARE * len(points)))
    smoothed = []
    for index, (samples, _) in enumerate(points):
        back = min(widest, index)
        ahead = min(back, len(points) - 1 - index)
        mean = (sums[index + ahead + 1] - sums[index - back]) / (back + ahead + 1)
        smoothed.append((samples, math.exp(mean) if log else mean))
    return smoothed


def thin(points: Sequence[Point], at_most: int) -> list[Point]:
    """About `at_most` points that still show every peak: the lowest and highest of each group of neighbours."""
    if len(points) <= at_most:
        return list(points)
    size = math.ceil(2 * len(points) / at_most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        lowest, highest = min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])
        kept.extend(sorted({lowest, highest}))
    return kept


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of several curves, at the numbers of samples at which all of them have a value."""
    values = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*map(set, values))) if values else []
    return [(samples, sum(one[samples] for one in values) / len(values)) for samples in shared]


def evenly_spaced(count: int, at_most: int) -> list[int]:
    """Indices of at most `at_most` evenly spaced items out of `count`, first and last among them."""
    if count <= at_most:
        return list(range(count))
    return [round(place * (count - 1) / (at_most - 1)) for place in range(at_most)]


@dataclass(frozen=True)
class Scale:
    """`Scale(0, 10).position(5)` is 0.5. On a logarithmic scale, values at or below zero lie at the lower end."""

    low: float
    high: float
    log: bool = False

    def position(self, value: float) -> float:
        """0 at the low end, 1 at the high end; a value outside lies at the nearest end."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def clamp(self, points: Sequence[Point]) -> list[Point]:
        """The points with every value outside the scale moved to its nearest end."""
        return [(samples, min(self.high, max(self.low, value))) for samples, value in points]

    def ticks(self, about: int = 5) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high, about)


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten: `linear_ticks(0, 1)` is 0, 0.2, 0.4, 0.6, 0.8, 1."""
    step = round_step((high - low) / about)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # A tick at the very end may round to just outside of it.
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
    """As many decimals as the step needs, the same for all ticks: 0.05, 0.10, 0.15."""
    if abs(tick) < step * 1e-6:
        return "0"
    if step < 1e-4 or abs(tick) >= 1e6:
        return scientific(tick)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**decimals, 6) % 1:  # steps of 2.5, 0.25, ... need one decimal more
        decimals += 1
    return f"{tick:,.{decimals}f}".replace("-", "−")


def value_scale(values: Sequence[float], *, include: Sequence[float] = (), allow_log: bool = False) -> Scale:
    """A scale around the values with a small margin; a few far outliers are left outside the frame."""
    low, high = min([*values, *include]), max([*values, *include])
    positive = [value for value in [*values, *include] if value > 0]
    if allow_log and positive and max(positive) / min(positive) > LOG_SCALE_FROM_RATIO:
        return Scale(min(positive) / 1.3, max(positive) * 1.3, log=True)
    usual_low, usual_high = usual_range(values)
    if high - low > OUTLIERS_FROM_RATIO * (usual_high - usual_low) > 0:
        margin = 0.25 * (usual_high - usual_low)
        low, high = max(low, min([usual_low - margin, *include])), min(high, max([usual_high + margin, *include]))
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    floor = 0.0 if low >= 0 and low - margin < 0 else low - margin
    return Scale(floor, high + margin)


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """From the second to the ninety-eighth percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.02 * last)], ordered[round(0.98 * last)]
