"""`neuclip compare`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.runs import find_run
from neuclip.cli.tables import print_json

OUTPUT = "compare.html"

COMMAND = Command(
    usage="compare RUN|RESULT... [--output FILE,...]",
    about="""Writes one self-contained HTML page with runs side by side, and prints their final figures. On the page:
curves over samples, mean and standard deviation over seeds, differences to the first group over the seeds that both
have with their 95 % intervals, settings that differ.
Runs that differ only in run.seed are one group. RESULT is a file of task results (JSON lines), also DataComp's own;
those of a run (tasks.jsonl in its folder) are read with it. Runs that are still training can be compared too.""",
    flags=(
        Flag(
            "output",
            tuple[str, ...],
            f"files to write, by the end of their names: .html page, .md and .tex the final figures, "
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
    from neuclip.report.compare import compare
    from neuclip.report.compare_page import comparison_figures, final_table, write_comparison, writer_of
    from neuclip.report.page import text_table

    outputs = [Path(name) for name in flags.get("output", (OUTPUT,))]
    for path in outputs:
        writer_of(path)  # refused before anything is read
    comparison = compare(paths)
    for path in outputs:
        write_comparison(comparison, path)
    for notice in comparison.notices():
        print(notice, file=sys.stderr)
    if flags.get(JSON.name):
        print_json(comparison_figures(comparison))
        return 0
    print(text_table(final_table(comparison), notes=True))
    for path in outputs:
        print(path)
    return 0
