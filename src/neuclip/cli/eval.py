"""`neuclip eval`"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from neuclip.cli.flags import JSON, Command, Flag, wants_help
from neuclip.cli.runs import runs_beside
from neuclip.cli.tables import figures_table, print_json
from neuclip.errors import AskedWrongly
from neuclip.records import RunFolder
from neuclip.settings.fields import check_at_least
from neuclip.settings.sections import RunSettings

COMMAND = Command(
    usage="eval RUN|CHECKPOINT|MODEL [--retrieval DATA,...] [--zero-shot FOLDER,...]",
    about="""Measures retrieval (recall at k, both ways) and zero-shot classification, with chance beside each figure.
It takes the folder of a run, one of its checkpoints, or a saved open_clip model (local-dir:FOLDER).""",
    flags=(
        Flag("retrieval", tuple[str, ...], "held-out pairs, or none [default: those of the run's settings]"),
        Flag("zero-shot", tuple[str, ...], "classification sets, or none [default: those of the run's settings]"),
        Flag("batch-size", int, "pictures per forward pass [default: that of the run's settings]"),
        JSON,
    ),
    examples=(
        "neuclip eval runs/first",
        "neuclip eval runs/first --retrieval 'shards/{00020..00021}.tar' --zero-shot none --json",
    ),
)


def run(arguments: Sequence[str]) -> int:
    if wants_help(arguments):
        print(COMMAND.help(), end="")
        return 0
    (target,), values = COMMAND.parse(arguments)
    check_target(target)
    if "batch_size" in values:
        check_at_least("--batch-size", values["batch_size"], 1, "256 fits almost anywhere")
    as_json = values.pop(JSON.name, False)
    from neuclip import api

    figures = api.evaluate(target, **values)
    if as_json:
        print_json(figures)
    else:
        print(figures_table(figures), end="")
    return 0


def check_target(target: str) -> None:
    """A path must exist; a bare word may be a model's name, which only open_clip can tell."""
    is_path = os.sep in target and ":" not in target  # local-dir:/a/b is a model's name
    is_run_elsewhere = RunFolder(Path(RunSettings.folder) / target).settings.is_file()
    if (is_path or is_run_elsewhere) and not Path(target).exists():
        raise AskedWrongly(f"no run or checkpoint at {target}; {runs_beside(Path(target))}")
