"""`neuclip eval`"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.runs import runs_beside
from neuclip.cli.tables import figures_table, print_json
from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.runs.summary import held_out_skipped
from neuclip.settings.fields import check_at_least
from neuclip.settings.sections import RunSettings

COLUMNS = {
    "image_column": "tables: column of images or their paths",
    "caption_column": "tables: columns of captions",
    "caption_key": "shards: key of the captions in json members",
}

COMMAND = Command(
    usage="eval RUN|CHECKPOINT|MODEL [--retrieval DATA,...] [--zero-shot FOLDER,...]",
    about="""Measures retrieval (recall@k, in both directions) and zero-shot accuracy, with chance beside each figure.
Give the folder of a run, one of its checkpoints, or a saved open_clip model (local-dir:FOLDER).""",
    flags=(
        Flag("retrieval", tuple[str, ...], "held-out pairs, or none [default: as in the run]"),
        Flag("zero-shot", tuple[str, ...], "classification data sets, or none [default: as in the run]"),
        Flag("batch-size", int, "images per forward pass [default: as in the run]"),
        Flag(
            "max-bad-share",
            float,
            "skip data sets with a larger share of bad samples [default: as in the run]",
        ),
        *(Flag(f"evaluation.{name}", str, f"{what} [default: as in the run]") for name, what in COLUMNS.items()),
        JSON,
    ),
    examples=(
        "neuclip eval runs/first",
        "neuclip eval runs/first --retrieval 'shards/{00020..00021}.tar' --zero-shot none --json",
    ),
)


def run(arguments: Sequence[str]) -> int:
    (target,), values = COMMAND.parse(arguments)
    check_target(target)
    if "batch_size" in values:
        check_at_least("--batch-size", values["batch_size"], 1, "256 fits almost anywhere")
    if not 0 <= values.get("max_bad_share", 0) <= 1:
        raise UserError(f"--max-bad-share is {values['max_bad_share']}; give a share from 0 to 1")
    as_json = values.pop(JSON.name, False)
    from neuclip import api

    measured = api.measure(target, **{name.removeprefix("evaluation."): value for name, value in values.items()})
    if as_json:
        print_json(measured.figures)
    else:
        print(figures_table(measured.figures), end="")
        for name, text in held_out_skipped(measured.figures, measured.skipped).items():
            print(f"{name}: {text}")
    measured.raise_refused()
    return 0


def check_target(target: str) -> None:
    """A path must exist; a bare word may be the name of a model, which only open_clip knows."""
    is_path = os.sep in target and ":" not in target  # local-dir:/a/b is a model
    is_run_elsewhere = RunFolder(Path(RunSettings.folder) / target).settings.is_file()
    if (is_path or is_run_elsewhere) and not Path(target).exists():
        raise UserError(f"no run or checkpoint at {target}; {runs_beside(Path(target))}")
