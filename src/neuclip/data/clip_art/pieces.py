"""Drawing in pieces that are kept on disk, so that a build that was killed goes on where it was."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from neuclip.data.clip_art.item import Item
from neuclip.data.clip_art.picture import Picture, make_picture

PIECE_ITEMS = 256

UNREADABLE = "cannot be drawn"
BLANK = "nothing to see on white"


def drawn_items(items: Sequence[Item], folder: Path) -> Iterator[Picture | str]:
    """A picture per item, or the reason why there is none, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(items), PIECE_ITEMS):
        yield from _piece(items[start : start + PIECE_ITEMS], folder / f"{start:06d}.pickle")


def _piece(items: Sequence[Item], file: Path) -> Iterator[Picture | str]:
    if file.exists():  # only whole pieces bear this name
        yield from pickle.loads(file.read_bytes())
        return
    drawn = []
    for item in items:
        drawn.append(draw_one(item.file))
        yield drawn[-1]
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(drawn))
    unfinished.replace(file)


def draw_one(file: Path) -> Picture | str:
    try:
        picture = make_picture(file)
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError):  # what resvg and Pillow raise
        return UNREADABLE
    return BLANK if picture is None else picture
