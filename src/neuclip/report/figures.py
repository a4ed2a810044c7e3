"""Hand-made SVG: one curve, several lines, or stacked shares over samples seen.

Everything is drawn on a canvas of 360 x 216 units, about the width of a phone, so that letters keep a readable size
both there and in the three columns of a desk. Values show on hover through <title>, with or without script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from neuclip.formatting import format_number, format_percent, format_samples
from neuclip.report.scales import Scale, tick_label, value_scale
from neuclip.report.series import Point, smooth, spread, thin

WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 46, 340, 22, 178
TICK_HEIGHT = 12  # labels closer than this would touch
MOST_POINTS = 600  # two per unit of the plot's width
MOST_HOVER_BANDS = 48
NUMBER_OF_COLOURS = 6


@dataclass(frozen=True)
class NamedLine:
    """One line of a figure with a legend; `colour` counts from 0, `dashed` tells two lines of a colour apart."""

    name: str
    points: list[Point]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Canvas:
    """The two axes of a figure: from (samples, value) to places in the drawing."""

    across: Scale
    up: Scale

    def x(self, samples: float) -> float:
        return LEFT + (RIGHT - LEFT) * self.across.share(samples)

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * self.up.share(value)

    def path(self, points: Sequence[Point]) -> str:
        places = [f"{self.x(samples):.1f} {self.y(value):.1f}" for samples, value in points]
        if len(places) == 1:
            return f"M{places[0]}h.01"  # with round ends, a line of no length is a dot
        return "M" + "L".join(places)


def curve(
    title: str,
    stretches: list[list[Point]],
    *,
    unit: str,
    meaning: str = "",
    reference: float | None = None,
    percent: bool = False,
    allow_log: bool = False,
    noisy: bool = True,
) -> str:
    """One column of the records: the values as a light line, smoothed as a strong one; if not noisy, as they are.

    `stretches` are the unbroken pieces of the curve, `unit` is the title of the upright axis, `reference` a value
    that is drawn as a dashed line.
    """
    points = [point for stretch in stretches for point in stretch]
    if not points:
        return placeholder(title, meaning or "The records hold no such value yet.")
    values = [value for _, value in points]
    include = [reference] if reference is not None else [0.0] if percent else []
    up = value_scale(values, include=include, allow_log=allow_log)
    canvas = Canvas(Scale(0, max(samples for samples, _ in points) or 1), up)
    # Smoothed within the frame: otherwise one far outlier would drag the whole window out of sight.
    smoothed = [smooth(up.held(stretch), log=up.log) if noisy else stretch for stretch in stretches]
    say = format_percent if percent else format_number
    drawn = [axes(canvas, unit + (", log scale" if up.log else ""), percent=percent, reference=reference)]
    if noisy:
        drawn += [f'<path class="raw" d="{canvas.path(thin(stretch, MOST_POINTS))}"/>' for stretch in stretches]
    drawn += [f'<path class="line" d="{canvas.path(thin(stretch, MOST_POINTS))}"/>' for stretch in smoothed]
    all_smoothed = [point for stretch in smoothed for point in stretch]
    texts = [
        f"{say(value)} at {format_samples(samples)} samples" + (f", smoothed {say(mean)}" if noisy else "")
        for (samples, value), (_, mean) in zip(points, all_smoothed, strict=True)
    ]
    drawn.append(hover_bands(canvas, [samples for samples, _ in points], texts))
    outside = sum(not up.log and not up.holds(value) for value in values)
    if outside:
        meaning += f" {outside} of {len(values):,} values lie outside the frame and are drawn at its edge."
    at_rest = f"{say(values[-1])} at {format_samples(points[-1][0])} samples"
    sentence = (
        f"{title} over samples seen: from {say(values[0])} to {say(values[-1])} "
        f"at {format_samples(points[-1][0])} samples; lowest {say(min(values))}, highest {say(max(values))}."
    )
    return card(title, at_rest, drawing(sentence, drawn), meaning=meaning)


def lines(title: str, named: list[NamedLine], *, unit: str, meaning: str = "") -> str:
    """Several shares over samples seen, with a dot for every measurement and a legend below."""
    values = [value for line in named for _, value in line.points]
    if not values:
        return placeholder(title, meaning)
    furthest = max(samples for line in named for samples, _ in line.points)
    canvas = Canvas(Scale(0, furthest or 1), value_scale(values, include=[0.0]))
    drawn = [axes(canvas, unit, percent=True)]
    for line in named:
        style = f'class="line series-{line.colour % NUMBER_OF_COLOURS}{" dashed" if line.dashed else ""}"'
        drawn.append(f'<path {style} d="{canvas.path(line.points)}"/>')
    for line in named:  # after all lines, so that no line covers another's dots
        drawn += [dot(canvas, line, point) for point in line.points]
    ends = "; ".join(f"{line.name} {format_percent(line.points[-1][1])}" for line in named if line.points)
    sentence = f"{title} over samples seen, at the last evaluation: {ends}."
    legend = "".join(legend_entry(line) for line in named)
    return card(
        title, f"last at {format_samples(furthest)} samples", drawing(sentence, drawn), meaning=meaning, legend=legend
    )


def stacked(title: str, rows: list[tuple[float, list[float]]], names: Sequence[str], *, meaning: str = "") -> str:
    """Shares of a whole over samples seen, one area per name, the first at the bottom.

    `rows` are (samples, one share per name); the last name is the rest, which the hover text leaves out.
    """
    if not rows:
        return placeholder(title, meaning)
    shares = [smooth([(samples, row[index]) for samples, row in rows]) for index in range(len(names))]
    rows = [(rows[place][0], [share[place][1] for share in shares]) for place in spread(len(rows), MOST_POINTS // 4)]
    canvas = Canvas(Scale(0, rows[-1][0] or 1), Scale(0, 1))
    drawn, floor = [], [(samples, 0.0) for samples, _ in rows]
    for index in range(len(names)):
        roof = [(samples, below + row[index]) for (samples, below), (_, row) in zip(floor, rows, strict=True)]
        outline = canvas.path([*roof, *reversed(floor)])
        drawn.append(f'<path class="area area-{index}" d="{outline}Z"/>')
        floor = roof
    drawn.append(axes(canvas, "share of a step's time", percent=True))
    texts = [f"{format_samples(samples)}: {share_list(names[:-1], row[:-1])}" for samples, row in rows]
    drawn.append(hover_bands(canvas, [samples for samples, _ in rows], texts))
    legend = "".join(
        f'<li><span class="swatch area-{index}"></span>{escape(name)}</li>' for index, name in enumerate(names)
    )
    sentence = f"{title} over samples seen, at the end: {share_list(names, rows[-1][1])}."
    return card(title, texts[-1], drawing(sentence, drawn), meaning=meaning, legend=legend)


def share_list(names: Sequence[str], shares: Sequence[float]) -> str:
    """Short enough for one line of a figure's head: 'data 5, towers 83, normalizer 12 %'."""
    return ", ".join(f"{name} {100 * share:.0f}" for name, share in zip(names, shares, strict=True)) + " %"


