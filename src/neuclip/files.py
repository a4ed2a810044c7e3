"""Files: opened safely, written in one move, locked, tidied up. All of the package reads and writes through here.

No write follows a link: a file is written under a random name and moved to its place, and what is appended to or locked
must be a file itself. So neither a link that was put there nor half a file of a killed process can do harm.
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
import zipfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from neuclip.errors import RunFailed, UserError

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


def cache_folder() -> Path:
    """NEUCLIP_CACHE, else XDG_CACHE_HOME/neuclip, else ~/.cache/neuclip."""
    if chosen := os.environ.get("NEUCLIP_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuclip"


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
    except (UserError, RunFailed):
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from error
    except Exception as error:  # json, yaml, zipfile and torch raise many kinds for a damaged file
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{path}: is damaged, or not what it should be ({told}); {remedy}") from error


def read_json(path: Path, remedy: str) -> Any:
    with reading(path, remedy):
        return json.loads(read_regular(path))


def check_zip(path: Path) -> None:
    """Raises ValueError. torch.save writes a zip file with a checksum of each tensor, at which torch.load does not
    look: flipped bits would become weights."""
    with open_regular(path) as content, zipfile.ZipFile(content) as file:
        if member := file.testzip():
            raise ValueError(f"the checksum of {member} differs")


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


def append_text(path: Path, text: str) -> None:
    """At the end of a file, or into a new one; handed to the system at once, so that a killed process keeps it."""
    handle = _open_own(path, os.O_WRONLY | os.O_APPEND)
    with os.fdopen(handle, "ab") as file:
        file.write(text.encode())


def _open_own(path: Path, flags: int) -> int:
    """A file that is written to in place, made if it is not there. Raises OSError for a link, a pipe or a device."""
    handle = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o666)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a file", str(path))


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes `place` in one move and replaces nothing but an empty folder. What
    an error leaves is removed. What cannot be written is one line."""
    refuse_existing(place)
    unfinished = place.with_name(f".{place.name[:100]}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with writing(place, "give another folder"):
            unfinished.mkdir(parents=True)
        yield unfinished
        with writing(place, "give another folder"):
            unfinished.rename(place)
    except UserError:
        refuse_existing(place)  # another process was faster
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_existing(place: Path) -> None:
    if is_taken(place):
        raise UserError(f"{place} exists; give another folder, or remove it")


def is_taken(place: Path) -> bool:
    """Whether a new folder cannot be made there; an empty one can be replaced."""
    with writing(place, "give another folder"):
        return place.is_symlink() or (place.exists() and not (place.is_dir() and not any(place.iterdir())))


@contextlib.contextmanager
def writing(place: Path, remedy: str) -> Iterator[None]:
    """Around what writes to a place that the user named: what the system refuses becomes one line."""
    try:
        yield
    except OSError as error:
        if disk_is_full(error):
            raise RunFailed(f"{place}: the disk is full; free some space, or {remedy}") from error
        raise UserError(f"{place}: cannot be written ({error.strerror or error}); {remedy}") from error


def disk_is_full(error: BaseException) -> bool:
    """torch reports it as a plain RuntimeError."""
    return getattr(error, "errno", None) in NO_ROOM or "No space left" in str(error)


def existing_parent(place: Path) -> Path:
    """The place itself if it is there, else the nearest folder above that is."""
    place = place.absolute()
    return next(folder for folder in (place, *place.parents) if folder.exists())


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True, with_forks: bool = True) -> Iterator[IO[str] | None]:
    """The lock's open file if this process has it alone, None if another one has it. It dies with its process; without
    `with_forks` also when processes that were forked from it live on. Some network disks have no locks: there nothing
    keeps two processes apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(_open_own(path, os.O_RDWR), "r+", encoding="utf-8") as file:
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
