"""Files that are written in one move, and removed when nobody has used them for long."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

DAY = 24 * 3600
UNFINISHED_SECONDS = 2 * DAY  # a file that was not written to for this long belongs to a killed process
UNUSED_SECONDS = 30 * DAY
UNFINISHED = ".part"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def new_file(place: Path) -> Iterator[Path]:
    """A file beside `place` to write to. It is moved to `place` at the end: nobody ever sees half of it."""
    unfinished = unfinished_file(place)
    try:
        yield unfinished
        move(unfinished, place)
    finally:
        unfinished.unlink(missing_ok=True)


def unfinished_file(place: Path) -> Path:
    """A new empty file beside `place`."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=UNFINISHED)
    os.close(handle)
    return Path(name)


def move(unfinished: Path, place: Path) -> None:
    unfinished.chmod(0o644)  # mkstemp's 0600 would hide it from others who share the folder
    unfinished.replace(place)


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
            status = place.stat()
            # Just before an unpacked file is moved, it gets the time of its shard: the time of writing does not tell.
            last_use = status.st_ctime if place.suffix == UNFINISHED else status.st_mtime
            if last_use < time.time() - seconds:
                shutil.rmtree(place) if place.is_dir() else place.unlink()
