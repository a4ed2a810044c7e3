"""Charts as numbers: curves over samples seen, with thin lines for runs and a thick one for their mean. chart.js draws
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from neuclip.formatting import format_number, percent
from neuclip.report.contents import Figures

Point = tuple[float, float]  # samples seen, value
MOST_POINTS = 320  # per line: a chart is about as many pixels wide
SMOOTHING = 0.04  # half the window's width, as a share of the records
MOST_COLOURS = 6  # further lines repeat the colours with other dash patterns, of which there are seven


@dataclass(frozen=True)
class Line:
    """One line with a name, and thin lines behind it: the runs that it averages, or the values that it smooths.
    `colour` and `dash` are indexes into the lists of style.css."""

    name: str
    points: Sequence[Point]
    behind: Sequence[Sequence[Point]] = ()
    colour: int = 0
    dash: int = 0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines in one frame."""

    title: str
    unit: str  # of the values
    lines: Sequence[Line] = ()
    note: str = ""
    across: str = "samples seen"
    percent: bool = False
    log: bool = False  # a logarithmic scale where the values differ by more than a factor of ten
    reference: float | None = None  # a value that is marked by a dotted line
    dots: bool = False  # a dot at every point, for values that are measured at few points only
    from_zero: bool = True  # the axis of percentages starts at 0 %; False: near the lowest line, to tell methods apart

    def last_values(self) -> list[tuple[str, str]]:
        """The name of each line and its last value, which readers without JavaScript see."""
        say = percent if self.percent else format_number
        return [(line.name, say(line.points[-1][1])) for line in self.lines if line.points]

    def numbers(self) -> dict[str, Any]:
        """The input of chart.js, with no more points and digits than a chart can show."""
        lines = [
            asdict(line)
            | {"points": plot_points(line.points), "behind": [plot_points(points) for points in line.behind]}
            for line in self.lines
        ]
        return asdict(self) | {"lines": lines}


class Curve(NamedTuple):
    """A key of the records, and the chart that shows it."""

    key: str
    look: Chart  # without lines
    noisy: bool = True  # smoothed
    main: bool = True  # the other charts are in a folded section

    def chart(self, groups: Mapping[str, Sequence[Sequence[Figures]]]) -> Chart:
        """The chart with a line per group; `groups[name]` has the records of each run."""
        curves = {name: [column(records, self.key) for records in runs] for name, runs in groups.items()}
        return replace(self.look, lines=group_lines(curves, noisy=self.noisy, log=self.look.log))


CALIBRATION = Chart(
    title="Calibration",
    unit="true / predicted",
    note="Mean ratio of true to predicted normalizers in the batch: 1 if the prediction is right.",
    log=True,
    reference=1.0,
)
ACCURACY = Chart(
    title="In-batch accuracy",
    unit="accuracy",
    note="Share of the batch whose own partner has the highest score.",
    percent=True,
)
AT_EPS = Chart(
    title="Normalizers at eps",
    unit="share of the anchors",
    note="Anchors whose normalizer in the batch is within a factor e of eps: for them, eps outweighs the data.",
    percent=True,
)
CAPPED = Chart(
    title="Capped exponents",
    unit="anchors of a batch",
    note="Anchors whose exponent was capped because the number format cannot represent the result.",
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
    """The points (samples, value) of the records that have this key."""
    return [(record["samples"], record[key]) for record in records if key in record and "samples" in record]


def group_lines(groups: Mapping[str, Sequence[list[Point]]], *, noisy: bool = False, log: bool = False) -> list[Line]:
    """One line per group that has points: the mean of its runs, with the runs behind it. Noisy values are smoothed; for
    a single run, the values themselves are drawn behind the smoothed line."""
    lines = []
    for index, (name, runs) in enumerate(groups.items()):
        curves = [points for points in runs if points]
        drawn = [smooth(points, log=log) for points in curves] if noisy else curves
        look = {"colour": index % MOST_COLOURS, "dash": index}
        if len(drawn) > 1:
            lines.append(Line(f"{name}, mean of {len(drawn)}", mean_curve(drawn), drawn, **look))
        elif drawn:
            lines.append(Line(name, drawn[0], curves if noisy else (), **look))
    return lines


def smooth(points: Sequence[Point], *, log: bool = False) -> list[Point]:
    """Mean over a window around each point; the geometric mean with `log`. Near the start, where curves are steep, the
    window is narrower. Near the end its first half keeps the full width, because a single record may be noisy."""
    log = log and all(value > 0 for _, value in points)
    values = [math.log(value) if log else value for value in clip_outliers([value for _, value in points])]
    sums = [0.0, *accumulate(values)]
    widest, smoothed = max(1, round(SMOOTHING * len(points))), []
    for index, (samples, _) in enumerate(points):
        first = max(0, index - widest)
        end = min(len(points), index + (index - first) + 1)
        mean = (sums[end] - sums[first]) / (end - first)
        smoothed.append((samples, math.exp(mean) if log else mean))
    return smoothed


def clip_outliers(values: Sequence[float]) -> list[float]:
    """Clip values far outside the 2nd to 98th percentile: one spike would lift the mean of a whole window."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.02, 0.98))
    margin = (high - low) / 2
    return [min(max(value, low - margin), high + margin) for value in values] if high > low else list(values)


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean at the numbers of samples at which all curves have a value."""
    values = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*map(set, values)))
    return [(samples, sum(one[samples] for one in values) / len(values)) for samples in shared]


def plot_points(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS of the points, rounded to the digits that a chart can show."""
    return [(float(f"{samples:.7g}"), float(f"{value:.5g}")) for samples, value in thin(points)]


def thin(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS of the points, including every peak: the lowest and the highest of each group of neighbours,
    and the last point."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (MOST_POINTS // 2 - 1))
    kept = [
        point
        for start in range(0, len(points), size)
        for point in sorted({extreme(points[start : start + size], key=lambda one: one[1]) for extreme in (min, max)})
    ]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]
