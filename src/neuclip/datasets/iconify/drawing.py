"""Drawing collection after collection. Each finished one is a file of its own, so that a killed build goes on there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neuclip.datasets.array_file import is_whole, read_array, write_arrays
from neuclip.datasets.iconify.captions import Naming, caption_and_style, further_captions
from neuclip.datasets.iconify.collection_progress import CollectionProgress
from neuclip.datasets.iconify.collections import Collection, Icon, Icons, read_icons
from neuclip.datasets.icons.near_duplicates import Thumbnails, stack_thumbnails
from neuclip.datasets.icons.workers import Drawers, Drawn
from neuclip.progress import StatusLine

DIGEST_BYTES = 32


class Row(NamedTuple):
    """One drawn icon. The first caption is that of its name, the others those of its aliases."""

    name: str
    captions: tuple[str, ...]
    style: str


class Counts(NamedTuple):
    """What became of the visible icons of one or more collections, up to their drawing."""

    brands: int = 0  # left out
    unnamed: int = 0  # left out: the name says nothing
    blank: int = 0  # nothing to see, or not to be drawn
    drawn: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Drawings:
    """The drawn icons of one collection: names and captions in memory, images in the file."""

    def __init__(self, collection: Collection, file: Path):
        self.collection = collection
        self.file = file
        about = json.loads(self._read("about").tobytes())
        self.counts = Counts(*about["counts"])
        self.rows = [Row(name, tuple(captions), style) for name, captions, style in about["rows"]]

    def digests(self) -> list[bytes]:
        return [digest.tobytes() for digest in self._read("digests")]

    def thumbnails(self, chosen: np.ndarray) -> Thumbnails:
        return Thumbnails(self._read("grey")[chosen], self._read("colour")[chosen])

    def images(self) -> tuple[np.ndarray, np.ndarray]:
        """All PNG files one behind the other (uint8), and where each ends."""
        return self._read("images"), self._read("ends")

    def _read(self, what: str) -> np.ndarray:
        return read_array(self.file, what)


def draw_collections(collections: Sequence[Collection], folder: Path, processes: int) -> list[Drawings]:
    """Draw what is not yet drawn into one file per collection, in `folder`, and open them all."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {collection.prefix: folder / f"{collection.prefix}.npz" for collection in collections}
    missing = [collection for collection in collections if not is_whole(files[collection.prefix])]
    if missing:
        if len(missing) < len(collections):
            StatusLine().say(f"{len(collections) - len(missing)} of {len(collections)} collections are already drawn")
        progress = CollectionProgress("drawing", sum(collection.total for collection in missing))
        with Drawers(processes) as drawers:
            for collection in missing:
                _draw_collection(collection, files[collection.prefix], drawers, progress)
        progress.close()
    return [Drawings(collection, files[collection.prefix]) for collection in collections]


def _draw_collection(collection: Collection, file: Path, drawers: Drawers, progress: CollectionProgress) -> None:
    found = read_icons(collection)
    named = list(_named_icons(collection, found))
    rows, images = [], []
    drawn = drawers.draw([icon.svg for icon, _ in named])
    for count, ((_, row), image) in enumerate(zip(named, drawn, strict=True)):
        progress.show(collection.prefix, count)
        if image:
            rows.append(row)
            images.append(image)
    counts = Counts(
        brands=found.brands,
        unnamed=len(found.icons) - len(named),
        blank=len(named) - len(rows),
        drawn=len(rows),
    )
    _store(file, rows, images, counts)
    progress.done += collection.total  # what was left out is done too


def _named_icons(collection: Collection, found: Icons) -> Iterator[tuple[Icon, Row]]:
    naming = Naming(collection.prefix, found.names, found.prefixes, found.suffixes)
    for icon in found.icons:
        caption, style = caption_and_style(icon.name, naming)
        if caption:
            further = further_captions(caption, icon.aliases, naming)
            yield icon, Row(icon.name, (caption, *further), style)


def _store(file: Path, rows: Sequence[Row], images: Sequence[Drawn], counts: Counts) -> None:
    about: dict[str, Any] = {"counts": counts, "rows": rows}
    thumbnails = stack_thumbnails([image.thumbnail for image in images])
    digests = np.frombuffer(b"".join(image.digest for image in images), np.uint8)
    write_arrays(
        file,
        about=np.frombuffer(json.dumps(about).encode(), np.uint8),
        digests=digests.reshape(len(rows), DIGEST_BYTES),
        grey=thumbnails.grey,
        colour=thumbnails.colour,
        images=np.frombuffer(b"".join(image.png for image in images), np.uint8),
        ends=np.cumsum([len(image.png) for image in images], dtype=np.int64),
    )
