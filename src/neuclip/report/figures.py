"""The places of everything in a figure: one curve, several lines, or stacked shares over samples seen.

`templates/figures.html` draws it as SVG of 360 x 216 units, about the width of a phone: letters keep a readable size
there and in three columns on a desk. Values show on hover through <title>, with or without script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from neuclip.formatting import format_number, format_samples, percent
from neuclip.report.plotting import Point, Scale, evenly_spaced, smooth, thin, tick_label, value_scale

TICK_HEIGHT = 12  # labels closer than this would touch
MAX_POINTS = 600  # two per unit of the plot's width
MAX_BANDS = 48
NUMBER_OF_COLOURS = 6


@dataclass(frozen=True)
class Canvas:
    """Both axes of a figure, and where samples and values are in the drawing."""

    width: ClassVar[int] = 360
    height: ClassVar[int] = 216
    left: ClassVar[int] = 54
    right: ClassVar[int] = 340
    top: ClassVar[int] = 22
    bottom: ClassVar[int] = 178

    across: Scale
    up: Scale
    unit: str  # title of the upright axis
    in_percent: bool = False
    reference: float | None = None  # a value with a dashed line

    def x(self, samples: float) -> float:
        return round(self.left + (self.right - self.left) * self.across.position(samples), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - (self.bottom - self.top) * self.up.position(value), 1)

    def path(self, points: Sequence[Point]) -> str:
        places = [f"{self.x(samples)} {self.y(value)}" for samples, value in points]
        if len(places) == 1:
            return f"M{places[0]}h.01"  # with round ends, a line of no length is a dot
        return "M" + "L".join(places)

    def up_ticks(self) -> list[tuple[float, str]]:
        """Place and label of each tick; those that would touch the label of the reference are left out."""
        ticks = self.up.ticks()
        step = min((after - before for before, after in pairwise(ticks)), default=1.0)
        if self.reference is not None:
            ticks = [tick for tick in ticks if abs(self.y(tick) - self.y(self.reference)) > TICK_HEIGHT]
        if self.in_percent:
            return [(self.y(tick), f"{tick_label(100 * tick, 100 * step)} %") for tick in ticks]
        return [(self.y(tick), tick_label(tick, tick if self.up.log else step)) for tick in ticks]

    def across_ticks(self) -> list[tuple[float, str]]:
        return [(self.x(tick), format_samples(tick)) for tick in self.across.ticks()]

    def bands(self, samples: Sequence[float], texts: Sequence[str]) -> list[Band]:
        """Upright bands, invisible until the pointer is over them, each with the value in its middle."""
        chosen = evenly_spaced(len(samples), MAX_BANDS)
        places = [self.x(samples[index]) for index in chosen]
        edges = [self.left, *((left + right) / 2 for left, right in pairwise(places)), self.right]
        return [
            Band(round(left, 1), round(max(0.0, right - left), 1), texts[index])
            for index, (left, right) in zip(chosen, pairwise(edges), strict=True)
        ]


@dataclass(frozen=True)
class Shape:
    """A line or an area: its CSS classes, its path, and its name in the legend, if it has one."""

    style: str
    path: str
    name: str = ""


@dataclass(frozen=True)
class Band:
    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Dot:
    style: str
    x: float
    y: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What the template draws; without a canvas there is only the reason why."""

    title: str
    canvas: Canvas | None = None
    absence: str = ""
    readout: str = ""  # beside the title: the last value, until the script puts the one under the pointer there
    description: str = ""  # what a screen reader says
    explanation: str = ""
    areas: list[Shape] = field(default_factory=list)
    lines: list[Shape] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)


