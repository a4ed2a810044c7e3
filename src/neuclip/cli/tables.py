"""Results as aligned columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neuclip.formatting import format_count, format_number, percent
from neuclip.report.evaluations import CANDIDATES, parse_evaluation

SHARES = ("recall", "chance", "top1", "top5", "mean_per_class", "accuracy", "largest_class")  # written as percent


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell: the first to the left, the others to the right."""
    columns = max((len(row) for row in rows), default=0)
    padded = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in padded) for column in range(columns)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in padded
    ]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def figures_table(figures: Mapping[str, Any]) -> str:
    """An evaluation's flat keys, `DATASET.METRIC`, by data set; beside each figure is what to judge it by, and below
    when a query is right."""
    rows: list[list[str]] = []
    dataset = None
    sets = parse_evaluation(figures).retrieval
    captions = {held_out.name: held_out.captions_per_image for held_out in sets}
    for key, value in figures.items():
        name, _, metric = key.rpartition(".")
        if "chance" in metric or metric == "largest_class" or (metric == "skipped" and not value):
            continue
        if name != dataset:
            rows.append([name])
            dataset = name
        beside = captions[name] if metric == "captions" else standard_of(name, metric, figures)
        rows.append([f"  {metric.replace('_', ' ')}", as_figure(metric, value), beside])
    definitions = dict.fromkeys(text for held_out in sets for text in held_out.definitions)
    return aligned(rows) + "".join(f"recall at k: {text}\n" for text in definitions)


def standard_of(dataset: str, metric: str, figures: Mapping[str, Any]) -> str:
    """Recall has a chance of its own for each k, classification one for all its accuracies, a rank its candidates."""

    def beside(words: str, key: str) -> str:
        value = figures.get(f"{dataset}.{key}")
        return "" if value is None else words.format(as_figure(key, value))

    if "recall" in metric:
        return beside("chance {}", metric.replace("recall", "chance"))
    if metric.endswith("_median_rank"):
        candidates = CANDIDATES[metric.removesuffix("_median_rank")]
        return beside(f"of {{}} {candidates}", candidates.replace(" ", "_"))
    of_task = {"chance": ("top1", "mean_per_class"), "largest_class": ("top1",)}
    parts = [beside(f"{key.replace('_', ' ')} {{}}", key) for key, metrics in of_task.items() if metric in metrics]
    return ", ".join(filter(None, parts))


def as_figure(metric: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, float) and any(share in metric for share in SHARES):
        return percent(value)
    return format_count(value) if isinstance(value, int) else format_number(value)
