"""Finds the run a user named, or proposes the one that was probably meant."""

from __future__ import annotations

from pathlib import Path

from neuclip.errors import UserError, nearest
from neuclip.records import RunFolder
from neuclip.settings.sections import RunSettings


def find_run(name: str) -> RunFolder:
    """The run at this path, or an error that names the nearest one."""
    path = Path(name)
    if RunFolder(path).settings.is_file():
        return RunFolder(path)
    if path.exists():
        raise UserError(f"{path} is not a run: it has no settings.yaml; {runs_beside(path)}")
    raise UserError(f"no run at {path}; {runs_beside(path)}")


def runs_beside(path: Path) -> str:
    """What to type instead: the run most like `path` in its folder or in the default folder."""
    for folder in dict.fromkeys([path.parent, Path(RunSettings.folder)]):
        runs = {run.parent.name: run.parent for run in sorted(folder.glob("*/settings.yaml"))}
        near = nearest(path.name, runs)
        if near:
            return f"did you mean {runs[near]}?"
        if runs:
            return f"{folder} holds {', '.join(runs)}"
    return "start one with: neuclip train"
