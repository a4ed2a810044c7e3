"""What is drawn, as numbers: curves over samples seen, runs thin and their mean thick. chart.js draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from neuclip.formatting import format_number, percent
from neuclip.report.contents import Figures

Point = tuple[float, float]  # samples seen, value
MOST_POINTS = 320  # of a line: a chart is about that many pixels wide
SMOOTHING = 0.04  # half the window's width, as a share of the records
MOST_COLOURS = 6  # after these, colours come again with other dashes, of which there is one more


@dataclass(frozen=True)
class Line:
    """One line with a name, and the lines behind it: the runs of which it is the mean, or the values it smooths.
    `colour` and `dash` are places in the lists of style.css."""

    name: str
    points: Sequence[Point]
    behind: Sequence[Sequence[Point]] = ()
    colour: int = 0
    dash: int = 0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines in one frame. Without lines there is nothing to show."""

    title: str
    unit: str  # of the values
    lines: Sequence[Line] = ()
    note: str = ""
    across: str = "samples seen"
    percent: bool = False
    log: bool = False  # a logarithmic scale where the values differ by more than a factor of ten
    reference: float | None = None  # a value with a dotted line
    dots: bool = False  # at every point: it was measured nowhere else
    from_zero: bool = True  # shares begin at 0 %, or where the lines do: to tell methods apart

    def last_values(self) -> list[tuple[str, str]]:
        """What is read without a script: the name of each line and its last value."""
        say = percent if self.percent else format_number
        return [(line.name, say(line.points[-1][1])) for line in self.lines if line.points]

    def numbers(self) -> dict[str, Any]:
        """What chart.js reads, with no more points and digits than it can show."""
        lines = [
            asdict(line) | {"points": shown(line.points), "behind": [shown(points) for points in line.behind]}
            for line in self.lines
        ]
        return asdict(self) | {"lines": lines}


class Curve(NamedTuple):
    """A column of the records that is drawn, and the chart that it becomes."""

    key: str
    look: Chart  # without lines
    noisy: bool = True  # smoothed
    main: bool = True  # the others are folded away

    def chart(self, groups: Mapping[str, Sequence[Sequence[Figures]]]) -> Chart:
        """`groups[name]` are the records of each of its runs."""
        curves = {name: [column(records, self.key) for records in runs] for name, runs in groups.items()}
        return replace(self.look, lines=group_lines(curves, noisy=self.noisy, log=self.look.log))


CALIBRATION = Chart(
    title="Calibration",
    unit="true / predicted",
    note="Batch mean of true over predicted normalizer: 1 when the prediction is right.",
    log=True,
    reference=1.0,
)
ACCURACY = Chart(
    title="In-batch accuracy",
    unit="accuracy",
    note="Share of the batch whose own pair scores highest.",
    percent=True,
)
AT_EPS = Chart(
    title="Normalizers at eps",
    unit="share of the anchors",
    note="Anchors whose normalizer in the batch is within a factor e of eps: there eps decides, not the data.",
    percent=True,
)
CAPPED = Chart(
    title="Capped exponents",
    unit="anchors of a batch",
    note="Anchors whose exponent was cut to what the number format holds.",
)


def share_of_step(title: str) -> Chart:
    return Chart(title=title, unit="share of a step", percent=True)


CURVES = (
    Curve("loss", Chart(title="Loss", unit="loss of the batch")),
    Curve("temperature", Chart(title="Temperature", unit="temperature τ"), noisy=False),
    Curve("calibration", CALIBRATION),
    Curve("accuracy", ACCURACY),
    Curve("gradient_norm", Chart(title="Gradient norm", unit="norm of the gradient", log=True), main=False),
    Curve("learning_rate", Chart(title="Learning rate", unit="rate of the encoders"), noisy=False, main=False),
    Curve("samples_per_second", Chart(title="Speed", unit="samples per second"), main=False),
    Curve("towers_share", share_of_step("Time of the encoders"), main=False),
    Curve("normalizer_share", share_of_step("Time of the normalizer"), main=False),
    Curve("data_share", share_of_step("Waiting for data"), main=False),
    Curve("share_at_eps", AT_EPS, main=False),
    Curve("capped", CAPPED, noisy=False, main=False),
)


def column(records: Sequence[Figures], key: str) -> list[Point]:
    return [(record["samples"], record[key]) for record in records if key in record and "samples" in record]


def group_lines(groups: Mapping[str, Sequence[list[Point]]], *, noisy: bool = False, log: bool = False) -> list[Line]:
    """One line per group that has points: the mean of its runs with all of them behind it. Noisy values are smoothed;
    of a single run they stand behind the smoothed line."""
    lines = []
    for place, (name, runs) in enumerate(groups.items()):
        curves = [points for points in runs if points]
        drawn = [smooth(points, log=log) for points in curves] if noisy else curves
        look = {"colour": place % MOST_COLOURS, "dash": place}
        if len(drawn) > 1:
            lines.append(Line(f"{name}, mean of {len(drawn)}", mean_curve(drawn), drawn, **look))
        elif drawn:
            lines.append(Line(name, drawn[0], curves if noisy else (), **look))
    return lines


def smooth(points: Sequence[Point], *, log: bool = False) -> list[Point]:
    """Mean over a window around each point, geometric with `log`. At the start, where curves are steep, it narrows; at
    the end it looks back only, so that the last value is not that of a single noisy record."""
    log = log and all(value > 0 for _, value in points)
    values = [math.log(value) if log else value for value in without_outliers([value for _, value in points])]
    sums = [0.0, *accumulate(values)]
    widest, smoothed = max(1, round(SMOOTHING * len(points))), []
    for place, (samples, _) in enumerate(points):
        first = max(0, place - widest)
        end = min(len(points), place + (place - first) + 1)
        mean = (sums[end] - sums[first]) / (end - first)
        smoothed.append((samples, math.exp(mean) if log else mean))
    return smoothed


def without_outliers(values: Sequence[float]) -> list[float]:
    """Far values moved to the edge of where nearly all are: one spike would lift the whole window."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.02, 0.98))
    margin = (high - low) / 2
    return [min(max(value, low - margin), high + margin) for value in values] if high > low else list(values)


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean at the numbers of samples at which all curves have a value."""
    values = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*map(set, values)))
    return [(samples, sum(one[samples] for one in values) / len(values)) for samples in shared]


def shown(points: Sequence[Point]) -> list[Point]:
    return [(float(f"{samples:.7g}"), float(f"{value:.5g}")) for samples, value in thinned(points)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS that still show every peak: the lowest and the highest of each group of neighbours, and the
    last one."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (MOST_POINTS // 2 - 1))
    kept = [
        point
        for start in range(0, len(points), size)
        for point in sorted({extreme(points[start : start + size], key=lambda one: one[1]) for extreme in (min, max)})
    ]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]
