"""Renders a comparison as a page, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from neuclip.errors import UserError
from neuclip.formatting import UNKNOWN, format_number, format_samples, percent
from neuclip.report.charts import CURVES, Chart
from neuclip.report.compare import Comparison, Difference, Group
from neuclip.report.measures import (
    DEFINITION,
    DIFFERENT_DEFINITION,
    ERROR_KEY,
    Measure,
    error_chart,
    evaluation_lines,
    measure_chart,
    short_names,
    size,
)
from neuclip.report.page import (
    Cell,
    Charts,
    Notes,
    Page,
    Section,
    Table,
    latex_table,
    markdown_table,
    render_html,
    write_page,
)
from neuclip.report.run_report import setting_text

DEVIATION = "± is the standard deviation over the n runs of a group (n − 1 in its denominator)."
INTERVAL = (
    "Below each figure is its mean difference to {baseline} over the seeds that both have, with its 95 % interval: "
    "Student's t, paired by seed{corrected}."
)
EVERY_ROW = (
    "A difference is bold if its interval excludes zero. By chance alone, this happens in one of twenty rows: decide "
    "before training which figure counts."
)
ONE_ROW = "Only {measure} was chosen beforehand: its difference is bold if the interval excludes zero."


def comparison_page(comparison: Comparison) -> Page:
    more, settings = final_table(comparison, main=False), settings_table(comparison.groups)
    curves, more_curves = main_charts(comparison), more_charts(comparison)
    sections = [
        Section("", [groups_table(comparison.groups), Notes(list(verdicts(comparison)))]),
        Section("Final figures", [final_table(comparison)]),
        *([Section("More figures", [more], folded=True)] if more.rows else []),
        *([Section("Curves", [Charts(curves)])] if curves else []),
        *([Section("More curves", [Charts(more_curves)], folded=True)] if more_curves else []),
        *([Section("Settings that differ", [settings])] if settings.rows else []),
    ]
    return Page("comparison", comparison.title, notices=list(comparison.notices()), sections=sections)


def verdicts(comparison: Comparison) -> Iterator[str]:
    """A sentence per group on its difference in the chosen measure; none if no measure was chosen."""
    for measure in (one for one in comparison.measures if one.key == comparison.measure):
        for group in comparison.groups:
            if (gap := comparison.difference(group, measure)) is None:
                continue
            better = measure.better * gap.mean > 0
            word = ("better than" if better else "worse than") if gap.is_shown else "not shown to differ from"
            difference = difference_text(gap, measure, decimals(group.values(measure), measure))
            yield (
                f"{measure.words} on {measure.dataset}: {group.name} is {word} {comparison.baseline.name}, "
                f"{difference} over {gap.seeds} seeds."
            )


def groups_table(groups: Sequence[Group]) -> Table:
    """A table of the groups: method, model, seeds, samples and evaluations."""
    rows = []
    for group in groups:
        run = group.members[0].run
        if run is None:
            rows.append([group.name, "task results", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN])
            continue
        seeds = ", ".join(str(member.seed) for member in group.members)
        seen = max(member.run.samples_seen for member in group.members if member.run)
        evaluations = max(len(member.run.evaluations) for member in group.members if member.run)
        model = str(run.settings.get("model.name", ""))
        rows.append([group.name, run.objective, model, seeds, format_samples(seen), str(evaluations)])
    return Table("What is compared", ["group", "method", "model", "seeds", "samples", "evaluations"], rows, 4)


def final_table(comparison: Comparison, *, main: bool = True) -> Table:
    """A table with a row per figure and a column per group: mean and standard deviation, and below them the difference
    to the baseline. `main`: the main figures, or the others."""
    groups = comparison.groups
    rows: list[list[str | Cell]] = []
    for measure in (measure for measure in comparison.measures if measure.main == main):
        chances = (member.chance(measure) for group in groups for member in group.counted)
        guess = next((one for one in chances if one is not None and comparison.is_comparable(measure)), None)
        cells = [figure_cell(comparison, group, measure) for group in groups]
        rows.append([measure.dataset, measure.words, percent(guess), *cells])
    head = ["data", "figure", "chance", *(f"{group.name} (n = {len(group.counted)})" for group in groups)]
    return Table("", head, rows, 2, list(final_notes(comparison)) if main else [])


def table_alone(comparison: Comparison) -> Table:
    """The table of final figures with the page's notices and verdicts as notes, for Markdown and LaTeX."""
    table = final_table(comparison)
    return replace(table, notes=[*comparison.notices(), *verdicts(comparison), *table.notes])


