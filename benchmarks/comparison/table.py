"""Finished runs as Markdown: what tuning tried, every final run, means over seeds, and what may explain the recall."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.plan import ERROR_POINTS, SETTINGS, PlannedRun, Setting, held_out_recall
from neuclip.records import read_lines

ABSENT = "-"
RECALLS = {
    "i→t R@1": "image_to_text_recall_at_1",
    "t→i R@1": "text_to_image_recall_at_1",
    "i→t R@10": "image_to_text_recall_at_10",
    "t→i R@10": "text_to_image_recall_at_10",
}
# Of the records' last quarter. Medians: an equal caption in a batch sends a single record far up.
DIAGNOSTICS = {
    "accuracy in batch": "accuracy",
    "calibration": "calibration",
    "log ratio, deviation": "log_ratio_deviation",
    "spread of weights": "weight_deviation",
    "share at eps": "share_at_eps",
    "gradient norm": "gradient_norm",
}
Figures = dict[str, float | None]  # by column, in the order of the columns
Measured = list[tuple[PlannedRun, dict[str, Figures]]]  # of each run its figures by table


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def tuning_table(runs: Sequence[PlannedRun], root: Path, selection: str) -> str:
    """What was tried for each method, with what it reached; the best of each setting and method in bold."""
    done = {run.name: held_out_recall(run, root) for run in runs if run.is_done(root)}
    best: dict[tuple[str, str], float] = {}
    for run in runs:
        key = (run.setting.name, run.method.name)
        best[key] = max(best.get(key, 0.0), done.get(run.name, 0.0))
    rows = []
    for run in sorted(runs, key=lambda run: (run.setting.name, METHODS.index(run.method), run.choice)):
        if run.name not in done:
            continue
        reached = f"{100 * done[run.name]:.2f}"
        is_best = done[run.name] == best[run.setting.name, run.method.name]
        tried = ", ".join(f"{key} {value}" for key, value in run.method.tried[run.choice].items())
        rows.append([run.setting.name, run.method.name, tried, f"**{reached}**" if is_best else reached])
    return f"## Tuning\n\nHeld-out figure: {selection}.\n\n" + markdown(
        ["setting", "method", "tried", "held-out %"], rows
    )


def final_tables(runs: Sequence[PlannedRun], root: Path) -> str:
    finished = [run for run in runs if run.is_done(root)]
    parts = []
    for setting in SETTINGS:
        measured = [(run, figures_of(run, root)) for run in finished if run.setting == setting]
        if measured:
            parts.append(setting_tables(setting, measured))
    return "\n".join(parts)


def setting_tables(setting: Setting, measured: Measured) -> str:
    text = f"## {setting.name}\n"
    for title in ("results", "normalizer error over training", "diagnostics"):
        columns = list(dict.fromkeys(column for _, figures in measured for column in figures[title]))
        rows = [
            [run.method.name, str(run.seed), *(shown(figures[title].get(column)) for column in columns)]
            for run, figures in measured
        ]
        rows.sort(key=lambda row: ([method.name for method in METHODS].index(row[0]), row[1]))
        means = mean_rows(measured, title, columns)
        head = ["method", "seed", *columns]
        text += f"\n### {setting.name}: {title}, mean over seeds\n\n{markdown(head, means)}"
        text += f"\n### {setting.name}: {title}, every run\n\n{markdown(head, rows)}"
    return text


def mean_rows(measured: Measured, title: str, columns: Sequence[str]) -> list[list[str]]:
    rows = []
    for method in METHODS:
        rows_of_method = [figures[title] for run, figures in measured if run.method is method]
        if not rows_of_method:
            continue
        known = {c: [value for one in rows_of_method if (value := one.get(c)) is not None] for c in columns}
        cells = [shown(mean(values)) if values else ABSENT for values in known.values()]
        rows.append([f"**{method.name}**", f"mean of {len(rows_of_method)}", *cells])
    return rows


def figures_of(run: PlannedRun, root: Path) -> dict[str, Figures]:
    """All columns of one finished run, by table."""
    folder = run.folder(root)
    summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    return {
        "results": results(run, summary),
        "normalizer error over training": errors(run, summary, read_lines(folder.evaluation)),
        "diagnostics": diagnostics(read_lines(folder.records)),
    }


def results(run: PlannedRun, summary: dict[str, Any]) -> Figures:
    """Recalls in percent, of the first test part under their own names."""
    figures: Figures = {}
    for part in run.setting.tests:
        prefix = "" if part == run.setting.tests[0] else f"{part} "
        for column, metric in RECALLS.items():
            values = [v for key, v in summary["evaluation"].items() if key.endswith(f"/{part}.{metric}")]
            figures[prefix + column] = 100 * values[0] if values else None
    return figures | {"tau": summary["temperature"], "seconds": summary["seconds"]}


def errors(run: PlannedRun, summary: dict[str, Any], evaluations: Sequence[dict[str, Any]]) -> Figures:
    """Squared error of the log-normalizer, the method's and a mini-batch's, at each point of training."""
    last = summary.get("normalizer_error", {}).get("estimators", {})
    figures: Figures = {}
    for name in ("method", "minibatch"):
        for point in range(1, ERROR_POINTS):
            samples = run.setting.samples * point // ERROR_POINTS
            at = [line.get(f"normalizer_error.{name}") for line in evaluations if line["samples"] == samples]
            figures[f"{name} at {point}/{ERROR_POINTS}"] = at[0] if at else None
        figures[f"{name} at the end"] = last.get(name, {}).get("mean")
    return figures


def diagnostics(records: Sequence[dict[str, Any]]) -> Figures:
    last_quarter = records[-max(1, len(records) // 4) :]
    figures: Figures = {}
    for column, key in DIAGNOSTICS.items():
        values = [record[key] for record in last_quarter if record.get(key) is not None]
        figures[column] = median(values) if values else None
    quarters = [records[len(records) * place // ERROR_POINTS - 1] for place in range(1, ERROR_POINTS + 1)]
    tau = {f"tau at {place}/{ERROR_POINTS}": one["temperature"] for place, one in enumerate(quarters, start=1)}
    return tau | figures


def shown(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"
