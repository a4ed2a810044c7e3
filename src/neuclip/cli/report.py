"""`neuclip report`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from neuclip.cli.flags import Command
from neuclip.cli.runs import find_run

COMMAND = Command(
    usage="report RUN...",
    about="""Writes report.html into each run's folder and prints its path: one file with all curves and figures.
It reads only the run's records and also works while the run is training.""",
    flags=(),
    examples=("neuclip report runs/first", "neuclip report runs/first runs/second"),
    most=sys.maxsize,
)


def run(arguments: Sequence[str]) -> int:
    names, _ = COMMAND.parse(arguments)
    folders = [find_run(name) for name in names]
    from neuclip.report.run_report import write_report

    for folder in folders:
        print(write_report(folder))
    return 0