def axes(canvas: Canvas, unit: str, *, percent: bool, reference: float | None = None) -> str:
    """Grid lines, tick labels and the titles of both axes; at the reference a dashed line with a label of its own."""
    up, across = canvas.up.ticks(), canvas.across.ticks()
    step = min((after - before for before, after in pairwise(up)), default=1.0)
    drawn = []
    if reference is not None:
        up = [tick for tick in up if abs(canvas.y(tick) - canvas.y(reference)) > TICK_HEIGHT]
        y = canvas.y(reference)
        drawn.append(f'<path class="reference" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        drawn.append(upright_label(y, format_number(reference), "at-reference"))
    for tick in up:
        y = canvas.y(tick)
        label = (
            f"{tick_label(100 * tick, 100 * step)} %" if percent else tick_label(tick, tick if canvas.up.log else step)
        )
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        drawn.append(upright_label(y, label, "tick"))
    for tick in across:
        x = canvas.x(tick)
        drawn.append(f'<path class="grid" d="M{x:.1f} {BOTTOM}v4"/>')
        drawn.append(
            f'<text class="tick" x="{x:.1f}" y="{BOTTOM + 16}" text-anchor="middle">{format_samples(tick)}</text>'
        )
    drawn.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    drawn.append(f'<text class="axis-title" x="{LEFT - 6}" y="11">{escape(unit)}</text>')
    drawn.append(f'<text class="axis-title" x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">samples seen</text>')
    return "".join(drawn)


def upright_label(y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'


def hover_bands(canvas: Canvas, samples: Sequence[float], texts: Sequence[str]) -> str:
    """Upright bands, invisible until the pointer is over them, each with the value in its middle."""
    chosen = spread(len(samples), MOST_HOVER_BANDS)
    places = [canvas.x(samples[index]) for index in chosen]
    edges = [LEFT, *((left + right) / 2 for left, right in pairwise(places)), RIGHT]
    return "".join(
        f'<rect class="band" x="{left:.1f}" y="{TOP}" width="{max(0.0, right - left):.1f}" height="{BOTTOM - TOP}">'
        f"<title>{escape(texts[index])}</title></rect>"
        for index, (left, right) in zip(chosen, pairwise(edges), strict=True)
    )


def dot(canvas: Canvas, line: NamedLine, point: Point) -> str:
    samples, value = point
    text = f"{format_percent(value)} at {format_samples(samples)}: {line.name}"
    place = f'cx="{canvas.x(samples):.1f}" cy="{canvas.y(value):.1f}"'
    return (
        f'<g class="dot series-{line.colour % NUMBER_OF_COLOURS}"><title>{escape(text)}</title>'
        f'<circle {place} r="9" class="target"/><circle {place} r="2.6"/></g>'
    )


def legend_entry(line: NamedLine) -> str:
    style = f"line series-{line.colour % NUMBER_OF_COLOURS}{' dashed' if line.dashed else ''}"
    sample = f'<svg class="key" viewBox="0 0 26 8" aria-hidden="true"><path class="{style}" d="M1 4H25"/></svg>'
    return f"<li>{sample}{escape(line.name)}</li>"


def drawing(sentence: str, parts: list[str]) -> str:
    """An SVG that a screen reader announces as one image with one sentence."""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(sentence)}">{"".join(parts)}</svg>'


def card(title: str, at_rest: str, svg: str, *, meaning: str = "", legend: str = "") -> str:
    """A figure with its title and, beside it, the last value; the script puts the value under the pointer there."""
    return (
        f'<figure class="curve"><figcaption><h3>{escape(title)}</h3>'
        f'<p class="readout">{escape(at_rest)}</p></figcaption>{svg}'
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + (f'<p class="meaning">{escape(meaning.strip())}</p>' if meaning.strip() else "")
        + "</figure>"
    )


def placeholder(title: str, reason: str) -> str:
    """Where a figure would be: why there is none."""
    return (
        f'<figure class="curve absent"><figcaption><h3>{escape(title)}</h3></figcaption>'
        f'<p class="absence">{escape(reason)}</p></figure>'
    )
