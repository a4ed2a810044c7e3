"""Files: opened safely, written in one move, locked, tidied up. All of the package reads and writes through here.

A name that somebody else can guess is never opened for writing: neither a link that was put there nor half a file of a
killed process can do harm.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from neuclip.errors import UserError

try:
    import fcntl
except ImportError:  # not on every system: then nothing keeps two processes apart
    fcntl = None  # type: ignore[assignment]

DAY = 24 * 3600
UNFINISHED = ".part"  # the ending of a file that is being written
UNFINISHED_SECONDS = 2 * DAY  # a file that was not written to for this long belongs to a killed process
UNUSED_SECONDS = 30 * DAY
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IN_USE = (errno.EACCES, errno.EAGAIN)  # what the system says of a lock that another process holds
DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError, RecursionError, MemoryError)


def cache_folder() -> Path:
    """NEUCLIP_CACHE, else XDG_CACHE_HOME/neuclip, else ~/.cache/neuclip."""
    if chosen := os.environ.get("NEUCLIP_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuclip"


def available_cores() -> int:
    """Those that this process may use, which in a container or a job may be fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_regular(path: Path, most: int | None = None) -> BinaryIO:
    """Open a file to read it. Raises OSError for a pipe, which would wait for ever, for a device, which may never end,
    and for more than `most` bytes."""
    # Without O_NONBLOCK, opening a pipe waits.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and (most is None or status.st_size <= most):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISREG(status.st_mode):
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {most:,}", str(path))
    raise OSError(errno.EINVAL, "not a file", str(path))


def read_regular(path: Path, most: int | None = None) -> bytes:
    with open_regular(path, most) as file:
        return file.read()


@contextlib.contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Around all that reads a file and uses its content: whatever fails becomes one line that names the file.

    >>> with reading(path, "save the set again"): files = json.loads(read_regular(path))["files"]    # doctest: +SKIP
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from error
    except DAMAGE as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{path}: is damaged, or not what it should be ({told}); {remedy}") from error


@contextlib.contextmanager
def new_file(place: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes `place` in one move: a reader, or a kill, sees the old content or the new. Its
    own name (`file.name`, for libraries that want one) is random and new: it follows no link that is there already."""
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_name(f".{place.name[:100]}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(place)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file in one move. A private file is readable by its owner alone, from its first byte on."""
    with new_file(path, 0o600 if private else 0o666) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True, with_forks: bool = True) -> Iterator[IO[str] | None]:
    """The lock's open file if this process has it alone, None if another one has it. It dies with its process; without
    `with_forks` also when processes that were forked from it live on. Some network disks have no locks: there nothing
    keeps two processes apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o644)
    with os.fdopen(handle, "r+", encoding="utf-8") as file:
        take = (fcntl.flock if with_forks else fcntl.lockf) if fcntl else None
        try:
            if take:
                take(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in IN_USE:
                yield None
                return
        yield file


def mark_used(place: Path) -> bool:
    """Whether it is there. It then counts as used now."""
    try:
        os.utime(place)
    except FileNotFoundError:
        return False
    except OSError:  # another user's, which may be read all the same
        return place.exists()
    return True


def remove_unused(places: Iterable[Path], seconds: float = UNUSED_SECONDS) -> None:
    """Remove the files and folders that nobody used, or wrote to, for this long."""
    for place in places:
        with contextlib.suppress(OSError):  # another process was faster, or it is another user's
            if place.stat().st_mtime < time.time() - seconds:
                shutil.rmtree(place) if place.is_dir() else place.unlink()