def final_notes(comparison: Comparison) -> Iterator[str]:
    """Sentences that explain the figures."""
    groups, keys = comparison.groups, [measure.metric for measure in comparison.measures]
    if any(len(group.counted) > 1 for group in groups):
        yield DEVIATION
    if any(comparison.difference(group, measure) for group in groups for measure in comparison.measures):
        corrected = f", corrected for {len(groups) - 1} comparisons (Bonferroni)" if len(groups) > 2 else ""
        rule = ONE_ROW.format(measure=comparison.measure) if comparison.measure else EVERY_ROW
        yield f"{INTERVAL.format(baseline=comparison.baseline.name, corrected=corrected)} {rule}"
    if any("_recall_at_" in key for key in keys):
        different = any("different_text" in key for key in keys)
        yield f"{DEFINITION}{f'; {DIFFERENT_DEFINITION}' if different else ''}."
    runs = [run for group in groups for run in group.runs]
    sizes = {name: size(name, run.final) for run in runs for name in {one.dataset for one in comparison.measures}}
    known = [f"{name} ({text})" for name, text in sorted(sizes.items()) if text and name not in comparison.different]
    if known:
        yield f"Held out: {', '.join(known)}."


def figure_cell(comparison: Comparison, group: Group, measure: Measure) -> Cell:
    """A cell with '12.3 ± 0.4 %', '+1.2 [+0.3, +2.1]' below it, and a tooltip with the value of each run."""
    values = group.values(measure)
    if not values:
        return Cell(UNKNOWN)
    places = decimals(values, measure)
    text = " ± ".join(figure_text(value, measure, places) for value in (mean(values), *spread(values)))
    members = [member for member in group.counted if measure in member.figures]
    each = ", ".join(f"{member.name}: {measure.text(member.figures[measure])}" for member in members)
    gap = comparison.difference(group, measure)
    return Cell(
        f"{text} %" if measure.percent else text,
        difference_text(gap, measure, places) if gap else "",
        each if len(members) > 1 else "",
        strong=gap is not None and gap.is_shown and comparison.gets_verdict(measure),
    )


def spread(values: Sequence[float]) -> list[float]:
    """[the sample standard deviation (n - 1)], or [] for a single value."""
    return [stdev(values)] if len(values) > 1 else []


def decimals(values: Sequence[float], measure: Measure) -> int | None:
    """The number of decimals for mean, deviation and difference of these values; None: they need an exponent.

    >>> decimals([0.123, 0.131], Measure("a", "top1", "")), decimals([0.0052], Measure("a", "top1", ""))
    (1, 2)
    """
    middle, deviation = abs(mean(values)), (spread(values) or [1.0])[0]
    if measure.percent:
        return 2 if middle < 0.00995 or 0 < deviation < 0.0005 else 1
    return max(0, 2 - math.floor(math.log10(middle))) if 1e-3 <= middle < 1e9 else None


def figure_text(value: float, measure: Measure, places: int | None, sign: str = "") -> str:
    scaled = 100 * value if measure.percent else value
    if places is None:  # an exponent keeps its hyphen
        return f"{sign if scaled > 0 else ''}{format_number(scaled)}"
    return f"{scaled:{sign},.{places}f}".replace("-", "−")


def difference_text(gap: Difference, measure: Measure, places: int | None) -> str:
    """'+1.2 [+0.3, +2.1]'; in percentage points if the measure is a percentage."""
    middle, low, high = (figure_text(value, measure, places, "+") for value in gap[:3])
    return f"{middle} [{low}, {high}]"


