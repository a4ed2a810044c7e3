"""Drawing collection after collection. Each finished one is a file: a killed build continues with the others."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuclip.datasets.drawing import Drawn
from neuclip.datasets.iconify.captions import Naming, caption_and_style, further_captions
from neuclip.datasets.iconify.collections import Collection, Icon, Icons, read_icons
from neuclip.datasets.near_duplicates import Thumbnails, stack_thumbnails
from neuclip.datasets.workers import Drawers
from neuclip.progress import StatusLine, track

DIGEST_BYTES = 32


class DrawnIcon(NamedTuple):
    """What is known of a drawn icon. The first caption is that of its name, the others those of its aliases."""

    name: str
    captions: tuple[str, ...]
    style: str


class Counts(NamedTuple):
    """What became of the visible icons of one or more collections, up to their drawing."""

    brands: int = 0  # left out
    unnamed: int = 0  # left out: the name says nothing
    blank: int = 0  # nothing to see, or cannot be drawn
    drawn: int = 0


class DrawnCollection:
    """The drawn icons of one collection: names and captions in memory, images in the file."""

    def __init__(self, collection: Collection, file: Path):
        self.collection = collection
        self.file = file
        about = json.loads(self._read("about").tobytes())
        self.counts = Counts(*about["counts"])
        self.icons = [DrawnIcon(name, tuple(captions), style) for name, captions, style in about["icons"]]

    def digests(self) -> list[bytes]:
        return [digest.tobytes() for digest in self._read("digests")]

    def thumbnails(self, chosen: np.ndarray) -> Thumbnails:
        return Thumbnails(self._read("grey")[chosen], self._read("colour")[chosen])

    def images(self) -> tuple[np.ndarray, np.ndarray]:
        """All PNG files one behind the other (uint8), and where each ends."""
        return self._read("images"), self._read("ends")

    def _read(self, name: str) -> np.ndarray:
        # Nothing is unpickled: others may be able to write into the cache folder.
        with np.load(self.file, allow_pickle=False) as stored:
            array: np.ndarray = stored[name]
        return array


def draw_collections(
    collections: Sequence[Collection], folder: Path, processes: int | None = None
) -> list[DrawnCollection]:
    """Draw what is not yet drawn into one file per collection, in `folder`, and open them all."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {collection.prefix: folder / f"{collection.prefix}.npz" for collection in collections}
    missing = [collection for collection in collections if not _is_whole(files[collection.prefix])]
    if missing:
        if len(missing) < len(collections):
            StatusLine().say(f"{len(collections) - len(missing)} of {len(collections)} collections are already drawn")
        with Drawers(processes) as drawers:
            # Counted in images, because collections are of very different sizes.
            drawn = (icon for one in missing for icon in _draw_collection(one, files[one.prefix], drawers))
            for _ in track(drawn, "drawing", sum(collection.total for collection in missing), "images"):
                pass
    return [DrawnCollection(collection, files[collection.prefix]) for collection in collections]


def _draw_collection(collection: Collection, file: Path, drawers: Drawers) -> Iterator[DrawnIcon]:
    """Draw one collection into its file; gives each icon as it is drawn."""
    content = read_icons(collection)
    named = list(_named_icons(collection, content))
    icons, images = [], []
    for (_, icon), image in zip(named, drawers.draw([source.svg for source, _ in named]), strict=True):
        if image:
            icons.append(icon)
            images.append(image)
        yield icon
    counts = Counts(
        brands=content.brands,
        unnamed=len(content.icons) - len(named),
        blank=len(named) - len(icons),
        drawn=len(icons),
    )
    _store(file, icons, images, counts)


def _named_icons(collection: Collection, content: Icons) -> Iterator[tuple[Icon, DrawnIcon]]:
    naming = Naming(collection.prefix, content.names, content.prefixes, content.suffixes)
    for icon in content.icons:
        caption, style = caption_and_style(icon.name, naming)
        if caption:
            further = further_captions(caption, icon.aliases, naming)
            yield icon, DrawnIcon(icon.name, (caption, *further), style)


def _store(file: Path, icons: Sequence[DrawnIcon], images: Sequence[Drawn], counts: Counts) -> None:
    """Written beside, brought to the disk and moved into place: neither a kill nor a power cut leaves half of it."""
    about = json.dumps({"counts": counts, "icons": icons})
    thumbnails = stack_thumbnails([image.thumbnail for image in images])
    digests = np.frombuffer(b"".join(image.digest for image in images), np.uint8)
    partial = file.with_suffix(".partial")
    with partial.open("wb") as stream:
        np.savez(
            stream,
            about=np.frombuffer(about.encode(), np.uint8),
            digests=digests.reshape(len(icons), DIGEST_BYTES),
            grey=thumbnails.grey,
            colour=thumbnails.colour,
            images=np.frombuffer(b"".join(image.png for image in images), np.uint8),
            ends=np.cumsum([len(image.png) for image in images], dtype=np.int64),
        )
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def _is_whole(file: Path) -> bool:
    """Whether the file is there and its checksums hold; a damaged one is made again."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
