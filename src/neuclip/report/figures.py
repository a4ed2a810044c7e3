"""The figures of the page, each with the sentence that explains it.

`templates/figures.html` draws them as SVG of 360 x 216 units, about the width of a phone: letters keep a readable size
there and in three columns on a desk. Values show on hover through <title>, with or without script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

from neuclip.formatting import format_number, format_samples, percent
from neuclip.report.contents import RunContents, number
from neuclip.report.evaluations import DIRECTIONS, Evaluation, merge_evaluations
from neuclip.report.plotting import (
    Point,
    Scale,
    column,
    evenly_spaced,
    mean_curve,
    smooth,
    thin,
    tick_label,
    value_scale,
)
from neuclip.report.verdict import judge_calibration

CALIBRATION_MEANING = "Batch mean of true over predicted normalizer: 1 when the prediction is right."
SHARE_KEYS = {"data": "data_share", "towers": "towers_share", "normalizer": "normalizer_share"}
TICK_HEIGHT = 12  # labels closer than this would touch
MAX_POINTS = 600  # two per unit of the plot's width
MAX_BANDS = 48
NUMBER_OF_COLOURS = 6
LABEL_WIDTH = 16  # of one or two letters at the end of a line


@dataclass(frozen=True)
class Canvas:
    """Both axes of a figure, and where samples and values are in the drawing."""

    width: ClassVar[int] = 360
    height: ClassVar[int] = 216
    right: ClassVar[int] = 334
    top: ClassVar[int] = 22
    bottom: ClassVar[int] = 178

    across: Scale
    up: Scale
    unit: str  # title of the upright axis
    in_percent: bool = False
    reference: float | None = None  # a value with a dashed line
    across_unit: str = "samples seen"

    @cached_property
    def left(self) -> float:
        """Room for the longest label of a tick, in the widest letters that a browser may have."""
        return 10 + 7.5 * max((len(label) for _, label in self.up_ticks()), default=0)

    def x(self, samples: float) -> float:
        return round(self.left + (self.right - self.left) * self.across.position(samples), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - (self.bottom - self.top) * self.up.position(value), 1)

    def path(self, points: Sequence[Point]) -> str:
        places = [f"{self.x(samples)} {self.y(value)}" for samples, value in points]
        if len(places) == 1:
            return f"M{places[0]}h.01"  # with round ends, a line of no length is a dot
        return "M" + "L".join(places)

    def dots(self, points: Sequence[Point]) -> str:
        return "".join(self.path([point]) for point in points)

    def up_ticks(self) -> list[tuple[float, str]]:
        """Place and label of each tick; those that would touch the label of the reference are left out."""
        ticks = self.up.ticks()
        step = min((after - before for before, after in pairwise(ticks)), default=1.0)
        if self.reference is not None:
            ticks = [tick for tick in ticks if abs(self.y(tick) - self.y(self.reference)) > TICK_HEIGHT]
        if self.in_percent:
            return [(self.y(tick), f"{tick_label(100 * tick, 100 * step)} %") for tick in ticks]
        return [(self.y(tick), tick_label(tick, tick if self.up.log else step)) for tick in ticks]

    def bands(self, hover: Sequence[tuple[float, str]]) -> list[tuple[float, float, str]]:
        """Left edge, width and text of upright bands, invisible until the pointer is over them."""
        chosen = [hover[index] for index in evenly_spaced(len(hover), MAX_BANDS)]
        places = [self.x(samples) for samples, _ in chosen]
        edges = [self.left, *((left + right) / 2 for left, right in pairwise(places)), self.right]
        return [
            (round(left, 1), round(max(0.0, right - left), 1), text)
            for (_, text), (left, right) in zip(chosen, pairwise(edges), strict=False)  # no text, no band
        ]


@dataclass(frozen=True)
class Line:
    """A line, or the outline of an area; `colour` is a variable of style.css, `name` the entry in the legend. `label`,
    a letter or two, is written at its end and before its name: no reader has to tell lines apart by colour alone."""

    points: list[Point]
    style: str = "line"  # "dots": only the points
    colour: str = "accent"
    name: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What the template draws; without a canvas it only says why there is nothing to draw."""

    title: str
    canvas: Canvas | None = None
    absence: str = ""
    readout: str = ""  # below the title: the last value, until the script puts the one under the pointer there
    description: str = ""  # what a screen reader says
    explanation: str = ""
    areas: list[Line] = field(default_factory=list)
    # Those with a name have a dot to point at, unless the figure has bands that tell the values of all lines.
    lines: list[Line] = field(default_factory=list)
    hover: list[tuple[float, str]] = field(default_factory=list)  # samples, text

    @property
    def legend(self) -> list[Line]:
        return [shape for shape in (*self.areas, *self.lines) if shape.name]

    def end_labels(self) -> list[tuple[float, float, Line]]:
        """Place of the label behind each line that has one; those that would touch are moved apart, up and down."""
        if self.canvas is None:
            return []
        canvas = self.canvas
        ends = [(*line.points[-1], line) for line in self.lines if line.label and line.points]
        placed: list[tuple[float, float, Line]] = []
        for samples, value, line in sorted(ends, key=lambda end: canvas.y(end[1])):
            x, y = canvas.x(samples) + 5, canvas.y(value)
            near = [above for across, above, _ in placed if abs(across - x) < LABEL_WIDTH]
            placed.append((x, max([y, *(above + TICK_HEIGHT for above in near)]), line))
        # What was pushed below the frame moves back up, and what is in its way with it.
        limit = float(canvas.bottom)
        for index in reversed(range(len(placed))):
            x, y, line = placed[index]
            below = [other - TICK_HEIGHT for across, other, _ in placed[index + 1 :] if abs(across - x) < LABEL_WIDTH]
            placed[index] = (x, round(min([y, limit, *below]), 1), line)
        return placed