def settings_table(groups: Sequence[Group]) -> Table:
    """A table of the settings in which the groups differ; settings that all groups have come first."""
    settings = [group.members[0].settings for group in groups]
    known = [one for one in settings if one]
    names = dict.fromkeys(name for one in known for name in one)
    different = [name for name in names if len({setting_text(one.get(name)) for one in known}) > 1]
    rows = [
        [name, *(setting_text(one[name]) if name in one else UNKNOWN for one in settings)]
        for name in sorted(different, key=lambda name: not all(name in one for one in known))
    ]
    return Table("", ["setting", *(group.name for group in groups)], rows, 1 + len(groups))


def main_charts(comparison: Comparison) -> list[Chart]:
    """Loss and recall first (accuracy if there is no retrieval set), then the others. Charts without a line of two
    points are left out."""
    groups = comparison.groups
    records = {group.name: [run.records for run in group.runs] for group in groups}
    evaluations = {group.name: [run.evaluations for run in group.runs] for group in groups}
    loss, *others = [curve.chart(records) for curve in CURVES if curve.main]
    if len({run.objective for group in groups for run in group.runs}) > 1:
        note = "Losses of different methods are different quantities: compare their course, not their height."
        loss = replace(loss, note=note)
    scores = [one for one in comparison.measures if one.metric == "image_to_text_recall_at_1"]
    scores = scores or [one for one in comparison.measures if one.metric == "top1"]
    names = short_names([one.dataset for one in scores])
    shown = [measure_chart(one, evaluations, names[one.dataset]) for one in scores]
    return drawable([loss, *shown, *others, error_chart(evaluation_lines(ERROR_KEY, evaluations))])


def more_charts(comparison: Comparison) -> list[Chart]:
    records = {group.name: [run.records for run in group.runs] for group in comparison.groups}
    return drawable([curve.chart(records) for curve in CURVES if not curve.main])


def drawable(charts: Sequence[Chart]) -> list[Chart]:
    """The charts that have a line of at least two points."""
    return [chart for chart in charts if any(len(line.points) > 1 for line in chart.lines)]


def figures_csv(comparison: Comparison) -> str:
    """CSV in long format, as pandas expects it: one row per run and figure, not rounded, percentages as fractions."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("group", "run", "seed", "finished", "samples", "dataset", "metric", "value"))
    for group in comparison.groups:
        for member in group.members:
            seed, seen = (member.seed, f"{member.run.samples_seen:.0f}") if member.run else ("", "")
            facts = (group.name, member.name, seed, str(member.finished).lower(), seen)
            writer.writerows((*facts, one.dataset, one.metric, repr(value)) for one, value in member.figures.items())
    return text.getvalue()


def comparison_figures(comparison: Comparison) -> list[dict[str, Any]]:
    """The result for `--json`: every value, not rounded."""
    return [
        {
            "dataset": measure.dataset,
            "metric": measure.metric,
            "groups": {
                group.name: {
                    "values": values,
                    "mean": mean(values),
                    "standard_deviation": next(iter(spread(values)), None),
                    "difference": gap._asdict() if (gap := comparison.difference(group, measure)) else None,
                }
                for group in comparison.groups
                if (values := group.values(measure))
            },
        }
        for measure in comparison.measures
    ]


WRITERS: dict[str, Callable[[Comparison], str]] = {
    ".html": lambda comparison: render_html(comparison_page(comparison)),
    ".md": lambda comparison: markdown_table(table_alone(comparison)),
    ".tex": lambda comparison: latex_table(table_alone(comparison)),
    ".csv": figures_csv,
}


def writer_of(path: Path) -> Callable[[Comparison], str]:
    """The writer for the suffix of the file's name. Raises UserError for an unknown suffix."""
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"--output {path}: give a name that ends in {', '.join(WRITERS)}")
    return WRITERS[path.suffix.lower()]


def write_comparison(comparison: Comparison, path: Path) -> Path:
    return write_page(path, writer_of(path)(comparison))
