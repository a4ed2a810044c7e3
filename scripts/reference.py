"""Writes docs/reference.md: every public name with its signature, and every command with its help and settings.

    python scripts/reference.py            # writes the page
    python scripts/reference.py --check    # exit code 1 if the page is not up to date

The page is also a record of the public interface: if it changes, the interface changes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
from pathlib import Path

import neuclip
from neuclip.cli.main import COMMANDS, main

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
HEAD = """# Reference

Made by `python scripts/reference.py` from signatures and docstrings.

## Python

"""


def python_names() -> str:
    entries = []
    for name in neuclip.__all__:
        thing = getattr(neuclip, name)
        if not callable(thing):
            continue
        about = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
        parameters = [str(one).replace("'", "") for one in inspect.signature(thing).parameters.values()]
        entries.append(f"**`{name}({', '.join(parameters)})`**  \n{about}\n")
    return "\n".join(entries)


def help_of(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([*command.split(), "--help"])
    return f"## neuclip {command}\n\n```text\n{printed.getvalue().strip()}\n```\n"


def page() -> str:
    os.environ["COLUMNS"] = "120"
    return HEAD + python_names() + "\n" + "\n".join(help_of(command) for command in COMMANDS)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
