"""The page of an experiment, made from records: the answer, our table beside the paper's, curves, commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import correlation, fmean

from neuclip.experiments.case import AHEAD, BEHIND, LEVEL, Case, is_finished
from neuclip.experiments.definition import TRAIN, Choice, Experiment, Flat, Job
from neuclip.experiments.records import Records, tuning_figure
from neuclip.formatting import UNKNOWN, format_duration, format_number, percent, plural
from neuclip.report.charts import Chart, column, group_lines
from neuclip.report.compare_page import drawable, figures_csv, settings_table
from neuclip.report.contents import Figures, RunContents
from neuclip.report.measures import ERROR_KEY, MEAN_RECALL
from neuclip.report.page import Cell, Charts, Notes, Page, Section, Table, latex_table, markdown_table

FEWEST = 4  # variants for a correlation
BEST = (
    "Best of the variants that are no baselines, in the mean over seeds; the page of an experiment has the intervals."
)
OTHER_SCALE = "From the paper: other data, other models and a far larger scale; compare the order, not the values."


def experiment_page(
    experiment: Experiment,
    cases: Sequence[Case],
    extra: Sequence[Section],
    failed: Sequence[Section],
    tried: Mapping[str, Table],
    commands: Sequence[str],
    seconds: float,
) -> Page:
    facts = [f"{format_duration(seconds)} of one core"] if seconds else ["no run has finished yet"]
    sections = [
        Section("Question", [Notes([experiment.question, *experiment.notes])]),
        *([Section("Answer", [Notes(answers(cases), as_list=True)])] if cases or not extra else []),
        *extra,
        *(
            Section(case.name, [first, Charts(case.charts(experiment.across)), *others])
            for case in cases
            for first, *others in [case.tables()]
        ),
        *failed,
        *([Section("In the paper", [*map(paper_table, experiment.paper)])] if experiment.paper else []),
        *(Section(f"Tuning: {name}", [table], folded=True) for name, table in tried.items()),
        *(Section(f"Settings: {case.name}", [settings_table(case.groups)], folded=True) for case in cases),
        Section("Commands", [Notes(commands)], folded=True),
    ]
    return Page("experiment", experiment.title, facts, sections=sections)


def answers(cases: Sequence[Case]) -> list[str]:
    return [case.answer() for case in cases] or ["Not yet: run the commands below."]


def paper_table(table: Mapping[str, object]) -> Table:
    rows = [[str(cell) for cell in row] for row in table["rows"]]  # type: ignore[attr-defined]
    return Table(str(table["caption"]), list(table["head"]), rows, 1, [OTHER_SCALE])  # type: ignore[call-overload]


def tuning_tables(
    tried: Mapping[Choice, Sequence[tuple[Flat, Job]]], records: Records, metric: str
) -> dict[str, Table]:
    """For each case, the tries of each variant with their figures on held-out training pairs."""
    tables: dict[str, Table] = {}
    for (case, variant), candidates in tried.items():
        figures = [tuning_figure(records.get(job.key, {}), metric) for _, job in candidates]
        known = [figure for figure in figures if figure is not None]
        table = tables.setdefault(case, Table("", ["variant", "tried", "held-out figure"], [], 2))
        for (settings, _), figure in zip(candidates, figures, strict=True):
            text = ", ".join(f"{key} {value}" for key, value in settings.items())
            best = " (chosen)" if len(known) == len(figures) and figure == max(known) else ""
            table.rows.append([variant, text, f"{percent(figure)}{best}"])  # type: ignore[attr-defined]
    return tables


def figures_text(cases: Sequence[Case], end: str) -> str:
    """The final tables as Markdown or LaTeX, or CSV with a row per run and figure."""
    if end == ".csv":
        lines = [(case.name, line) for case in cases for line in figures_csv(case.comparison).splitlines()]
        head = [f"case,{line}" for _, line in lines[:1]]
        return "\n".join([*head, *(f'"{name}",{line}' for name, line in lines if line != lines[0][1])]) + "\n"
    write, title = (markdown_table, "## {}\n\n") if end == ".md" else (latex_table, "% {}\n")
    return "\n".join(title.format(case.name) + "\n".join(map(write, case.tables())) for case in cases)


def index_page(rows: Sequence[tuple[Experiment, Sequence[Case], float]]) -> Page:
    """All experiments with their questions, the best variant of each case, and which figures predict recall."""
    links = {experiment.name: Cell(experiment.name, link=f"{experiment.name}.html") for experiment, *_ in rows}
    questions: list[list[str | Cell]] = [
        [
            links[experiment.name],
            experiment.question,
            str(sum(case.finished for case in cases)) if experiment.kind == TRAIN else UNKNOWN,
            format_duration(seconds),
        ]
        for experiment, cases, seconds in rows
    ]
    best: list[list[str | Cell]] = [
        [links[experiment.name], case.name, case.best.name, *map(", ".join, found.values()), case.best_figure]
        for experiment, cases, _ in rows
        for case in cases
        if len(case.groups) > 1 and case.measure.better and (found := case.standing())
    ]
    tables = {
        "": Table("", ["experiment", "question", "runs", "time of one core"], questions, 2),
        "Answers": Table("", ["experiment", "case", "best variant", AHEAD, BEHIND, LEVEL, "figure"], best, 6, [BEST]),
        "What goes along with recall": predictors_table(
            [(experiment.title, case) for experiment, cases, _ in rows for case in cases]
        ),
    }
    sections = [Section(title, [table]) for title, table in tables.items() if table.rows]
    return Page("experiment", "All experiments", sections=sections)


def predictors_table(cases: Sequence[tuple[str, Case]]) -> Table:
    """The rank correlation of recall with other figures (means over seeds), over the variants of a case that estimate
    normalizers. A figure that some run lacks is left out."""
    figures: dict[str, Callable[[RunContents], float | None]] = {
        "normalizer error": lambda run: run.final.get(ERROR_KEY),
        "distance of the calibration from 1": lambda run: abs(math.log(run.calibration or 1.0)),
        "spread of the weights": lambda run: run.number("weight_deviation"),
        "τ": lambda run: run.number("temperature"),
    }
    rows = []
    for title, case in cases:
        groups = [group for group in case.groups if all(run.calibration for run in group.runs)]
        if case.measure.metric != MEAN_RECALL or len(groups) < FEWEST:
            continue
        recall, cells = [fmean(group.values(case.measure)) for group in groups], []
        for read in figures.values():
            found = [[read(run) for run in group.runs] for group in groups]
            known = [[value for value in own if value is not None] for own in found]
            whole = found == known
            cells.append(f"{rank_correlation(recall, [fmean(own) for own in known]):+.2f}" if whole else UNKNOWN)
        rows.append([title, case.name, str(len(groups)), *cells])
    head = ["experiment", "case", "variants", *figures]
    note = "Spearman's rank correlation with recall@1: −1 where the smallest value goes along with the best recall."
    return Table("", head, rows, 2, [note])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 if all values of one side are equal.

    >>> rank_correlation([1.0, 2.0, 4.0], [9.0, 5.0, 1.0])
    -1.0
    """
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return correlation(*ranks) if all(len(set(own)) > 1 for own in ranks) else 0.0


