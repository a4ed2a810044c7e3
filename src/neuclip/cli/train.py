"""`neuclip train`"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.runs import find_run
from neuclip.cli.tables import print_json
from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.settings.reading import SECTION_NAMES, read_settings, shipped_recipes
from neuclip.settings.sections import Settings
from neuclip.settings.writing import help_text

COMMAND = Command(
    usage="train [RECIPE] [--section.field value ...] | train --resume RUN",
    about=f"""Trains a model and writes a run folder: records, checkpoints, the model for open_clip and a report.
RECIPE is a YAML file or a shipped recipe ({", ".join(shipped_recipes())}) [default: tiny]. Flags override it.
On several GPUs, or with several ranks on the CPU: torchrun --nproc-per-node N -m neuclip train ...""",
    flags=(
        Flag("resume", str, "continue this run from its last checkpoint with its own settings"),
        Flag("json", bool, "print the run's summary as JSON on stdout at the end, everything else on stderr"),
        Flag("help", str, f"print this page, or one section of it: {', '.join(SECTION_NAMES)}"),
    ),
    examples=(
        "neuclip train --objective clip --train.samples 20k --run.name first",
        "neuclip train tiny --data.train 'shards/{00000..00019}.tar' --model.name ViT-B-32 --train.batch_size 512",
    ),
    fewest=0,
)


def help_page(arguments: Sequence[str]) -> str:
    """Of the sections that are named, or the whole page."""
    sections = [argument for argument in arguments if argument in SECTION_NAMES]
    return help_text(sections) if sections else COMMAND.help(help_text())


def run(arguments: Sequence[str]) -> int:
    settings, resume, as_json = parse_arguments(arguments)
    from neuclip import api

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        folder = RunFolder(api.train(settings, resume=resume))
    if as_json and os.environ.get("RANK", "0") == "0":  # of several ranks only one prints
        print_json(json.loads(folder.summary.read_text(encoding="utf-8")))
    return 0


def parse_arguments(arguments: Sequence[str]) -> tuple[Settings, Path | None, bool]:
    """The settings, the run to resume or None, and whether to print JSON."""
    operands, values, flags = COMMAND.split(arguments)
    as_json = values.get(JSON.name, False)
    if "resume" not in values:
        return read_settings(Path(operands[0]) if operands else None, flags), None, as_json
    if operands:
        raise UserError(f"--resume continues a run with its own settings; remove the recipe {operands[0]!r}")
    folder = find_run(values["resume"])
    return read_settings(folder.settings, flags), folder.path, as_json
