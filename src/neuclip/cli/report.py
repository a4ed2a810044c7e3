"""`neuclip report`, `neuclip compare`"""

from __future__ import annotations

import sys
from pathlib import Path

from neuclip.cli.command import find_run, print_json


def report(run: str, *runs: str) -> int:
    """neuclip report RUN...

    Writes report.html into each run's folder and prints its path. The report is one self-contained file with all
    curves and figures. It is made from the run's records alone, and can be written while the run is training.

    neuclip report runs/first
    neuclip report runs/first runs/second
    """
    folders = [find_run(name) for name in (run, *runs)]
    from neuclip.report.run_report import write_report

    for folder in folders:
        print(write_report(folder))
    return 0


def compare(
    run: str,
    *runs: str,
    output: tuple[str, ...] = ("compare.html",),
    against: str = "",
    measure: str = "",
    json: bool = False,
) -> int:
    """neuclip compare RUN|RESULT... [--output FILE,...] [--against GROUP] [--measure DATASET.METRIC]

    Writes one self-contained HTML page that shows runs side by side, and prints their final figures. Runs that differ
    only in run.seed form one group. The page has curves over samples, means and standard deviations over seeds, the
    settings that differ, and the difference between each group and one of them: the mean over the seeds that both have,
    with its 95 % interval.
    RESULT is a file of task results (JSON lines), written by neuclip eval or by DataComp. The task results in a run's
    folder (tasks.jsonl) are read with the run. Runs that are still training can be compared, too.

    --output: files to write; the suffix chooses the format: .html the page, .md or .tex the table of final figures,
        .csv one row per run and figure
    --against: group that the others are compared with; default: the first
    --measure: figure that you chose before training, such as new.image_to_text_recall_at_1; its differences get a
        verdict, and no others are bold

    neuclip compare runs/clip-* runs/neuclip-*
    neuclip compare runs/neuclip ViT-B-32.jsonl --output compare.html,table.tex,figures.csv
    """
    paths = [Path(name) if Path(name).is_file() else find_run(name).path for name in (run, *runs)]
    from neuclip.report import compare as comparing
    from neuclip.report import compare_page as page
    from neuclip.report.page import text_table

    files = [Path(name) for name in output]
    for path in files:
        page.writer_of(path)  # raises for an unknown suffix before any run is read
    comparison = comparing.compare(paths, against=against, measure=measure)
    for path in files:
        page.write_comparison(comparison, path)
    for notice in comparison.notices():
        print(notice, file=sys.stderr)
    if json:
        return print_json(page.comparison_figures(comparison))
    print(text_table(page.final_table(comparison), notes=True))
    for sentence in (*page.verdicts(comparison), *files):
        print(sentence)
    return 0
