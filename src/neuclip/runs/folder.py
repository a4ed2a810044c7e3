"""The folder of a run: created in one move, locked by the process that trains, found again to resume. Its checkpoints
are complete or do not exist."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch

from neuclip import files
from neuclip.errors import RunFailed, UserError
from neuclip.formatting import byte_size
from neuclip.records import REMEDY, RunFolder, write_json
from neuclip.secrets import holds_secret
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import RunSettings, Settings
from neuclip.settings.writing import settings_as_yaml

END_OF_YAML = "..."  # the last line of settings.yaml; if it is missing, the file was cut off

# --- The folder -----------------------------------------------------------------------------------------------------


def choose_folder(settings: Settings) -> Path:
    """The path of a new run: `run.name`, or by default date, objective and model, with a number if that exists. A run
    never overwrites another: UserError if the name exists, or if the parent folder cannot be written."""
    parent = Path(settings.run.folder)
    with files.writing(parent, "give another --run.folder"):
        Path(tempfile.mkdtemp(dir=files.existing_parent(parent))).rmdir()
    if settings.run.name:
        check_name(settings.run)
        path = parent / settings.run.name
        if files.is_taken(path):
            raise UserError(f"{path} exists; give another --run.name, or continue it: neuclip train --resume {path}")
        return path
    model = settings.model.name.removeprefix("local-dir:").rstrip("/").rpartition("/")[2].removesuffix(".json")
    stem = f"{datetime.now(tz=UTC).date().isoformat()}-{settings.objective_name}-{model}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(path for path in map(parent.joinpath, names) if not files.is_taken(path))


def check_name(run: RunSettings) -> None:
    if run.name in (".", "..") or Path(run.name).name != run.name:
        path = Path(run.folder) / run.name
        raise UserError(
            f"run.name {run.name} is a path; give --run.name {path.name.strip('.') or 'NAME'} and its folder as "
            f"--run.folder {path.parent}"
        )


def make_folder(settings: Settings, environment: Mapping[str, Any]) -> RunFolder:
    """Create the folder of a new run with its first files. Two processes never create the same folder, and after a kill
    it either does not exist or can be resumed."""
    while True:
        path = choose_folder(settings)
        try:
            with files.new_folder(path) as unfinished:
                folder = RunFolder(unfinished)
                write_settings(folder, settings)
                write_json(folder.environment, environment)
                write_json(folder.lock, this_process())
            return RunFolder(path)
        except UserError:
            if not files.is_taken(path):
                raise
            # Another process has created this folder in the meantime: choose again.


def write_settings(folder: RunFolder, settings: Settings) -> None:
    """Write settings.yaml. It includes secrets in URLs, which a resumed run needs: then only the owner may read it."""
    text = settings_as_yaml(settings)
    files.write_text(folder.settings, f"{text}{END_OF_YAML}\n", private=holds_secret(text))


def stored_settings(folder: RunFolder) -> Settings:
    """The settings of a run. A file without END_OF_YAML is refused: its rest may be valid YAML with other settings."""
    with files.reading(folder.settings, REMEDY):
        if not files.read_regular(folder.settings).rstrip().endswith(END_OF_YAML.encode()):
            raise ValueError("its end is missing")
    return read_settings(folder.settings)


@contextlib.contextmanager
def lock(folder: RunFolder) -> Iterator[None]:
    """Inside, no other process can train this run. The system frees the lock when the process ends, even by a kill."""
    if not folder.path.is_dir():
        raise UserError(f"no run at {folder.path}; give the folder of a run, such as runs/NAME")
    with contextlib.ExitStack() as stack:
        with files.writing(folder.lock, "remove it, and see who put it there"):
            # Forked data workers, which outlive a killed parent, must not keep the lock.
            file = stack.enter_context(files.lock(folder.lock, wait=False, with_forks=False))
        if file is None:
            raise RunFailed(f"{folder.path} is being trained by {_holder(folder.lock)}; wait until it ends, or stop it")
        _sign(file)
        yield


def _sign(file: IO[str]) -> None:
    """Write this process into the lock, in one write that covers the old text: after a kill, the file has the old text
    or the new one."""
    before = os.fstat(file.fileno()).st_size
    os.pwrite(file.fileno(), json.dumps(this_process()).ljust(before).encode(), 0)


def _holder(lock: Path) -> str:
    try:
        holder = read_lock(lock)
    except UserError:
        return "another process"
    return f"process {holder['process']} on {holder['host']}"


def read_lock(path: Path) -> dict[str, Any]:
    """The process that holds (or last held) the run's lock, in the format of `this_process`."""
    with files.reading(path, "remove it"):
        holder = json.loads(files.read_regular(path))
        return {name: holder[name] for name in this_process()}


