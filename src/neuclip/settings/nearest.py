"""The nearest right word: what an error proposes instead of what was typed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


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
