"""The curves of a comparison over samples seen: one colour and letter per group, every seed a thin line of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from neuclip.formatting import format_number, format_samples, percent
from neuclip.report.compare_inputs import Group, Member
from neuclip.report.compare_scores import curve_measures, error_points, score_points
from neuclip.report.figures import (
    CALIBRATION_MEANING,
    MAX_BANDS,
    MAX_POINTS,
    NUMBER_OF_COLOURS,
    Canvas,
    Figure,
    Line,
    shared_folder,
)
from neuclip.report.plotting import Point, Scale, column, evenly_spaced, mean_curve, smooth, thin, value_scale

ERROR_MEANING = "Mean squared error of the log-normalizers: 0 is exact. That of CLIP is its mini-batch's."


@dataclass(frozen=True)
class Series:
    """One group in one figure: a curve per run, and the mean of the `counted` ones, whose final figures count too."""

    group: Group
    index: int
    curves: list[list[Point]]
    counted: list[list[Point]]

    @property
    def colour(self) -> str:
        return f"series-{self.index % NUMBER_OF_COLOURS}"

    @property
    def style(self) -> str:
        """When the colours are used up they come again, dashed."""
        return "line" if self.index < NUMBER_OF_COLOURS else "line dashed"

    @property
    def name(self) -> str:
        return self.group.name + (f", mean of {len(self.counted)}" if len(self.counted) > 1 else "")

    @cached_property
    def mean(self) -> list[Point]:
        return mean_curve(self.counted)


def all_curves(groups: Sequence[Group]) -> list[Figure]:
    """Loss, recall, temperature, calibration and normalizer error, without those that nobody measured."""
    methods = {run.objective for group in groups for run in group.runs}
    different = "Losses of different methods are different quantities: compare their course, not their height."

    def recorded(key: str) -> Callable[[Member], list[Point]]:
        return lambda member: [
            point for segment in column(member.contents.records if member.contents else [], key) for point in segment
        ]

    figures = [overlay(groups, recorded("loss"), "Loss", "loss of the batch", different if len(methods) > 1 else "")]
    measures = curve_measures(groups)
    folder = shared_folder([measure.dataset for measure in measures])
    for measure in measures:
        figures.append(
            overlay(
                groups,
                partial(score_points, measure),
                f"{'Top-1' if measure.metric == 'top1' else 'Recall@1'} on {measure.dataset.removeprefix(folder)}",
                measure.words + (f", {folder.rstrip('/')}" if folder else ""),
                in_percent=True,
                noisy=False,
            )
        )
    figures += [
        overlay(groups, recorded("temperature"), "Temperature", "temperature τ", noisy=False, dots=False),
        overlay(
            groups,
            recorded("calibration"),
            "Calibration",
            "true / predicted",
            CALIBRATION_MEANING,
            reference=1.0,
            allow_log=True,
        ),
        overlay(groups, error_points, "Normalizer error", "squared error", ERROR_MEANING, allow_log=True, noisy=False),
    ]
    return [figure for figure in figures if figure is not None]


def overlay(
    groups: Sequence[Group],
    points_of: Callable[[Member], list[Point]],
    title: str,
    unit: str,
    explanation: str = "",
    *,
    reference: float | None = None,
    in_percent: bool = False,
    allow_log: bool = False,
    noisy: bool = True,
    dots: bool | None = None,
) -> Figure | None:
    """One figure with all groups; None without two places to draw a line between. Noisy curves are smoothed, others
    have a dot at every point (unless not `dots`), as they were measured nowhere else."""
    raw = {member.path: points_of(member) for group in groups for member in group.members}
    points = [point for curve in raw.values() for point in curve]
    if len({samples for samples, _ in points}) < 2:
        return None
    include = [reference] if reference is not None else [0.0] if in_percent else []
    up = value_scale([value for _, value in points], include=include, allow_log=allow_log)
    across = Scale(0, max(samples for samples, _ in points) or 1)
    if noisy:  # within the frame: one far outlier would move the whole window out of sight
        raw = {path: smooth(up.clamp(curve), log=up.log) for path, curve in raw.items()}

    def curves(members: Sequence[Member]) -> list[list[Point]]:
        return [raw[member.path] for member in members if raw[member.path]]

    series = [Series(group, index, curves(group.members), curves(group.counted)) for index, group in enumerate(groups)]
    series = [one for one in series if one.mean]
    say = percent if in_percent else format_number
    ends = [(one.group, say(one.mean[-1][1])) for one in series]
    return Figure(
        title=title,
        canvas=Canvas(across, up, unit + (", log scale" if up.log else ""), in_percent, reference),
        readout=f"last: {', '.join(f'{group.letter} {end}' for group, end in ends)}",
        description=f"{title} over samples seen, at the end: "
        + "; ".join(f"{group.label} {end}" for group, end in ends),
        explanation=explanation,
        lines=[line for one in series for line in series_lines(one, dots=not noisy if dots is None else dots)],
        hover=hover_texts(series, say),
    )


def series_lines(series: Series, *, dots: bool) -> list[Line]:
    """Every run as a thin line, then the mean, which carries letter and name."""
    lines = [Line(thin(curve, MAX_POINTS), "thin", series.colour) for curve in series.curves if len(series.curves) > 1]
    lines.append(Line(thin(series.mean, MAX_POINTS), series.style, series.colour, series.name, series.group.letter))
    return [*lines, Line(series.mean, "dots", series.colour)] if dots else lines


def hover_texts(series: Sequence[Series], say: Callable[[float | None], str]) -> list[tuple[float, str]]:
    """At each place the newest value of every group that had got that far: '10 k: A 1.23, B 1.35'."""
    means = {one.group.letter: one.mean for one in series}
    places = sorted({samples for curve in means.values() for samples, _ in curve})
    texts = []
    for samples in (places[index] for index in evenly_spaced(len(places), MAX_BANDS)):
        values = [
            f"{letter} {say(curve[bisect_right(curve, samples, key=lambda point: point[0]) - 1][1])}"
            for letter, curve in means.items()
            if curve[0][0] <= samples <= curve[-1][0]
        ]
        texts.append((samples, f"{format_samples(samples)}: {', '.join(values)}"))
    return texts