def all_figures(run: RunContents, evaluations: list[Evaluation]) -> list[Figure]:
    """The most important first; none before the first record."""
    if not run.records:
        return []
    accuracy = "Share of the batch whose own pair scores highest."
    figures = [
        curve("Loss", column(run.records, "loss"), unit="loss of the batch"),
        curve("In-batch accuracy", column(run.records, "accuracy"), "accuracy", accuracy, in_percent=True),
        recall_figure(evaluations),
        *merge_figures(run),
        calibration_figure(run),
        curve("Temperature", column(run.records, "temperature"), unit="temperature τ", noisy=False),
        curve("Learning rate", column(run.records, "learning_rate"), unit="rate of the towers", noisy=False),
        time_figure(run),
    ]
    if speed := column(run.records, "samples_per_second"):
        figures.append(curve("Speed", speed, unit="samples per second"))
    if norm := column(run.records, "gradient_norm"):
        figures.append(curve("Gradient norm", norm, unit="norm of the gradient", allow_log=True))
    return figures


def curve(
    title: str,
    segments: list[list[Point]],
    unit: str,
    explanation: str = "",
    *,
    reference: float | None = None,
    in_percent: bool = False,
    allow_log: bool = False,
    noisy: bool = True,
) -> Figure:
    """One column of the records: the values as a light line, smoothed as a strong one; if not noisy, as they are."""
    points = [point for segment in segments for point in segment]
    if not points:
        return Figure(title=title, absence="The records hold no such value yet.")
    values = [value for _, value in points]
    include = [reference] if reference is not None else [0.0] if in_percent else []
    up = value_scale(values, include=include, allow_log=allow_log)
    across = Scale(0, max(samples for samples, _ in points) or 1)
    say = percent if in_percent else format_number
    texts = [f"{say(value)} at {format_samples(samples)} samples" for samples, value in points]
    last, lines = texts[-1], segments
    if noisy:
        # Smoothed within the frame: one far outlier would move the whole window out of sight.
        lines = [smooth(up.clamp(segment), log=up.log) for segment in segments]
        means = [mean for line in lines for _, mean in line]
        texts = [f"{text}, smoothed {say(mean)}" for text, mean in zip(texts, means, strict=True)]
    if outside := sum(not up.log and not up.low <= value <= up.high for value in values):
        explanation += f" {outside} of {len(values):,} values lie outside the frame and are drawn at its edge."
    return Figure(
        title=title,
        canvas=Canvas(across, up, unit + (", log scale" if up.log else ""), in_percent, reference),
        readout=last,
        description=f"{title} over samples seen: from {say(values[0])} to {last}; "
        f"lowest {say(min(values))}, highest {say(max(values))}.",
        explanation=explanation.strip(),
        lines=[Line(thin(segment, MAX_POINTS), "raw", "accent-light") for segment in segments if noisy]
        + [Line(thin(line, MAX_POINTS)) for line in lines],
        hover=[(samples, text) for (samples, _), text in zip(points, texts, strict=True)],
    )


