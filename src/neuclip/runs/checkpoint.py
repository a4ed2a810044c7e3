"""Everything a resumed run needs, in one file that appears whole or not at all and is checked before it is used."""

from __future__ import annotations

import errno
import shutil
import sys
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from neuclip.errors import RunFailed, UserError
from neuclip.files import new_file
from neuclip.formatting import byte_size
from neuclip.records import RunFolder


def checkpoint_name(samples: int) -> str:
    return f"samples-{samples:012d}.pt"


def samples_at(checkpoint: Path) -> int:
    """Samples seen, from the name."""
    return int(checkpoint.stem.removeprefix("samples-"))


def checkpoints_in(folder: Path) -> list[Path]:
    """Oldest first. Files that a kill left half written have another suffix and are not among them."""
    return sorted(folder.glob("samples-*.pt"))


def find_checkpoint(folder: RunFolder, name: str = "") -> Path:
    """The checkpoint of a run by its file name; without a name the newest that is not damaged."""
    known = checkpoints_in(folder.checkpoints)
    if not name:
        if not known:
            raise UserError(f"{folder.path} has no checkpoint; train it first: neuclip train --resume {folder.path}")
        return newest_whole(known)
    path = folder.checkpoints / name
    if not path.is_file():
        names = ", ".join(other.name for other in known) or "none"
        raise UserError(f"{folder.path} has no checkpoint {name}; it has {names}")
    return path


def newest_whole(checkpoints: list[Path]) -> Path:
    """The last one that is not damaged; those after it are named on stderr."""
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoints):
        reason = damage(path)
        if not reason:
            for other, why in damaged.items():
                print(f"{other} is damaged ({why}); using {path.name}, the one before", file=sys.stderr)
            return path
        damaged[path] = reason
    path, reason = next(iter(damaged.items()))
    raise RunFailed(f"{path} is damaged ({reason}), and there is no earlier one; restore it, or start a new run")


def set_aside_damaged(folder: RunFolder) -> None:
    """Before a run continues: damaged checkpoints are renamed, or they would count among those to keep."""
    checkpoints = checkpoints_in(folder.checkpoints)
    good = newest_whole(checkpoints) if checkpoints else None
    for path in checkpoints:
        if good and path > good:
            path.rename(path.with_suffix(".damaged"))


def save_checkpoint(
    folder: Path, state: dict[str, Any], *, samples: int, keep: int, milestones: Collection[int] = ()
) -> Path:
    """Write beside, then move into place; old ones are removed only after the new one is safe: all but the last `keep`
    and those of `milestones`, which are numbers of samples."""
    target, free = folder / checkpoint_name(samples), 0
    try:
        with new_file(target) as file:
            try:
                torch.save(state, file)
            finally:
                free = shutil.disk_usage(folder).free  # with the unfinished file still there
    except (OSError, RuntimeError) as error:  # torch reports a full disk as either
        good = checkpoints_in(folder)
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier checkpoint"
        raise RunFailed(
            f"could not save {target}: {_reason(error, free, tensor_bytes(state))}; {kept}; make room, then: "
            f"neuclip train --resume {folder.parent}"
        ) from error
    lasting = {checkpoint_name(milestone) for milestone in milestones}
    for old in checkpoints_in(folder)[:-keep]:
        if old.name not in lasting:
            old.unlink()
    return target


def _reason(error: Exception, free: int, needed: int) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left" in str(error) or free < needed // 100:
        return f"the disk is full ({byte_size(needed)} needed, {byte_size(free)} free)"
    return str(error).splitlines()[0]


def tensor_bytes(state: Any) -> int:
    """Of all tensors in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    items = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(tensor_bytes, items))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Tensors and plain values only: nothing in the file can run code."""
    reason = damage(path)
    try:
        if not reason:
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is no checkpoint
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    earlier = [other for other in checkpoints_in(path.parent) if other < path]
    remedy = f"the one before it is {earlier[-1].name}" if earlier else "there is no earlier one"
    raise RunFailed(f"{path} is damaged ({reason}); {remedy}")


def damage(path: Path) -> str:
    """What is wrong with a file; "" if nothing. torch.save writes a zip file with a checksum of each tensor, and
    torch.load does not look at them: flipped bits would become weights."""
    try:
        with zipfile.ZipFile(path) as file:
            member = file.testzip()
    except Exception as error:  # zipfile raises many kinds for a damaged file
        return str(error) or type(error).__name__
    return f"the checksum of {member} differs" if member else ""
