"""`neuclip train`"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from neuclip.cli.flags import JSON, Command, Flag, wants_help
from neuclip.cli.runs import find_run
from neuclip.cli.tables import print_json
from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.settings.help import help_text
from neuclip.settings.keys import SECTION_NAMES
from neuclip.settings.nearest import nearest
from neuclip.settings.reading import read_settings
from neuclip.settings.recipe import shipped_recipes
from neuclip.settings.sections import Settings

COMMAND = Command(
    usage="train [RECIPE] [--section.field value ...] | train --resume RUN",
    about=f"""Trains a model and leaves a run folder with records, checkpoints, the model for open_clip and a report.
RECIPE is a YAML file or a shipped one ({", ".join(shipped_recipes())}); without it: tiny. Flags overrule it.
On N processes, one per GPU or a share of the cores each: torchrun --nproc-per-node N -m neuclip train ...""",
    flags=(
        Flag("resume", str, "continue this run from its last checkpoint, with its own settings"),
        Flag("json", bool, "print the run's summary as JSON on stdout at the end; everything else goes to stderr"),
        Flag("help", str, f"this page, or one section of it: {', '.join(SECTION_NAMES)}"),
    ),
    examples=(
        "neuclip train --objective clip --train.samples 20k --run.name first",
        "neuclip train tiny --data.train 'shards/{00000..00019}.tar' --model.name ViT-B-32 --train.batch_size 512",
    ),
    fewest=0,
)


def run(arguments: Sequence[str]) -> int:
    if wants_help(arguments):
        named = [argument for argument in arguments if argument in SECTION_NAMES]
        print(help_text(named) if named else COMMAND.help(help_text()), end="")
        return 0
    settings, resume, as_json = asked_run(arguments)
    from neuclip import api

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        folder = RunFolder(api.train(settings, resume=resume))
    if as_json and os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print_json(json.loads(folder.summary.read_text(encoding="utf-8")))
    return 0


def asked_run(arguments: Sequence[str]) -> tuple[Settings, Path | None, bool]:
    """The settings, the run to continue or None, and whether the result is wanted as JSON."""
    operands, values, flags = COMMAND.split(arguments)
    as_json = values.get(JSON.name, False)
    for name in (flag.removeprefix("--").partition("=")[0] for flag in flags):
        near = "" if "." in name else nearest(name, [flag.name for flag in COMMAND.flags])
        if near:
            raise UserError(f"no flag --{name}; did you mean --{near}?")
    if "resume" not in values:
        return read_settings(Path(operands[0]) if operands else None, flags), None, as_json
    if operands:
        raise UserError(f"--resume continues a run with its own settings; leave out the recipe {operands[0]!r}")
    folder = find_run(values["resume"])
    return read_settings(folder.settings, flags), folder.path, as_json
