"""The nearest right word: what an error proposes instead of what was typed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

COMPARED = 10_000  # names of one folder; comparing those of a million images would take seconds


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, or '' when none is near.

    >>> nearest("trian", ["train", "eval"])
    'train'
    """
    found = get_close_matches(word, list(known), n=1)
    return found[0] if found else ""


def any_of(words: Sequence[str]) -> str:
    """'a', 'a or b', 'a, b or c'."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def proposal(word: str, known: Sequence[str]) -> str:
    """'did you mean train?' when something is near, otherwise what there is to choose from."""
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"choose {any_of(known)}"


def nearest_path(path: Path) -> Path | None:
    """What lies where `path` was looked for under nearly its name, its folders put right too; None if nothing does.

    >>> nearest_path(Path("phtos/pairs.cvs"))                                            # doctest: +SKIP
    PosixPath('photos/pairs.csv')
    """
    try:
        if path.exists():
            return path
        folder = nearest_path(path.parent)
        if folder is None or not folder.is_dir():
            return None
        if (folder / path.name).exists():
            return folder / path.name
        with os.scandir(folder) as entries:
            shown = (entry.name for entry in islice(entries, COMPARED) if not entry.name.startswith("."))
            names = sorted(name for name in shown if (folder / name).exists())  # not links to what is gone
    except OSError:  # a folder that may not be listed, a name that is too long
        return None
    near = nearest(path.name, names)
    return folder / near if near else None
