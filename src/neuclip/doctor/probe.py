"""A look at some of the pairs: read, decoded, measured; what a run would read first."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

from PIL import Image, ImageOps

from neuclip.data.faults import replacements
from neuclip.data.order import Order
from neuclip.data.sample import BadSample, Sample
from neuclip.data.source import Source
from neuclip.data.transforms import decode
from neuclip.progress import track

LOOKED_AT = 500  # pairs, unless more or fewer are asked for
SECONDS = 5.0  # unless a number is asked for: large images on a slow disk take what they take
FEWEST = 24  # pairs that are read however long it takes
SHOWN = 24  # images of the contact sheet
BAD_FOLLOWED = 10  # bad pairs for which a stand-in is looked for
THUMBNAIL = 128  # pixels


@dataclass(frozen=True)
class Shown:
    """One pair to show."""

    id: int
    size: tuple[int, int]  # width, height
    thumbnail: Image.Image
    caption: str


@dataclass
class Look:
    """What was met."""

    read: int = 0
    image_bytes: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width, height
    modes: Counter[str] = field(default_factory=Counter)
    captions: list[tuple[str, ...]] = field(default_factory=list)
    seconds: float = 0.0  # of reading and decoding
    faults: Counter[str] = field(default_factory=Counter)
    first_fault: str = ""
    bad_ids: list[int] = field(default_factory=list)
    without_stand_in: str = ""  # the first bad pair found whose place no other can take
    shown: list[Shown] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return sum(self.faults.values())


def look_at(source: Source, *, seed: int, count: int | None = None) -> Look:
    """Read `count` pairs in the order of a run with this seed; None: 500, or what five seconds allow."""
    ids = ids_to_read(source, seed, count or LOOKED_AT)
    look = Look()
    end = time.monotonic() + SECONDS
    for id in track(ids, "reading pairs", len(ids)):
        if count is None and look.read >= FEWEST and time.monotonic() > end:
            break
        look.read += 1
        try:
            _meet(source, id, look)
        except BadSample as bad:
            look.faults[bad.reason] += 1
            look.bad_ids.append(id)
            look.first_fault = look.first_fault or f"{bad.reason}, {bad.where or source.where(id)}"
    if look.bad < look.read and not source.fetches:  # the neighbours of remote pairs may lie in another shard
        alone = (id for id in look.bad_ids[:BAD_FOLLOWED] if not _has_stand_in(source, id))
        look.without_stand_in = next((source.where(id) for id in alone), "")
    return look


def ids_to_read(source: Source, seed: int, count: int) -> list[int]:
    """The first of the run's order, each once. Of remote data those of the first shard that has
    any: each further one would be fetched."""
    if (cheap := source.cheap_ids()) is not None:
        return Order(cheap, seed).ids(0, min(count, cheap)).tolist()
    order = source.order(seed)
    return list(dict.fromkeys(order.ids(0, min(count, order.size)).tolist()))


def _has_stand_in(source: Source, id: int) -> bool:
    for other in replacements(id, len(source)):
        with contextlib.suppress(BadSample):
            _read(source, other)
            return True
    return False


def _read(source: Source, id: int) -> tuple[Sample, Image.Image]:
    sample = source[id]
    if not sample.captions:
        raise BadSample("caption is missing", source.where(id))
    return sample, decode(sample.image)


def _meet(source: Source, id: int, look: Look) -> None:
    begun = time.perf_counter()
    try:
        sample, image = _read(source, id)
    finally:
        look.seconds += time.perf_counter() - begun
    look.captions.append(sample.captions)
    look.image_bytes += len(sample.image)
    look.sizes.append(image.size)
    look.modes[image.mode] += 1
    if len(look.shown) < SHOWN:
        thumbnail = ImageOps.contain(image.convert("RGB"), (THUMBNAIL, THUMBNAIL))  # in the colours training sees
        look.shown.append(Shown(id, image.size, thumbnail, sample.captions[0]))
