"""Results as aligned columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neuclip.report.measures import evaluation_tables
from neuclip.report.page import text_table


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
