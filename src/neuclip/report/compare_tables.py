"""The tables of a comparison: for the page, the terminal, Markdown and LaTeX; and all figures as CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from neuclip.formatting import UNKNOWN, format_count, format_number, format_samples, percent
from neuclip.report.compare_inputs import Group, different_settings
from neuclip.report.compare_scores import Reach, Score, Target, final_figures
from neuclip.report.tables import Row, Table

CSV_HEAD = ("group", "run", "seed", "finished", "samples", "dataset", "metric", "value")
LATEX_LETTERS = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": r"$-$",
    "–": "--",
    "\n": " ",
}
BEST_RULE = (
    "Best is what leads every other group by more than both standard deviations together; "
    "where a group has fewer than three runs, nothing is marked: their spread says too little."
)


@dataclass(frozen=True)
class Style:
    """How one kind of document writes a text and marks the best value."""

    text: Callable[[str], str]
    best: Callable[[str], str]


PLAIN = Style(text=str, best=lambda text: f"* {text}")
HTML = Style(
    text=str, best=lambda text: Markup('<span><b class="mark">best</b> <strong>{}</strong></span>').format(text)
)
MARKDOWN = Style(
    text=lambda text: text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " "), best=lambda text: f"**{text}**"
)
LATEX = Style(
    text=lambda text: "".join(LATEX_LETTERS.get(letter, letter) for letter in text),
    best=lambda text: f"\\textbf{{{text}}}",
)


def with_spread(mean: float, deviation: float | None, *, in_percent: bool) -> str:
    """'12.3 ± 0.4 %', '1.64 ± 0.04 %', '1.07 ± 0.02'; without a deviation '12.3 %'. Both with the same decimals.

    >>> with_spread(0.123, 0.0041, in_percent=True), with_spread(0.0052, None, in_percent=True)
    ('12.3 ± 0.4 %', '0.52 %')
    """
    if in_percent:
        small = abs(mean) < 0.00995 or (deviation is not None and 0 < deviation < 0.0005)
        decimals = 2 if small else 1
        parts = [f"{100 * value:.{decimals}f}" for value in (mean, deviation) if value is not None]
        return " ± ".join(parts).replace("-", "−") + " %"
    if mean == 0 or not 1e-3 <= abs(mean) < 1e9:
        return " ± ".join(format_number(value) for value in (mean, deviation) if value is not None)
    decimals = max(0, 2 - math.floor(math.log10(abs(mean))))
    return " ± ".join(f"{value:,.{decimals}f}" for value in (mean, deviation) if value is not None).replace("-", "−")


def groups_table(groups: Sequence[Group]) -> Table:
    """What is compared: who is in each group."""
    rows = []
    for group in groups:
        first = group.runs[0] if group.runs else None
        seeds = ", ".join(member.seed or "?" for member in group.members) if first else ""
        rows.append(
            [
                group.label,
                first.objective if first else "task results",
                str(first.setting("model", "name") or "") if first else UNKNOWN,
                f"{len(group.members)} (seed {seeds})" if first else "1 file",
                format_samples(max(run.samples_seen for run in group.runs)) if first else UNKNOWN,
                format_count(max(len(member.evaluations) for member in group.members)) if first else UNKNOWN,
            ]
        )
    return Table("What is compared", ["group", "method", "model", "runs", "samples", "evaluations"], rows, 4)


def score_table(caption: str, groups: Sequence[Group], scores: Sequence[Score], style: Style = HTML) -> Table:
    """One row per figure, one column per group that has any of them: mean and standard deviation."""
    shown = [index for index in range(len(groups)) if any(score.spreads[index] for score in scores)]
    rows = []
    for score in scores:
        cells = []
        for index in shown:
            text, spread = UNKNOWN, score.spreads[index]
            if spread:
                text = with_spread(spread.mean, spread.deviation, in_percent=score.measure.in_percent)
            cells.append(style.best(style.text(text)) if index == score.best else style.text(text))
        facts = [score.measure.dataset, score.measure.words, percent(score.chance)]
        rows.append([*map(style.text, facts), *cells])
    head = ["data", "figure", "chance"]
    for group in (groups[index] for index in shown):
        name = group.name if style is LATEX else group.label  # the letters are for the page's curves
        head.append(f"{name} (n = {len(group.counted)})")
    return Table(caption, [style.text(cell) for cell in head], rows, text_columns=2)


def seeds_table(groups: Sequence[Group], scores: Sequence[Score]) -> Table:
    """The values behind the means, run by run in the order of the seeds; no run is left out of it."""
    figures = [[final_figures(member) for member in group.members] for group in groups]
    rows = []
    for score in scores:
        cells = []
        for ours in figures:
            known = [member.get(score.measure) for member in ours]
            texts = [
                UNKNOWN if one is None else with_spread(one, None, in_percent=score.measure.in_percent) for one in known
            ]
            cells.append(", ".join(text.removesuffix(" %") for text in texts))
        unit = ", %" if score.measure.in_percent else ""
        rows.append([score.measure.dataset, score.measure.words + unit, *cells])
    return Table("Run by run", ["data", "figure", *(one.label for one in groups)], rows, 2)


def settings_table(groups: Sequence[Group]) -> Table:
    """Only the settings that differ between groups."""
    rows: list[Row] = [
        [name, *(UNKNOWN if value is None else value for value in values)]
        for name, values in different_settings(groups).items()
    ]
    head = ["setting", *(group.label for group in groups)]
    return Table("Settings that differ", head, rows, text_columns=1 + len(groups))


def reach_table(groups: Sequence[Group], targets: Sequence[Target]) -> Table:
    """One row per score to be reached, one column per group that may have reached it."""
    rows = [
        [
            target.measure.dataset,
            f"{target.measure.words} {with_spread(target.score, None, in_percent=True)}, final of {target.group.label}",
            *(reach_text(one) for one in target.reached),
        ]
        for target in targets
    ]
    head = ["data", "score to reach", *(group.label for group in groups)]
    return Table("Samples needed to reach a final score (share of its own budget)", head, rows, text_columns=2)


def reach_text(reached: Reach | None) -> str:
    """'61,440 (0.64)'."""
    if reached is None:
        return UNKNOWN
    if reached.samples is None:
        return "not reached"
    share = f" ({reached.share:.2f})" if reached.share is not None else ""
    return f"{format_count(reached.samples)}{' or before' if reached.at_first else ''}{share}"


def markdown_table(table: Table) -> str:
    """A table whose cells are written in Markdown already."""
    rule = ["---" if index < table.text_columns else "---:" for index in range(len(table.head))]
    return "".join(f"| {' | '.join(row)} |\n" for row in [table.head, rule, *table.rows])


def escape_table(table: Table, style: Style) -> Table:
    rows = [[style.text(cell) for cell in row] for row in table.rows]
    return replace(table, caption=style.text(table.caption), head=[*map(style.text, table.head)], rows=rows)


def latex_table(table: Table) -> str:
    """A tabular of the booktabs package; the cells are written in LaTeX already."""
    columns = "".join("l" if index < table.text_columns else "r" for index in range(len(table.head)))
    rows = [" & ".join(row) + r" \\" for row in [table.head, *table.rows]]
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def figures_csv(groups: Sequence[Group]) -> str:
    """Long format, as pandas wants it: one row per run and figure, shares as fractions, nothing rounded."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for group in groups:
        for member in group.members:
            seen = f"{member.contents.samples_seen:.0f}" if member.contents else ""
            facts = (group.name, member.name, member.seed, str(member.finished).lower(), seen)
            for measure, value in final_figures(member).items():
                writer.writerow((*facts, measure.dataset, measure.metric, repr(value)))
    return text.getvalue()
