"""The folder of a run: made in one move, used by one process at a time, and found again after torchrun's restart."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from neuclip import files
from neuclip.errors import RunFailed, UserError
from neuclip.files import UNFINISHED, write_text
from neuclip.records import RunFolder, write_json
from neuclip.secrets import holds_secret
from neuclip.settings.sections import RunSettings, Settings
from neuclip.settings.writing import settings_as_yaml

TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # what the system says of a name


def folder_names(settings: Settings) -> Iterator[Path]:
    """Where a new run may go: the folder of its name; by default date, objective and model, then these with numbers."""
    parent, name = Path(settings.run.folder), settings.run.name
    if name:
        check_name(settings.run)
        yield parent / name
        return
    model = settings.model.name.removeprefix("local-dir:").rstrip("/").rpartition("/")[2].removesuffix(".json")
    stem = f"{datetime.now(tz=UTC).date().isoformat()}-{settings.objective_name}-{model}"
    yield parent / stem
    yield from (parent / f"{stem}-{number}" for number in count(2))


def check_name(run: RunSettings) -> None:
    if run.name in (".", "..") or Path(run.name).name != run.name:
        path = Path(run.folder) / run.name
        raise UserError(
            f"run.name {run.name} is a path; give --run.name {path.name.strip('.') or 'NAME'} and its folder as "
            f"--run.folder {path.parent}"
        )


def check_new(settings: Settings) -> Path:
    """The folder that a new run would get. A run never overwrites another: an existing name is an error."""
    for path in folder_names(settings):
        if not RunFolder(path).is_taken:
            return path
    raise _exists(path)


def _exists(path: Path) -> UserError:
    return UserError(f"{path} exists; give another --run.name, or continue it: neuclip train --resume {path}")


def write_settings(folder: RunFolder, settings: Settings) -> None:
    """They are complete, or nobody could resume: only the owner may read the password or signature of an address."""
    text = settings_as_yaml(settings)
    write_text(folder.settings, text, private=holds_secret(text))


def make_folder(settings: Settings, environment: Mapping[str, Any]) -> RunFolder:
    """With the files that every run has from the start. They are written beside and moved into place together: two
    processes cannot make the same folder, and a kill leaves none that cannot be resumed."""
    parent = Path(settings.run.folder)
    parent.mkdir(parents=True, exist_ok=True)
    partial = RunFolder(parent / f".{uuid.uuid4().hex}.partial")
    partial.path.mkdir()
    try:
        write_settings(partial, settings)
        write_json(partial.environment, environment)
        write_json(partial.lock, describe_process())
        for path in folder_names(settings):
            try:
                return RunFolder(partial.path.rename(path))
            except OSError as error:
                if error.errno not in TAKEN:
                    raise
    finally:
        shutil.rmtree(partial.path, ignore_errors=True)
    raise _exists(path)  # another process was faster


@contextlib.contextmanager
def lock(folder: RunFolder) -> Iterator[None]:
    """Inside, no other process can train this run. The system ends the lock with the process, however that ends."""
    if not folder.path.is_dir():
        raise UserError(f"no run at {folder.path}; give the folder of a run, such as runs/NAME")
    with files.lock(folder.lock, wait=False, with_forks=False) as file:  # data workers outlive a killed parent
        if file is None:
            raise RunFailed(f"{folder.path} is being trained by {_holder(folder.lock)}; wait until it ends, or stop it")
        file.truncate(0)
        json.dump(describe_process(), file)
        file.flush()
        yield


def _holder(lock: Path) -> str:
    try:
        holder = json.loads(files.read_regular(lock))
        return f"process {holder['process']} on {holder['host']}"
    except (OSError, *files.DAMAGE):  # it is just writing its name
        return "another process"


def describe_process() -> dict[str, Any]:
    return {"process": os.getpid(), "host": socket.gethostname(), "torchrun": torchrun_job()}


def torchrun_job() -> str | None:
    """The same for all attempts of one torchrun, and for no other; None without torchrun."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    # Without --rdzv-id or --standalone every job is called "none"; then its agent, our parent, tells them apart.
    return f"{socket.gethostname()} {os.getppid()}" if job == "none" else job


def restarted_run(settings: Settings) -> Path | None:
    """The run that an earlier attempt of this torchrun started; None if this is the first, or none got that far."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    pattern = f"{settings.run.name or '*'}/{RunFolder('').lock.name}"
    for path in Path(settings.run.folder).glob(pattern):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(path.read_text(encoding="utf-8"))["torchrun"] == torchrun_job():
                return path.parent
    return None


def remove_partial(folder: RunFolder) -> None:
    """Files that a kill left half written."""
    for place in (folder.path, folder.checkpoints, folder.model):
        for path in place.glob(f".*{UNFINISHED}"):
            path.unlink()
