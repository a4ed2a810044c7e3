"""What an error proposes in place of a mistyped word or path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

COMPARED = 10_000  # file names per folder at most; a million would take seconds


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like `word`, or '' when none is near.

    >>> nearest("trian", ["train", "eval"])
    'train'
    """
    return next(iter(get_close_matches(word, list(known), n=1)), "")


def any_of(words: Sequence[str]) -> str:
    """'a', 'a or b', 'a, b or c'."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def proposal(word: str, known: Sequence[str]) -> str:
    """'did you mean train?' when something is near, otherwise what there is to choose from."""
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"choose {any_of(known)}"


def nearest_path(path: Path) -> Path | None:
    """The existing path with nearly this name, mistyped folders corrected too; None if there is none.

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
            names = sorted(name for name in shown if (folder / name).exists())  # not broken links
    except OSError:  # no permission to list the folder, or a name that is too long
        return None
    near = nearest(path.name, names)
    return folder / near if near else None
