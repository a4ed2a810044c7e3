"""The shards that this process has open: the last used ones, with one limit for all sources together."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

OPEN_FILES = 128  # per process; systems often allow 1024 and a large set has ten thousand shards
Key = tuple[int, int]  # number of the source, and of its shard

_open: OrderedDict[Key, int] = OrderedDict()
_numbers = count()


def new_number() -> int:
    """For a source: no other one of this process has it."""
    return next(_numbers)


def descriptor(key: Key, open_file: Callable[[], int], most_of_source: int = OPEN_FILES) -> int:
    """An open one, or `open_file()`. A forked worker may share its parent's: pread has no position of its own."""
    if key in _open:
        _open.move_to_end(key)
        return _open[key]
    own = [other for other in _open if other[0] == key[0]]
    for oldest in own[: max(0, len(own) - most_of_source + 1)]:
        os.close(_open.pop(oldest))
    while len(_open) >= OPEN_FILES:
        os.close(_open.popitem(last=False)[1])
    try:
        file = open_file()
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or not _open:
            raise
        close_files()  # other code of this process holds more than usual
        file = open_file()
    _open[key] = file
    return file


def close_files(source: int | None = None) -> None:
    """Those of a source that is no longer used, or all."""
    for key in [key for key in _open if source is None or key[0] == source]:
        os.close(_open.pop(key))


def open_count(source: int) -> int:
    return sum(key[0] == source for key in _open)