def calibration_figure(run: RunContents) -> Figure:
    segments = column(run.records, "calibration")
    if not segments and not run.predicts_normalizers:
        reason = f"{run.objective} predicts no normalizer: there is nothing to calibrate."
        return Figure(title="Calibration", absence=reason)
    figure = curve("Calibration", segments, "true / predicted", CALIBRATION_MEANING, reference=1.0, allow_log=True)
    if run.calibration is None:
        return figure
    # The figure of the terminal and of summary.json: a single record may be far off.
    readout = f"{format_number(run.calibration)} ({judge_calibration(run.calibration)}), median of the last quarter"
    return replace(figure, readout=readout)


def recall_figure(evaluations: list[Evaluation]) -> Figure:
    """Recall@1: one colour per held-out set, one kind of line per direction."""
    title = "Recall@1 on held-out data"
    lines, unit = recall_lines(evaluations)
    if not lines:
        return Figure(title=title, absence="No retrieval was evaluated.")
    last = max(samples for line in lines for samples, _ in line.points)
    if len({samples for line in lines for samples, _ in line.points}) == 1:
        reason = f"There is one evaluation so far, at {format_samples(last)} samples: see the table below. "
        return Figure(title=title, absence=reason + "A curve needs two or more; set evaluation.every.")
    up = value_scale([value for line in lines for _, value in line.points], include=[0.0])
    ends = "; ".join(f"{line.name} {percent(line.points[-1][1])}" for line in lines)
    return Figure(
        title=title,
        canvas=Canvas(Scale(0, last or 1), up, unit, in_percent=True),
        readout=f"last at {format_samples(last)} samples",
        description=f"{title} over samples seen, at the last evaluation: {ends}.",
        lines=lines,
    )


def merge_figures(run: RunContents) -> list[Figure]:
    """Recall@1 of the models between the one that training started from and its result; none where not measured."""
    evaluations = merge_evaluations(run)
    lines, unit = recall_lines(evaluations)
    means = mean_curve([line.points for line in lines])
    if len(means) < 2:
        return []
    best, mean = max(means, key=lambda point: point[1])
    ends = "; ".join(f"{line.name} {percent(line.points[0][1])} to {percent(line.points[-1][1])}" for line in lines)
    figure = Figure(
        title="Merged with the start",
        canvas=Canvas(
            Scale(0, 1),
            value_scale([value for line in lines for _, value in line.points], include=[0.0]),
            unit,
            in_percent=True,
            across_unit="weight of the fine-tuned model",
        ),
        readout=f"mean of the lines highest at {best:g}: {percent(mean)}",
        description=f"Recall@1 over the weight of the fine-tuned model, from weight 0 to 1: {ends}.",
        explanation="At 0 the model before training, at 1 this run (neuclip merge --curve). A weight that is chosen by "
        "these sets looks better on them than it is: measure the merged model on others.",
        lines=lines,
    )
    return [figure]


