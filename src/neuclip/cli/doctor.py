"""`neuclip doctor`"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.tables import print_json
from neuclip.errors import RunFailed, UserError
from neuclip.progress import waiting
from neuclip.settings.reading import read_settings, shipped_recipes
from neuclip.settings.sections import Settings

WIDTH = 120  # if the output is not a terminal

COMMAND = Command(
    usage="doctor DATA [RECIPE] [--section.field value ...]",
    about=f"""Reads some of the pairs and reports in seconds what training on them with these settings would do.
DATA is what --data.train accepts. RECIPE is a YAML file or a shipped recipe ({", ".join(shipped_recipes())}).
The default is tiny. Exits with 0 if training would start, with 1 if it would fail. Settings: neuclip train --help""",
    flags=(
        Flag("ranks", int, "number of ranks of the run [default: 1]", at_least=1),
        Flag("sample", int, "pairs to read and decode [default: 500, or as many as five seconds allow]", at_least=1),
        Flag("sheet", str, "where to write the contact sheet (PNG) [default: in a new temporary folder]"),
        JSON,
    ),
    examples=(
        "neuclip doctor icons-30k",
        "neuclip doctor 'shards/{00000..00019}.tar' tiny --train.batch_size 512 --ranks 8 --json",
    ),
    most=2,
)


def run(arguments: Sequence[str]) -> int:
    settings, values = parse_arguments(arguments)
    with waiting("loading torch"):
        from neuclip.doctor.diagnosis import examine
    from neuclip.doctor.contact_sheet import contact_sheet, draws_images, strip
    from neuclip.doctor.page import page_text
    from neuclip.runs.load import resolve_model

    findings, probe = examine(resolve_model(settings), ranks=values["ranks"], sample=values["sample"])
    if probe.shown:
        findings.note("sample", sheet=write_sheet(contact_sheet(probe.shown), values["sheet"]))
    if values[JSON.name]:
        print_json(findings.as_plain())
    else:
        width = shutil.get_terminal_size((WIDTH, 40)).columns
        if draws_images(sys.stdout):
            print(strip(probe.shown, width), end="")
        print(page_text(findings, width), end="")
    return 0 if findings.ready else 1


def parse_arguments(arguments: Sequence[str]) -> tuple[Settings, dict[str, Any]]:
    """The settings of the run, and the values of this command's own flags."""
    operands, own_flags, flags = COMMAND.split(arguments)
    values = {"ranks": 1, "sample": None, "sheet": "", JSON.name: False, **own_flags}
    if any(flag.startswith("--data.train=") for flag in flags):
        raise UserError("the data is given twice; remove --data.train")
    data, *recipe = operands
    return read_settings(Path(recipe[0]) if recipe else None, [*flags, f"--data.train={data}"]), values


def write_sheet(sheet: Any, place: str) -> str:
    """Where it was written: without `place` in a new folder of this user, which nobody else can have prepared."""
    from neuclip.files import new_file

    path = Path(place)
    try:
        path = Path(place or Path(tempfile.mkdtemp(prefix="neuclip-doctor-"), "contact_sheet.png"))
        if path.exists() and not path.is_file():
            raise RunFailed(f"{path} is not a file; give another --sheet")
        with new_file(path) as unfinished:  # moved to its place: a link there is replaced, not followed
            sheet.save(unfinished, "PNG")
    except OSError as error:
        raise RunFailed(f"cannot write {path} ({error.strerror or error}); give another --sheet") from error
    return str(path)
