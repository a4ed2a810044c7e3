"""`neuclip report`, `neuclip compare`"""

from __future__ import annotations

import sys
from pathlib import Path

from neuclip.cli.command import find_run, print_json
from neuclip.cli.tables import aligned


def report(run: str, *runs: str) -> int:
    """neuclip report RUN...

    Writes report.html into each run's folder and prints its path: one file with all curves and figures.
    It reads only the run's records and also works while the run is training.

    neuclip report runs/first
    neuclip report runs/first runs/second
    """
    folders = [find_run(name) for name in (run, *runs)]
    from neuclip.report.page import write_report

    for folder in folders:
        print(write_report(folder))
    return 0


def compare(run: str, *runs: str, output: tuple[str, ...] = ("compare.html",), json: bool = False) -> int:
    """neuclip compare RUN|RESULT... [--output FILE,...]

    Writes one self-contained HTML page with runs side by side, and prints their final figures. On the page:
    curves over samples, mean and standard deviation over seeds, samples needed to reach another's score, settings that
    differ.
    Runs that differ only in run.seed are one group. RESULT is a file of task results (JSON lines), also DataComp's own;
    those of a run (tasks.jsonl in its folder) are read with it. Runs that are still training can be compared too.

    --output: files to write, by the end of their names: .html page, .md the page's tables, .tex main figures, .csv one
        row per run and figure

    neuclip compare runs/clip-* runs/neuclip-*
    neuclip compare runs/neuclip ViT-B-32.jsonl --output compare.html,table.tex,figures.csv
    """
    paths = [Path(name) if Path(name).is_file() else find_run(name).path for name in (run, *runs)]
    from neuclip.report import compare as comparing
    from neuclip.report.compare_tables import BEST_RULE, PLAIN

    files = [Path(name) for name in output]
    for path in files:
        comparing.renderer_of(path)  # refused before anything is read
    comparison = comparing.compare(paths)
    for path in files:
        comparing.write_comparison(comparison, path)
    for notice in comparison.notices:
        print(notice, file=sys.stderr)
    if json:
        return print_json(comparing.comparison_as_dict(comparison))
    for table in comparing.main_tables(comparison, PLAIN):
        print(aligned([[" ".join(row[:2]), *row[2:]] for row in [table.head, *table.rows]]))
    if any(score.best is not None for score in comparison.scores):
        print(f"* {BEST_RULE}")
    for path in files:
        print(path)
    return 0
