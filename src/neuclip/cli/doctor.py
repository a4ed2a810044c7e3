"""`neuclip doctor`"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuclip.cli.flags import JSON, Command, Flag, unknown_flag, wants_help
from neuclip.cli.tables import print_json
from neuclip.errors import RunFailed, UserError
from neuclip.progress import waiting
from neuclip.settings.fields import check_at_least
from neuclip.settings.reading import read_settings
from neuclip.settings.recipe import shipped_recipes
from neuclip.settings.sections import Settings

WIDTH = 120  # where the output is no terminal

COMMAND = Command(
    usage="doctor DATA [RECIPE] [--section.field value ...]",
    about=f"""Looks at some of the pairs and tells what training with these settings would meet, in seconds.
DATA is what --data.train takes, RECIPE a YAML file or a shipped one ({", ".join(shipped_recipes())}); without it: tiny.
Exits with 0 when training would start, with 1 when it would fail. Settings: neuclip train --help""",
    flags=(
        Flag("ranks", int, "processes that the run will have [default: 1]"),
        Flag("sample", int, "pairs to read and decode [default: 500, or what five seconds allow]"),
        Flag("sheet", str, "where to write the contact sheet (PNG) [default: in the system's folder for such files]"),
        JSON,
    ),
    examples=(
        "neuclip doctor icons-30k",
        "neuclip doctor 'shards/{00000..00019}.tar' tiny --train.batch_size 512 --ranks 8 --json",
    ),
    most=2,
)


def run(arguments: Sequence[str]) -> int:
    if wants_help(arguments):
        print(COMMAND.help(), end="")
        return 0
    settings, values = asked_examination(arguments)
    with waiting("loading torch"):
        from neuclip.doctor.diagnosis import examine
    from neuclip.doctor.contact_sheet import contact_sheet, draws_images, strip
    from neuclip.doctor.page import page_text

    findings, look = examine(settings, ranks=values["ranks"], sample=values["sample"])
    if look.shown:
        sheet = write_sheet(contact_sheet(look.shown), values["sheet"], findings["data.name"])
        findings.note("sample", sheet=sheet)
    if values[JSON.name]:
        print_json(findings.as_plain())
    else:
        width = shutil.get_terminal_size((WIDTH, 40)).columns
        if draws_images(sys.stdout):
            print(strip(look.shown, width), end="")
        print(page_text(findings, width), end="")
    return 0 if findings.ready else 1


def asked_examination(arguments: Sequence[str]) -> tuple[Settings, dict[str, Any]]:
    """The settings of the run in question, and this command's own flags."""
    operands, given, flags = COMMAND.take_apart(arguments)
    values = {"ranks": 1, "sample": None, "sheet": "", JSON.name: False, **given}
    check_at_least("--ranks", values["ranks"], 1, "the number of processes")
    if values["sample"] is not None:
        check_at_least("--sample", values["sample"], 1, "500 tell the most of it")
    for flag in flags:
        if flag.startswith("--data.train="):
            raise UserError("the data is named twice; leave out --data.train")
        if "." not in flag.partition("=")[0] and not flag.startswith("--objective"):
            raise UserError(unknown_flag(flag, [flag.name for flag in COMMAND.flags]))
    COMMAND.check_operands(operands)
    data, *recipe = operands
    return read_settings(Path(recipe[0]) if recipe else None, [*flags, f"--data.train={data}"]), values


def write_sheet(sheet: Any, asked: str, name: str) -> str:
    """Where it was written. A diagnosis leaves nothing in the working folder unless asked to."""
    path = Path(asked or sheets_folder() / f"{name.replace('/', '-')}.png")
    try:
        sheet.save(path, "PNG")
    except OSError as error:
        raise RunFailed(f"cannot write {path} ({error.strerror or error}); give another --sheet") from error
    return str(path)


def sheets_folder() -> Path:
    """One per user, so that the next sheet of the same data takes the place of the last."""
    folder = Path(tempfile.gettempdir()) / f"neuclip-doctor-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
