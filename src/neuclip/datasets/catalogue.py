"""Data sets by name: built once on this machine, kept in the cache folder, used wherever a data path is accepted.

The rest of the package knows this module alone. Nothing heavy is imported before a set is built.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from neuclip.datasets.fetching import discard
from neuclip.datasets.sets import DATA_SETS, DataSet
from neuclip.errors import UserError, proposal
from neuclip.files import cache_folder, lock
from neuclip.formatting import format_duration

ZERO_SHOT = "zero-shot"


@dataclass(frozen=True)
class HeldOut:
    """Addresses of what a model trained on a data set by name is tested on."""

    retrieval: tuple[str, ...]
    zero_shot: tuple[str, ...]


def data_sets() -> Mapping[str, DataSet]:
    """All sets by name, in the order of the list."""
    return DATA_SETS


def names() -> list[str]:
    return list(DATA_SETS)


def is_name(address: str) -> bool:
    """Whether an address means a data set by name, or a part of one.

    A file or folder called `mnist` goes before the set of that name. icons-30k goes before a folder; write
    `./icons-30k` for the folder.
    """
    data_set = DATA_SETS.get(address.partition("/")[0])
    return data_set is not None and not (data_set.packages and Path(address).exists())


def is_labelled(address: str) -> bool:
    """Whether an address means a zero-shot task of a data set by name: labels, no captions. It need not be prepared."""
    name, _, part = address.rstrip("/").partition("/")
    return is_name(address) and (part or DATA_SETS[name].parts[0]).startswith(ZERO_SHOT)


def held_out(name: str) -> HeldOut:
    """The test parts of a set; nothing is built.

    >>> held_out("icons-30k").retrieval
    ('icons-30k/new-drawings', 'icons-30k/new-concepts')
    """
    _, *tests = _known(name).parts
    return HeldOut(
        retrieval=tuple(f"{name}/{part}" for part in tests if not part.startswith(ZERO_SHOT)),
        zero_shot=tuple(f"{name}/{part}" for part in tests if part.startswith(ZERO_SHOT)),
    )


def resolve(address: str) -> Path | None:
    """The folder of a set's part; None when the address is no data set by name.

    `icons-30k` means its first part, `icons-30k/new-drawings` another one. A set that needs no network is built if it
    is not there; the others must have been prepared.
    """
    if not is_name(address):
        return None
    name, _, part = address.rstrip("/").partition("/")
    parts = DATA_SETS[name].parts
    part = part or parts[0]
    if part not in parts:
        known = [f"{name}/{one}" for one in parts]
        raise UserError(f"{name} has no part {part!r}; {proposal(f'{name}/{part}', known)} (parts: {', '.join(parts)})")
    if reason := unprepared(address):
        raise UserError(reason)
    return prepare(name) / part


def unprepared(address: str) -> str:
    """One line for an address whose set must be prepared first and is not; empty for all others."""
    if not is_name(address):
        return ""
    data_set = DATA_SETS[address.partition("/")[0]]
    if not data_set.packages or prepared_folder(data_set.name).exists():
        return ""
    command = f"neuclip data prepare {data_set.name}"
    return f"{data_set.name} is not prepared; run: {command} ({data_set.needs}, {data_set.time_needed})"


def prepared_folder(name: str) -> Path:
    """Where the built set is or will be; the folder's name changes with what the set is made from."""
    version = hashlib.sha256(_known(name).version().encode()).hexdigest()[:8]
    return cache_folder() / f"{name}-{version}"


def part_sizes(name: str) -> dict[str, int | None]:
    """How many pairs or images each part of a prepared set holds; None where BUILD.json does not say."""
    parts = _known(name).parts
    try:
        notes = json.loads((prepared_folder(name) / "BUILD.json").read_bytes())
    except (OSError, ValueError):  # removed or damaged by hand; the set can be used without it
        notes = {}
    counts = notes.get("pairs") or {parts[0]: notes.get("images")}
    return {part: counts.get(part) for part in parts}


def prepare(name: str) -> Path:
    """The folder of a built set. The first call fetches and builds; later ones return at once."""
    data_set = _known(name)
    target = prepared_folder(name)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _build_lock(target):
        if not target.exists():
            # A build that resumes must find its folder again; other folders are this process's own.
            suffix = "unfinished" if data_set.resumes else f"{socket.gethostname()}.{os.getpid()}"
            _build_and_rename(data_set, target.with_name(f".{target.name}.{suffix}"), target)
    return target


def _build_and_rename(data_set: DataSet, unfinished: Path, target: Path) -> None:
    """Build beside the target and move it there in one step: the target is whole or not there."""
    print(f"building {data_set.name} into {target}: once per machine, {data_set.time_needed}", file=sys.stderr)
    start = time.monotonic()
    try:
        data_set.build(unfinished)
    except BaseException:
        if not data_set.resumes:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
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
def _build_lock(target: Path) -> Iterator[None]:
    """Let one process of this machine build while the others wait.

    The lock only saves work: it is released when its process dies, and the final rename is safe without it.
    """
    place = target.with_name(f".{target.name}.lock")
    with lock(place, wait=False) as alone:
        if alone is None:
            print("another process on this machine is building it; waiting", file=sys.stderr)
    with lock(place):
        # Nobody else builds here now: folders of this machine are those of killed builds.
        for left_over in target.parent.glob(f".{target.name}.{socket.gethostname()}.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        yield


def _known(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise UserError(f"no data set {name!r}; {proposal(name, names())}")
    return DATA_SETS[name]