# --- Jobs of other kinds, whose lines have keys NAME.METRIC -----------------------------------------------------------


def plain_sections(jobs: Sequence[Job], records: Records, across: str) -> list[Section]:
    """For each case, a chart per metric over `across`, each seed thin and the mean thick, and a table of the means."""
    sections = []
    for case in dict.fromkeys(job.case for job in jobs):
        own = [records[job.key]["evaluations"] for job in jobs if job.case == case and is_finished(job, records)]
        names = dict.fromkeys(key.partition(".")[0] for lines in own for line in lines for key in line if "." in key)
        metrics = dict.fromkeys(key.partition(".")[2] for lines in own for line in lines for key in line if "." in key)
        charts = [
            Chart(
                title=metric.replace("_", " "),
                unit=metric.replace("_", " "),
                lines=group_lines({name: [column(lines, f"{name}.{metric}") for lines in own] for name in names}),
                across=across,
                log=True,
                dots=True,
            )
            for metric in metrics
        ]
        if own:
            table = moments_table(own, list(names), list(metrics), across)
            sections.append(Section(case, [Charts(drawable(charts)), table]))
    return sections


def failures(jobs: Sequence[Job], records: Records) -> list[Section]:
    """A table of the failed runs and their reasons, if there are any."""
    failed = [job for job in jobs if job.key in records and not is_finished(job, records)]
    if not failed:
        return []
    rows = [[job.case, job.variant, str(job.seed), records[job.key]["error"]] for job in failed]
    note = "They are left out above; --retry runs them again."
    return [Section("Failed runs", [Table("", ["case", "variant", "seed", "reason"], rows, 4, [note])])]


def moments_table(own: Sequence[Sequence[Figures]], names: Sequence[str], metrics: Sequence[str], across: str) -> Table:
    rows: list[list[str]] = []
    for samples in dict.fromkeys(line["samples"] for lines in own for line in lines):
        at = [line for lines in own for line in lines if line["samples"] == samples]
        for name in names:
            values = [[line[key] for line in at if (key := f"{name}.{metric}") in line] for metric in metrics]
            if any(values):
                cells = (format_number(fmean(found)) if found else UNKNOWN for found in values)
                rows.append([name, f"{samples:,.0f}", *cells])
    head = ["", across, *(metric.replace("_", " ") for metric in metrics)]
    return Table("", head, rows, 1, [f"Means over {plural(len(own), 'seed')}."])
