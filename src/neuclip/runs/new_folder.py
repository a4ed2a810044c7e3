"""A folder that others will load: it appears whole, in one move, or not at all, and replaces nothing."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from neuclip.errors import UserError
from neuclip.records import RunFolder


def result_folder(target: str, given: str, name: str) -> Path:
    """Where a command writes: the folder that was given, or `name` in the folder of the run."""
    if given:
        return Path(given)
    if RunFolder(target).settings.is_file():
        return Path(target) / name
    raise UserError(f"{target} is not the folder of a run; say where to write, as the last argument")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes `path` at the end; what an error leaves is removed."""
    refuse_existing(path)
    partial = path.parent / f".{uuid.uuid4().hex}.partial"
    partial.mkdir(parents=True)
    try:
        yield partial
        refuse_existing(path)  # another process was faster
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(path: Path) -> None:
    if RunFolder(path).is_taken:
        raise UserError(f"{path} exists; give another folder as the last argument, or remove it")
