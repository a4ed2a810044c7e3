"""`neuclip compare`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.runs import find_run
from neuclip.cli.tables import aligned, print_json

OUTPUT = "compare.html"

COMMAND = Command(
    usage="compare RUN|RESULT... [--output FILE,...]",
    about="""Writes one self-contained HTML page with runs side by side, and prints their final figures. On the page:
curves over samples, mean and standard deviation over seeds, samples needed to reach another's score, settings that
differ.
Runs that differ only in run.seed are one group. RESULT is a file of task results (JSON lines), also DataComp's own;
those of a run (tasks.jsonl in its folder) are read with it. Runs that are still training can be compared too.""",
    flags=(
        Flag(
            "output",
            tuple[str, ...],
            f"files to write, by the end of their names: .html page, .md the page's tables, .tex main figures, "
            f".csv one row per run and figure [default: {OUTPUT}]",
        ),
        JSON,
    ),
    examples=(
        "neuclip compare runs/clip-* runs/neuclip-*",
        "neuclip compare runs/neuclip ViT-B-32.jsonl --output compare.html,table.tex,figures.csv",
    ),
    most=sys.maxsize,
)


def run(arguments: Sequence[str]) -> int:
    names, flags = COMMAND.parse(arguments)
    paths = [Path(name) if Path(name).is_file() else find_run(name).path for name in names]
    from neuclip.report.compare import compare, comparison_as_dict, main_tables, renderer_of, write_comparison
    from neuclip.report.compare_tables import BEST_RULE, PLAIN

    outputs = [Path(name) for name in flags.get("output", (OUTPUT,))]
    for path in outputs:
        renderer_of(path)  # refused before anything is read
    comparison = compare(paths)
    for path in outputs:
        write_comparison(comparison, path)
    for notice in comparison.notices:
        print(notice, file=sys.stderr)
    if flags.get(JSON.name):
        print_json(comparison_as_dict(comparison))
        return 0
    for table in main_tables(comparison, PLAIN):
        print(aligned([[" ".join(row[:2]), *row[2:]] for row in [table.head, *table.rows]]))
    if any(score.best is not None for score in comparison.scores):
        print(f"* {BEST_RULE}")
    for path in outputs:
        print(path)
    return 0