def curve(
    title: str,
    segments: list[list[Point]],
    *,
    unit: str,
    explanation: str = "",
    reference: float | None = None,
    in_percent: bool = False,
    allow_log: bool = False,
    noisy: bool = True,
) -> Figure:
    """One column of the records: the values as a light line, smoothed as a strong one; if not noisy, as they are."""
    points = [point for segment in segments for point in segment]
    if not points:
        return Figure(title=title, absence=explanation or "The records hold no such value yet.")
    values = [value for _, value in points]
    include = [reference] if reference is not None else [0.0] if in_percent else []
    up = value_scale(values, include=include, allow_log=allow_log)
    across = Scale(0, max(samples for samples, _ in points) or 1)
    canvas = Canvas(across, up, unit + (", log scale" if up.log else ""), in_percent, reference)
    # Smoothed within the frame: one far outlier would move the whole window out of sight.
    smoothed = [smooth(up.clamp(segment), log=up.log) if noisy else segment for segment in segments]
    say = percent if in_percent else format_number
    texts = [f"{say(value)} at {format_samples(samples)} samples" for samples, value in points]
    last = texts[-1]
    if noisy:
        means = [mean for segment in smoothed for _, mean in segment]
        texts = [f"{text}, smoothed {say(mean)}" for text, mean in zip(texts, means, strict=True)]
    outside = sum(not up.log and not up.contains(value) for value in values)
    if outside:
        explanation += f" {outside} of {len(values):,} values lie outside the frame and are drawn at its edge."
    return Figure(
        title=title,
        canvas=canvas,
        readout=last,
        description=f"{title} over samples seen: from {say(values[0])} to {last}; "
        f"lowest {say(min(values))}, highest {say(max(values))}.",
        explanation=explanation.strip(),
        lines=[Shape("raw", canvas.path(thin(segment, MAX_POINTS))) for segment in segments if noisy]
        + [Shape("line", canvas.path(thin(segment, MAX_POINTS))) for segment in smoothed],
        bands=canvas.bands([samples for samples, _ in points], texts),
    )


@dataclass(frozen=True)
class NamedLine:
    """One line of a figure with a legend; `colour` counts from 0, `dashed` tells two lines of a colour apart."""

    name: str
    points: list[Point]
    colour: int = 0
    dashed: bool = False


def lines(title: str, named: list[NamedLine], *, unit: str) -> Figure:
    """Several shares over samples seen, with a dot for every measurement and a legend below."""
    last = max(samples for line in named for samples, _ in line.points)
    up = value_scale([value for line in named for _, value in line.points], include=[0.0])
    canvas = Canvas(Scale(0, last or 1), up, unit, in_percent=True)
    shapes, dots = [], []
    for line in named:
        style = f"series-{line.colour % NUMBER_OF_COLOURS}"
        dashed = " dashed" if line.dashed else ""
        shapes.append(Shape(f"line {style}{dashed}", canvas.path(line.points), line.name))
        dots += [
            Dot(style, canvas.x(samples), canvas.y(value), f"{percent(value)} at {format_samples(samples)}: {line.name}")
            for samples, value in line.points
        ]
    ends = "; ".join(f"{line.name} {percent(line.points[-1][1])}" for line in named)
    return Figure(
        title=title,
        canvas=canvas,
        readout=f"last at {format_samples(last)} samples",
        description=f"{title} over samples seen, at the last evaluation: {ends}.",
        lines=shapes,
        dots=dots,
    )


def stacked(title: str, rows: list[tuple[float, list[float]]], names: Sequence[str]) -> Figure:
    """Shares of a whole over samples seen, one area per name, the first at the bottom.

    `rows` are (samples, one share per name); the last name is the rest, which the hover text leaves out.
    """
    shares = [smooth([(samples, row[index]) for samples, row in rows]) for index in range(len(names))]
    chosen = evenly_spaced(len(rows), MAX_POINTS // 4)
    rows = [(rows[place][0], [share[place][1] for share in shares]) for place in chosen]
    canvas = Canvas(Scale(0, rows[-1][0] or 1), Scale(0, 1), "share of a step's time", in_percent=True)
    areas, floor = [], [(samples, 0.0) for samples, _ in rows]
    for index, name in enumerate(names):
        roof = [(samples, below + row[index]) for (samples, below), (_, row) in zip(floor, rows, strict=True)]
        areas.append(Shape(f"area-{index}", canvas.path([*roof, *reversed(floor)]) + "Z", name))
        floor = roof
    texts = [f"{format_samples(samples)}: {share_list(names[:-1], row[:-1])}" for samples, row in rows]
    return Figure(
        title=title,
        canvas=canvas,
        readout=texts[-1],
        description=f"{title} over samples seen, at the end: {share_list(names, rows[-1][1])}.",
        areas=areas,
        bands=canvas.bands([samples for samples, _ in rows], texts),
    )


def share_list(names: Sequence[str], shares: Sequence[float]) -> str:
    """Short enough for one line of a figure's head: 'data 5, towers 83, normalizer 12 %'."""
    return ", ".join(f"{name} {100 * share:.0f}" for name, share in zip(names, shares, strict=True)) + " %"
