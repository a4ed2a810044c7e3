"""`python -m neuclip.experiments KIND SETTINGS FOLDER`: a job that is not `neuclip train`, in a process of its own."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from neuclip.cli.main import exit_code_of, set_environment
from neuclip.records import RunFolder, write_lines


def main(kind: str, settings: str, folder: str) -> int:
    run = import_module(f"neuclip.experiments.{kind}").run
    write_lines(RunFolder(folder).evaluation, run(json.loads(settings), Path(folder)))
    return 0


if __name__ == "__main__":
    set_environment()
    sys.exit(exit_code_of(lambda: main(*sys.argv[1:])))
