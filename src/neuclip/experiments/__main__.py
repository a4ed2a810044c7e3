"""`python -m neuclip.experiments KIND SETTINGS FOLDER`: a job that is not `neuclip train`, in a process of its own."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from neuclip.errors import RunFailed, UserError
from neuclip.records import RunFolder, write_lines


def main(kind: str, settings: str, folder: str) -> None:
    run = import_module(f"neuclip.experiments.{kind}").run
    write_lines(RunFolder(folder).evaluation, run(json.loads(settings), Path(folder)))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (UserError, RunFailed) as error:
        sys.exit(f"neuclip: {error}")  # one line, which the record keeps
