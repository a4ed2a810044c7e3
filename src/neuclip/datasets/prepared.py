"""Data sets by name: made once on this machine, kept in the cache folder, used wherever a path to data can stand."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from neuclip.data.machine import cache_folder
from neuclip.datasets.catalogue import DataSet, catalogue
from neuclip.datasets.fetching import discard
from neuclip.errors import UserError
from neuclip.formatting import format_duration

try:
    import fcntl
except ImportError:  # not on every system: then two processes may both build
    fcntl = None  # type: ignore[assignment]

ZERO_SHOT = "zero-shot"


@dataclass(frozen=True)
class HeldOut:
    """Addresses of what a model trained on a built-in set is tested on."""

    retrieval: tuple[str, ...]
    zero_shot: tuple[str, ...]


def dataset_names() -> list[str]:
    """The names that can stand where a path to data can stand."""
    return list(catalogue())


def is_dataset_name(address: str) -> bool:
    """Whether an address means a built-in set or a part of one.

    Of `mnist` and the like there may be a file or folder of one's own, which goes before the set; icons-30k has always
    been ours, and `./icons-30k` is how to say that a folder is meant.
    """
    data_set = catalogue().get(address.partition("/")[0])
    return data_set is not None and not (data_set.packages and Path(address).exists())


def is_labelled(address: str) -> bool:
    """Whether a built-in address means a zero-shot task: labels and no captions. It need not be prepared."""
    name, _, part = address.rstrip("/").partition("/")
    return is_dataset_name(address) and (part or catalogue()[name].parts[0]).startswith(ZERO_SHOT)


def held_out(name: str) -> HeldOut:
    """The test parts of a built-in set; nothing is built.

    >>> held_out("icons-30k").retrieval
    ('icons-30k/new-drawings', 'icons-30k/new-concepts')
    """
    _, *tests = _known(name).parts
    return HeldOut(
        retrieval=tuple(f"{name}/{part}" for part in tests if not part.startswith(ZERO_SHOT)),
        zero_shot=tuple(f"{name}/{part}" for part in tests if part.startswith(ZERO_SHOT)),
    )


def resolve(address: str) -> Path | None:
    """The folder of a built-in set's part; None when the address names no built-in set.

    `icons-30k` is its first part, training; `icons-30k/new-drawings` and so on are the others. It is built if need
    be; sets that need the network must have been prepared.
    """
    if not is_dataset_name(address):
        return None
    name, _, part = address.rstrip("/").partition("/")
    data_set = catalogue()[name]
    part = part or data_set.parts[0]
    if part not in data_set.parts:
        nearest = difflib.get_close_matches(part, data_set.parts, n=1, cutoff=0.0)[0]
        parts = ", ".join(data_set.parts)
        raise UserError(f"{name} has no part {part!r}; nearest: {name}/{nearest} (parts: {parts})")
    if reason := unprepared(address):
        raise UserError(reason)
    return dataset_folder(name) / part


def unprepared(address: str) -> str:
    """One line for an address whose set must be prepared by hand first and is not; empty for all others."""
    if not is_dataset_name(address):
        return ""
    data_set = catalogue()[address.partition("/")[0]]
    if not data_set.packages or prepared_folder(data_set).exists():
        return ""
    command = f"neuclip data prepare {data_set.name}"
    return f"{data_set.name} is not prepared; run: {command} ({data_set.needs}, {data_set.time_needed})"


def prepared_folder(data_set: DataSet) -> Path:
    """Where the built set is or will be; its name changes with what it is made from."""
    version = hashlib.sha256(data_set.version().encode()).hexdigest()[:8]
    return cache_folder() / f"{data_set.name}-{version}"


def dataset_folder(name: str) -> Path:
    """The folder of a built set. The first call fetches and builds; later ones return at once."""
    data_set = _known(name)
    target = prepared_folder(data_set)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one_builder(target) as alone:
        if not target.exists():
            # A build that fetches goes on where a killed one stopped, so its folder has a name that is found again.
            goes_on = alone and bool(data_set.packages)
            unfinished = "unfinished" if goes_on else f"{socket.gethostname()}.{os.getpid()}"
            _build_and_rename(data_set, target.with_name(f".{target.name}.{unfinished}"), target)
    return target


def _build_and_rename(data_set: DataSet, unfinished: Path, target: Path) -> None:
    """Build beside the target and move it there in one step: the target is whole or not there."""
    print(f"building {data_set.name} into {target}: once per machine, {data_set.time_needed}", file=sys.stderr)
    start = time.monotonic()
    data_set.build(unfinished)
    try:
        unfinished.rename(target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(unfinished, ignore_errors=True)  # another machine on the same disk was faster with the same files
    for package in data_set.packages:
        discard(package)
    print(f"built {data_set.name} in {format_duration(time.monotonic() - start)}", file=sys.stderr)


@contextlib.contextmanager
def _only_one_builder(target: Path) -> Iterator[bool]:
    """Let the other processes of this machine wait, so that eight ranks do not build eight times; True with the lock.

    The lock only saves work: it dies with its process, and the final rename is safe without it.
    """
    with target.with_name(f".{target.name}.lock").open("w") as file:
        alone = _lock(file)
        if alone:
            # Whoever holds the lock is the only builder here, so other unfinished folders are those of killed builds.
            for left_over in target.parent.glob(f".{target.name}.{socket.gethostname()}.*"):
                shutil.rmtree(left_over, ignore_errors=True)
        yield alone


def _lock(file: IO[str]) -> bool:
    """Wait for the lock; False where there are no locks (on some network disks)."""
    if fcntl is None:
        return False
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process of this machine is building it; waiting", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _known(name: str) -> DataSet:
    data_set = catalogue().get(name)
    if data_set is None:
        nearest = difflib.get_close_matches(name, dataset_names(), n=1, cutoff=0.0)[0]
        raise UserError(f"no data set is called {name!r}; nearest: {nearest} (there are {', '.join(dataset_names())})")
    return data_set
