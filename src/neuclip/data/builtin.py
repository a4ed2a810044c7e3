"""Data sets that come with the package: `icons-30k`, built once on this machine and kept in the cache folder."""

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

from neuclip.data.icons.build import BUILDER_VERSION, build
from neuclip.data.icons.packages import installed_versions
from neuclip.errors import AskedWrongly
from neuclip.progress import format_duration

try:
    import fcntl
except ImportError:  # Windows: two processes may both build, and the first to finish is used
    fcntl = None  # type: ignore[assignment]

ICONS = "icons-30k"
PARTS = ("train", "new-drawings", "new-concepts", "zero-shot/groups", "zero-shot/subgroups", "zero-shot/names")


@dataclass(frozen=True)
class HeldOut:
    """Addresses of what a model trained on a built-in set is tested on."""

    retrieval: tuple[str, ...]
    zero_shot: tuple[str, ...]


def builtin_names() -> list[str]:
    """The names that can stand where a path to data can stand."""
    return [ICONS]


def held_out(name: str) -> HeldOut:
    """The test parts of a built-in set; nothing is built.

    >>> held_out("icons-30k").retrieval
    ('icons-30k/new-drawings', 'icons-30k/new-concepts')
    """
    _check_name(name)
    tests = [f"{name}/{part}" for part in PARTS if part != "train"]
    return HeldOut(
        retrieval=tuple(address for address in tests if "/zero-shot/" not in address),
        zero_shot=tuple(address for address in tests if "/zero-shot/" in address),
    )


def resolve(address: str) -> Path | None:
    """The folder of a built-in set's part, built if need be; None when the address names no built-in set.

    `icons-30k` is its training part, `icons-30k/new-drawings` and so on the others.
    """
    name, _, part = address.strip("/").partition("/")
    if name not in builtin_names() or address.startswith("/"):
        return None
    part = part or "train"
    if part not in PARTS:
        nearest = difflib.get_close_matches(part, PARTS, n=1, cutoff=0.0)[0]
        raise AskedWrongly(f"{name} has no part {part!r}; nearest: {name}/{nearest} (parts: {', '.join(PARTS)})")
    return builtin_folder(name) / part


def cache_folder() -> Path:
    """Where built data are kept: NEUCLIP_CACHE, else XDG_CACHE_HOME/neuclip, else ~/.cache/neuclip."""
    if chosen := os.environ.get("NEUCLIP_CACHE"):
        return Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "neuclip"
    return Path.home() / ".cache" / "neuclip"


def builtin_folder(name: str) -> Path:
    """The folder of a built set. The first call builds it, which takes a minute or two; later ones return at once."""
    _check_name(name)
    target = cache_folder() / f"{name}-{_version_hash()}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one_builder(target):
        if not target.exists():
            _build_and_rename(target)
    return target


def _build_and_rename(target: Path) -> None:
    """Build beside the target and move it there in one step: the target is whole or not there."""
    unfinished = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
    print(f"building {ICONS} into {target}: once per machine, one to three minutes", file=sys.stderr)
    start = time.monotonic()
    try:
        build(unfinished, processes=min(8, os.cpu_count() or 1))
        try:
            unfinished.rename(target)
        except OSError:
            if not target.exists():  # else another machine on the same disk was faster; its files are the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"built {ICONS} in {format_duration(time.monotonic() - start)}", file=sys.stderr)


@contextlib.contextmanager
def _only_one_builder(target: Path) -> Iterator[None]:
    """Let the other processes of this machine wait, so that eight ranks do not build eight times.

    The lock only saves work: it dies with its process, and the final rename is safe without it.
    """
    with target.with_name(f".{target.name}.lock").open("w") as file:
        if _lock(file):
            # Whoever holds the lock is the only builder here, so other unfinished folders are those of killed builds.
            for left_over in target.parent.glob(f".{target.name}.{socket.gethostname()}.*"):
                shutil.rmtree(left_over, ignore_errors=True)
        yield


def _lock(file: IO[str]) -> bool:
    """Wait for the lock; False where there are no locks (Windows, some network disks)."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _version_hash() -> str:
    """Changes with the packages and with the builder, so that changed drawings never mix with old ones."""
    text = "\n".join([f"builder {BUILDER_VERSION}", *(f"{k} {v}" for k, v in sorted(installed_versions().items()))])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _check_name(name: str) -> None:
    if name not in builtin_names():
        raise AskedWrongly(f"no built-in data set is called {name!r}; there is {', '.join(builtin_names())}")
