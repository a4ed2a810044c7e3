"""Collections of drawings, each drawn into a file of its own: a killed build continues with the others."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from neuclip.datasets.collection import Collection
from neuclip.datasets.drawing import Drawable, Drawn
from neuclip.datasets.near_duplicates import Thumbnails, stack_thumbnails
from neuclip.datasets.workers import Drawers
from neuclip.files import new_file
from neuclip.progress import StatusLine, track

DIGEST_BYTES = 32
BLANK = "blank"  # nothing to see, or cannot be drawn


class Names(NamedTuple):
    """What a drawing is called. The first caption is that of its name, the others those of its aliases."""

    name: str
    captions: tuple[str, ...]
    style: str = ""


@dataclass(frozen=True)
class Listing:
    """The drawings of a collection before they are drawn, and how many were left out, by reason."""

    drawings: Sequence[tuple[Names, Drawable]]
    left_out: Mapping[str, int] = field(default_factory=dict)


AnyCollection = TypeVar("AnyCollection", bound=Collection)


class DrawnCollection(Generic[AnyCollection]):
    """The drawings of one collection that show something: names in memory, images in the file."""

    def __init__(self, collection: AnyCollection, file: Path):
        self.collection = collection
        self.file = file
        about = json.loads(self._read("about").tobytes())
        self.left_out: dict[str, int] = about["left_out"]
        self.names = [Names(name, tuple(captions), style) for name, captions, style in about["names"]]

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
    collections: Sequence[AnyCollection],
    list_drawings: Callable[[AnyCollection], Listing],
    folder: Path,
    processes: int | None = None,
) -> list[DrawnCollection[AnyCollection]]:
    """Draw what is not yet drawn into one file per collection, in `folder`, and open them all."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {collection.name: folder / f"{collection.name}.npz" for collection in collections}
    missing = [collection for collection in collections if not _is_whole(files[collection.name])]
    if missing:
        if len(missing) < len(collections):
            StatusLine().say(f"{len(collections) - len(missing)} of {len(collections)} collections are already drawn")
        with Drawers(processes) as drawers:
            # Counted in images, because collections are of very different sizes.
            drawn = (names for one in missing for names in _draw(list_drawings(one), files[one.name], drawers))
            for _ in track(drawn, "drawing", sum(collection.expected for collection in missing), "images"):
                pass
    return [DrawnCollection(collection, files[collection.name]) for collection in collections]


def _draw(listing: Listing, file: Path, drawers: Drawers) -> Iterator[Names]:
    """Draw one collection into its file; gives the names of each drawing as it is drawn."""
    shown, images = [], []
    drawn = drawers.draw([drawing for _, drawing in listing.drawings])
    for (names, _), image in zip(listing.drawings, drawn, strict=True):
        if image:
            shown.append(names)
            images.append(image)
        yield names
    _store(file, shown, images, {**listing.left_out, BLANK: len(listing.drawings) - len(shown)})


def _store(file: Path, names: Sequence[Names], images: Sequence[Drawn], left_out: Mapping[str, int]) -> None:
    """Written beside, brought to the disk and moved into place: neither a kill nor a power cut leaves half of it."""
    about = json.dumps({"left_out": left_out, "names": names})
    thumbnails = stack_thumbnails([image.thumbnail for image in images])
    digests = np.frombuffer(b"".join(image.digest for image in images), np.uint8)
    with new_file(file) as stream:
        np.savez(
            stream,
            about=np.frombuffer(about.encode(), np.uint8),
            digests=digests.reshape(len(names), DIGEST_BYTES),
            grey=thumbnails.grey,
            colour=thumbnails.colour,
            images=np.frombuffer(b"".join(image.png for image in images), np.uint8),
            ends=np.cumsum([len(image.png) for image in images], dtype=np.int64),
        )


def _is_whole(file: Path) -> bool:
    """Whether the file is there and its checksums hold; a damaged one is made again."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