def recall_lines(evaluations: list[Evaluation]) -> tuple[list[Line], str]:
    """Recall@1 over the evaluations' samples: one colour per held-out set, one kind of line per direction. Also the
    title of their axis, with the folder that the names of all sets begin with."""
    names = list(dict.fromkeys(held_out.name for evaluation in evaluations for held_out in evaluation.retrieval))
    folder = shared_folder(names)
    lines = [
        Line(
            points,
            "line" if direction == "image_to_text" else "line dashed",
            f"series-{index % NUMBER_OF_COLOURS}",
            f"{name.removeprefix(folder)}, {words}",
        )
        for index, name in enumerate(names)
        for direction, words in DIRECTIONS.items()
        if (points := recall_points(evaluations, name, direction))
    ]
    return lines, f"recall@1, {folder.rstrip('/')}" if folder else "recall@1"


def shared_folder(names: list[str]) -> str:
    """The folder that several names begin with, which the legend need not repeat: 'a/' for a/b and a/c."""
    if len(names) < 2:
        return ""
    folder = names[0][: names[0].rfind("/") + 1]
    return folder if all(name.startswith(folder) for name in names) else ""


def recall_points(evaluations: list[Evaluation], name: str, direction: str) -> list[Point]:
    return [
        (evaluation.samples, recall)
        for evaluation in evaluations
        for held_out in evaluation.retrieval
        if held_out.name == name
        and evaluation.samples is not None
        and (recall := held_out[f"{direction}_recall_at_1"]) is not None
    ]


def time_figure(run: RunContents) -> Figure:
    """Shares of a step's time as stacked areas; 'other' is what is neither data, towers nor normalizer."""
    title, names = "Time per step", [*SHARE_KEYS, "other"]
    rows = []
    for record in run.records:
        samples = number(record.get("samples"))
        if samples is not None and number(record.get("towers_share")) is not None:
            rows.append((samples, time_shares(record)))
    if not rows:
        return Figure(title=title, absence="The records do not say how the time of a step is divided.")
    smoothed = [smooth([(samples, row[index]) for samples, row in rows]) for index in range(len(names))]
    chosen = evenly_spaced(len(rows), MAX_POINTS // 4)
    rows = [(rows[place][0], [points[place][1] for points in smoothed]) for place in chosen]
    areas, floor = [], [(samples, 0.0) for samples, _ in rows]
    for index, name in enumerate(names):
        roof = [(samples, below + row[index]) for (samples, below), (_, row) in zip(floor, rows, strict=True)]
        areas.append(Line([*roof, *reversed(floor)], "area", f"area-{index}", name))
        floor = roof
    hover = [(samples, f"{format_samples(samples)}: {share_list(names[:-1], row)}") for samples, row in rows]
    return Figure(
        title=title,
        canvas=Canvas(Scale(0, rows[-1][0] or 1), Scale(0, 1), "share of a step's time", in_percent=True),
        readout=hover[-1][1],
        description=f"{title} over samples seen, at the end: {share_list(names, rows[-1][1])}.",
        areas=areas,
        hover=hover,
    )


def time_shares(record: dict[str, Any]) -> list[float]:
    """Of data, towers, normalizer and the rest. A share is null where the method has no such phase."""
    shares = [min(1.0, max(0.0, number(record.get(key)) or 0.0)) for key in SHARE_KEYS.values()]
    whole = max(1.0, sum(shares))
    shares = [share / whole for share in shares]
    return [*shares, 1.0 - sum(shares)]


def share_list(names: Sequence[str], shares: Sequence[float]) -> str:
    """Short enough for one line below the title: 'data 5, towers 83, normalizer 12 %'."""
    return ", ".join(f"{name} {100 * share:.0f}" for name, share in zip(names, shares, strict=False)) + " %"