def this_process() -> dict[str, Any]:
    """This process, as the lock names it. `torchrun` identifies one torchrun with all its attempts; None without it."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    # Without --rdzv-id or --standalone every job has the id "none"; our parent, its agent, then identifies it.
    job = f"{socket.gethostname()} {os.getppid()}" if job == "none" else job
    return {"process": os.getpid(), "host": socket.gethostname(), "torchrun": job}


def run_to_continue(settings: Settings, resume: Path | str | None) -> Path | None:
    """The path of the run to resume; None for a new run. It is `resume`; with "auto" the run of `run.name`, if it was
    started; after a restart by torchrun the run that an earlier attempt started."""
    if resume and resume != "auto":
        return Path(resume)
    parent, name = Path(settings.run.folder), settings.run.name
    if resume and not name:
        raise UserError("--resume auto resumes the run called run.name if there is one; give --run.name too")
    if resume and RunFolder(parent / name).settings.is_file():
        return parent / name
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    for path in sorted(parent.glob(f"{glob.escape(name) or '[!.]*'}/{RunFolder('').lock.name}")):
        with contextlib.suppress(UserError):  # an unreadable lock belongs to another run
            if read_lock(path)["torchrun"] == this_process()["torchrun"]:
                return path.parent
    return None


def remove_unfinished(folder: RunFolder) -> None:
    """Remove files that a kill left half written. In the run's folder itself other processes may be writing a report or
    an export: there only files that are unchanged for UNFINISHED_SECONDS are removed."""
    ours = (path for parent in (folder.checkpoints, folder.model) for path in parent.glob(f".*{files.UNFINISHED}"))
    files.remove_unused(ours, 0)
    files.remove_unused(folder.path.glob(f".*{files.UNFINISHED}"), files.UNFINISHED_SECONDS)


# --- Checkpoints ----------------------------------------------------------------------------------------------------

# The keys of a checkpoint: the state of a run, and the config of its model, whose own file may be deleted.
OWN_CONFIG = "open_clip_config"
PARTS = (
    *("step", "samples", "seconds", "objective_name", "model_name", "data", "order"),
    *("model", "objective", "optimizer", "random", OWN_CONFIG),
)


def checkpoint_name(samples: int) -> str:
    return f"samples-{samples:012d}.pt"


def samples_at(checkpoint: Path) -> int:
    """The number of samples seen, from the checkpoint's name."""
    return int(checkpoint.stem.removeprefix("samples-"))


def checkpoints_in(folder: RunFolder) -> list[Path]:
    """The checkpoints, oldest first. Files that a kill left half written have another suffix and are not included."""
    return sorted(folder.checkpoints.glob("samples-*.pt"))


def save_checkpoint(
    folder: RunFolder, state: dict[str, Any], *, samples: int, keep: int, milestones: Collection[int] = ()
) -> None:
    """Write a checkpoint. When it is safe, remove all but the last `keep` and those at `milestones`, which are numbers
    of samples."""
    path, free = folder.checkpoints / checkpoint_name(samples), 0
    try:
        with files.new_file(path) as file:
            try:
                torch.save(state, file)
            finally:
                free = shutil.disk_usage(folder.path).free  # with the unfinished file still there
    except (OSError, RuntimeError) as error:  # torch reports a full disk as either
        needed, earlier = tensor_bytes(state), checkpoints_in(folder)
        full = files.disk_is_full(error) or free < needed // 100
        reason = f"the disk is full ({byte_size(needed)} needed, {byte_size(free)} free)" if full else error
        kept = f"the last good checkpoint is {earlier[-1]}" if earlier else "there is no earlier checkpoint"
        raise RunFailed(
            f"could not save {path}: {reason}; {kept}; make room, then: neuclip train --resume {folder.path}"
        ) from error
    lasting = {checkpoint_name(milestone) for milestone in milestones}
    for old in checkpoints_in(folder)[:-keep]:
        if old.name not in lasting:
            old.unlink()


def load_checkpoint(path: Path, *, check: bool = True) -> dict[str, Any]:
    """Read a checkpoint. Only tensors and plain values are loaded, so that nothing in the file can run code. `check`:
    first read the whole file for damage. Tensors are copied, because they are mapped from the file."""
    earlier = [other.name for other in sorted(path.parent.glob("samples-*.pt")) if other < path]
    remedy = f"the one before it is {earlier[-1]}" if earlier else "there is no earlier one; restore it, or start anew"
    with files.reading(path, remedy):
        files.open_regular(path).close()
        if check:
            files.check_zip(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {key: _copy_tensors(state[key]) for key in PARTS}


def _copy_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)((key, _copy_tensors(item)) for key, item in value.items())
    return type(value)(map(_copy_tensors, value)) if isinstance(value, list | tuple) else value


def load_newest(
    folder: RunFolder, *, check: bool = True, set_aside: bool = False
) -> tuple[Path, dict[str, Any]] | None:
    """The newest undamaged checkpoint and its state; None if the run has no checkpoints. Damaged ones are named on
    stderr. `set_aside`: also rename them, so that they do not count as checkpoints to keep."""
    damaged: list[tuple[Path, UserError]] = []
    for path in reversed(checkpoints_in(folder)):
        try:
            state = load_checkpoint(path, check=check)
        except UserError as error:
            damaged.append((path, error))
            continue
        for other, reason in damaged:
            print(reason, file=sys.stderr)
            if set_aside:
                other.rename(other.with_suffix(".damaged"))
        return path, state
    if damaged:
        raise damaged[-1][1]
    return None


def tensor_bytes(state: Any) -> int:
    """The bytes of all tensors in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    items = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(map(tensor_bytes, items))
