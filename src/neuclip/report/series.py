"""What is done to a column of the records before it is drawn: pick, smooth, thin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from neuclip.report.contents import number

Point = tuple[float, float]  # samples seen, value

SMOOTHING_SHARE = 0.04  # half the window's width, as a share of the records


def column(records: Iterable[Mapping[str, Any]], key: str) -> list[list[Point]]:
    """The values of `key` over samples seen, as unbroken stretches: a null ends one, so that the line shows a gap."""
    stretches: list[list[Point]] = [[]]
    for record in records:
        samples, value = number(record.get("samples")), number(record.get(key))
        if samples is None:
            continue
        if value is not None:
            stretches[-1].append((samples, value))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def smooth(points: Sequence[Point], *, log: bool = False) -> list[Point]:
    """Mean over a window centred on each point (geometric mean with `log`): it does not lag as a running mean would.

    At the start, where curves are steep, the window narrows; at the end it only looks back, so that the last point,
    which readers trust most, is not a single noisy record.
    """
    values = [math.log(max(value, 1e-300)) if log else value for _, value in points]
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    reach_at_most = max(1, round(SMOOTHING_SHARE * len(points)))
    smoothed = []
    for index, (samples, _) in enumerate(points):
        back = min(reach_at_most, index)
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


def spread(count: int, at_most: int) -> list[int]:
    """Indices of at most `at_most` evenly spaced items out of `count`, first and last among them."""
    if count <= at_most:
        return list(range(count))
    return [round(place * (count - 1) / (at_most - 1)) for place in range(at_most)]
