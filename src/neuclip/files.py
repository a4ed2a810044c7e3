"""Opens files safely, writes them atomically, locks them, removes unused ones. The whole package uses this module.

No write follows a link: a new file is written under a random name and then moved to its path, and a file that is
appended to or locked must be a regular file. A planted link or the half-written file of a killed process does no harm.
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
except ImportError:  # missing on some systems: there, two processes can write the same file
    fcntl = None  # type: ignore[assignment]

DAY = 24 * 3600
UNFINISHED = ".part"  # the ending of a file that is being written
UNFINISHED_SECONDS = 2 * DAY  # an unfinished file this old was left by a killed process
UNUSED_SECONDS = 30 * DAY
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
IN_USE = (errno.EACCES, errno.EAGAIN)  # the system's error codes when another process holds the lock


def cache_folder() -> Path:
    """The folder NEUCLIP_CACHE, else XDG_CACHE_HOME/neuclip, else ~/.cache/neuclip."""
    if folder := os.environ.get("NEUCLIP_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuclip"


def open_regular(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for a pipe (reading it could block for ever), for a device (it
    may never end), and for a file of more than `max_bytes`."""
    # Without O_NONBLOCK, opening a pipe blocks.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and (max_bytes is None or status.st_size <= max_bytes):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISREG(status.st_mode):
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {max_bytes:,}", str(path))
    raise OSError(errno.EINVAL, "not a file", str(path))


def read_regular(path: Path, max_bytes: int | None = None) -> bytes:
    with open_regular(path, max_bytes) as file:
        return file.read()


@contextlib.contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Wrap code that reads a file and uses its content: any failure becomes a one-line UserError that names the file.

    >>> with reading(path, "save the set again"): files = json.loads(read_regular(path))["files"]    # doctest: +SKIP
    """
    try:
        yield
    except (UserError, RunFailed):
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from error
    except Exception as error:  # json, yaml, zipfile and torch raise many kinds for a damaged file
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{path}: is damaged or has the wrong format ({message}); {remedy}") from error


def read_json(path: Path, remedy: str) -> Any:
    with reading(path, remedy):
        return json.loads(read_regular(path))


def check_zip(path: Path) -> None:
    """Raise ValueError if a checksum in the zip file is wrong. torch.save stores a checksum of each tensor, but
    torch.load does not check it: flipped bits would silently become weights."""
    with open_regular(path) as content, zipfile.ZipFile(content) as file:
        if member := file.testzip():
            raise ValueError(f"the checksum of {member} differs")


@contextlib.contextmanager
def new_file(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing that replaces `path` at the end: even after a kill, `path` has the old content
    or the new one. The temporary name (`file.name`, if a library needs it) is random, so that no link is followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file atomically. Only its owner can ever read a private file."""
    with new_file(path, 0o600 if private else 0o666) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def append_text(path: Path, text: str) -> None:
    """Append to a file, or create it. The text goes to the system at once: it survives if the process is killed."""
    handle = _open_in_place(path, os.O_WRONLY | os.O_APPEND)
    with os.fdopen(handle, "ab") as file:
        file.write(text.encode())


def _open_in_place(path: Path, flags: int) -> int:
    """Open (or create) a file that is written in place. Raises OSError for a link, a pipe or a device."""
    handle = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o666)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a file", str(path))


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder to write into, which becomes `path` atomically. Only an empty folder may exist at
    `path`. If an error occurs, the temporary folder is removed; a failed write is a one-line error."""
    refuse_existing(path)
    unfinished = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with writing(path, "give another folder"):
            unfinished.mkdir(parents=True)
        yield unfinished
        with writing(path, "give another folder"):
            unfinished.rename(path)
    except UserError:
        refuse_existing(path)  # another process was faster
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_existing(path: Path) -> None:
    if is_taken(path):
        raise UserError(f"{path} exists; give another folder, or remove it")


def is_taken(path: Path) -> bool:
    """Whether something other than an empty folder exists at this path."""
    with writing(path, "give another folder"):
        return path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))


@contextlib.contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Wrap code that writes to a path that the user gave: an OSError becomes a one-line error that names the path."""
    try:
        yield
    except OSError as error:
        if disk_is_full(error):
            raise RunFailed(f"{path}: the disk is full; free some space, or {remedy}") from error
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); {remedy}") from error


def disk_is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full. torch reports this as a plain RuntimeError."""
    return getattr(error, "errno", None) in NO_ROOM or "No space left" in str(error)


def existing_parent(path: Path) -> Path:
    """The path itself if it exists, else its nearest parent folder that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True, with_forks: bool = True) -> Iterator[IO[str] | None]:
    """Lock a file. Yields the open file if this process got the lock, None if another process holds it.

    The lock ends with its process. Forked children keep it alive, unless `with_forks` is False. Some network disks
    have no locks: there, every process gets the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(_open_in_place(path, os.O_RDWR), "r+", encoding="utf-8") as file:
        take = (fcntl.flock if with_forks else fcntl.lockf) if fcntl else None
        try:
            if take:
                take(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in IN_USE:
                yield None
                return
        yield file


def mark_used(path: Path) -> bool:
    """Set the file's time to now, for `remove_unused`. Returns whether the file exists."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:  # another user's file: readable all the same
        return path.exists()
    return True


def remove_unused(paths: Iterable[Path], seconds: float = UNUSED_SECONDS) -> None:
    """Remove the files and folders that were not used or written for this long."""
    for path in paths:
        with contextlib.suppress(OSError):  # another process was faster, or another user owns the file
            if path.stat().st_mtime < time.time() - seconds:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
