"""Everything a resumed run needs, in one file that appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from neuclip.errors import RunFailed


def checkpoint_name(samples: int) -> str:
    return f"samples-{samples:012d}.pt"


def checkpoints_in(folder: Path) -> list[Path]:
    """Oldest first. Files that a kill left half written have another ending and are not among them."""
    return sorted(folder.glob("samples-*.pt"))


def save_checkpoint(folder: Path, state: dict[str, Any], *, samples: int, keep: int) -> Path:
    """Write beside, then move into place; older ones go only after the new one is safe."""
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
        raise RunFailed(_not_saved(target, error)) from error
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


def latest_checkpoint(folder: Path) -> Path | None:
    found = checkpoints_in(folder)
    return found[-1] if found else None


def _not_saved(target: Path, error: Exception) -> str:
    good = latest_checkpoint(target.parent)
    kept = f"the last good checkpoint is {good}" if good else "there is no earlier checkpoint"
    reason = str(error).splitlines()[0]
    return f"could not save {target} ({reason}); {kept}; make room, then: neuclip train --resume {target.parent.parent}"
