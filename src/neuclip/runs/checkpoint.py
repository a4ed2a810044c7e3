"""Everything a resumed run needs, in one file that appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from neuclip.errors import RunFailed, UserError
from neuclip.records import RunFolder


def checkpoint_name(samples: int) -> str:
    return f"samples-{samples:012d}.pt"


def checkpoints_in(folder: Path) -> list[Path]:
    """Oldest first. Files that a kill left half written have another suffix and are not among them."""
    return sorted(folder.glob("samples-*.pt"))


def find_checkpoint(folder: RunFolder, name: str = "") -> Path:
    """The checkpoint of a run by its file name; without a name the newest."""
    known = checkpoints_in(folder.checkpoints)
    if not name:
        if not known:
            raise UserError(f"{folder.path} has no checkpoint; start the run again under another name")
        return known[-1]
    path = folder.checkpoints / name
    if not path.is_file():
        names = ", ".join(other.name for other in known) or "none"
        raise UserError(f"{folder.path} has no checkpoint {name}; it has {names}")
    return path


def save_checkpoint(folder: Path, state: dict[str, Any], *, samples: int, keep: int) -> Path:
    """Write beside, then move into place; old ones are removed only after the new one is safe."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / checkpoint_name(samples)
    partial = target.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as either
        partial.unlink(missing_ok=True)
        good = checkpoints_in(folder)
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier checkpoint"
        raise RunFailed(
            f"could not save {target} ({str(error).splitlines()[0]}); {kept}; make room, then: "
            f"neuclip train --resume {folder.parent}"
        ) from error
    for old in checkpoints_in(folder)[:-keep]:
        old.unlink()
    return target


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: nothing in the file can run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        earlier = [other for other in checkpoints_in(path.parent) if other < path]
        remedy = f"move it away to continue from {earlier[-1].name}" if earlier else "there is no earlier one"
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunFailed(f"{path} cannot be read ({first_line}); {remedy}") from error
