"""Drawing in pieces that are kept on disk, so that a build that was killed goes on where it was."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from neuclip.data.named.array_file import is_whole, read_array, write_arrays
from neuclip.data.named.clip_art.item import Item
from neuclip.data.named.clip_art.picture import Picture, make_picture

PIECE_ITEMS = 256

UNREADABLE = "cannot be drawn"
BLANK = "nothing to see on white"


def drawn_items(items: Sequence[Item], folder: Path) -> Iterator[Picture | str]:
    """A picture per item, or the reason why there is none, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(items), PIECE_ITEMS):
        yield from _piece(items[start : start + PIECE_ITEMS], folder / f"{start:06d}.npz")


def _piece(items: Sequence[Item], file: Path) -> Iterator[Picture | str]:
    if is_whole(file):
        yield from read_piece(file)
        return
    drawn = []
    for item in items:
        drawn.append(draw_one(item.file))
        yield drawn[-1]
    write_piece(file, drawn)


def write_piece(file: Path, drawn: Sequence[Picture | str]) -> None:
    """All bytes of all pictures one behind the other, and a table: a reason, or an ending and four lengths."""
    table: list[str | list[str | int]] = []
    content: list[bytes] = []
    for picture in drawn:
        if isinstance(picture, str):
            table.append(picture)
        else:
            parts = [picture.content, picture.digest, *picture.thumbnail]
            table.append([picture.extension, *map(len, parts)])
            content += parts
    write_arrays(
        file,
        table=np.frombuffer(json.dumps(table).encode(), np.uint8),
        content=np.frombuffer(b"".join(content), np.uint8),
    )


def read_piece(file: Path) -> Iterator[Picture | str]:
    """What `write_piece` was given."""
    stream = io.BytesIO(read_array(file, "content").tobytes())
    for row in json.loads(read_array(file, "table").tobytes()):
        if isinstance(row, str):
            yield row
        else:
            extension, *lengths = row
            content, digest, grey, colour = (stream.read(length) for length in lengths)
            yield Picture(extension, content, digest, (grey, colour))


def draw_one(file: Path) -> Picture | str:
    try:
        picture = make_picture(file)
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError):  # what resvg and Pillow raise
        return UNREADABLE
    return BLANK if picture is None else picture
