"""Results as aligned columns, or as JSON, on stdout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from neuclip.formatting import format_count, format_number, percent
from neuclip.records import strict
from neuclip.report.measures import evaluation_tables
from neuclip.report.page import text_table

SHARES = ("recall", "chance", "top1", "top5", "mean_per_class", "accuracy", "largest_class")  # written as percent


def print_json(value: Any) -> None:
    print(json.dumps(strict(value), indent=2, allow_nan=False))


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
    """The tables of an evaluation, with what to judge it by below them."""
    parts = [[table.caption, text_table(table).rstrip(), *table.notes] for table in evaluation_tables(figures)]
    return "\n".join("".join(f"{line}\n" for line in part if line) for part in parts)


def nested_table(values: Mapping[str, Any]) -> str:
    """Rows of numbers under common headings, then the numbers that belong to no row."""
    groups = {name: group for name, group in values.items() if isinstance(group, Mapping)}
    headings = list(dict.fromkeys(heading for group in groups.values() for heading in group))
    rows = [["", *headings]] if groups else []
    rows += [
        [name, *[as_figure(heading, group.get(heading)) for heading in headings]] for name, group in groups.items()
    ]
    alone = [[name.replace("_", " "), as_figure(name, value)] for name, value in values.items() if name not in groups]
    return "\n".join(table for table in (aligned(rows), aligned(alone)) if table)


def as_figure(metric: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, float) and any(share in metric for share in SHARES):
        return percent(value)
    return format_count(value) if isinstance(value, int) else format_number(value)
