"""A sample of the pairs, read, decoded and measured: those that a run would read first."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field

from PIL import Image, ImageOps

from neuclip.data.decoding import decode
from neuclip.data.loader import TRIES
from neuclip.data.mixture import order_of
from neuclip.data.order import Order
from neuclip.data.source import BadSample, Sample, Source
from neuclip.progress import track

PROBED = 500  # pairs, unless the user gives a number
SECONDS = 5.0  # unless the user gives a number of pairs: large images on a slow disk take long
FEWEST = 24  # pairs that are read however long it takes
SHOWN = 24  # images of the contact sheet
BAD_FOLLOWED = 10  # bad pairs for which a replacement is looked for
THUMBNAIL = 128  # pixels


@dataclass(frozen=True)
class ShownPair:
    """One pair to show."""

    id: int
    size: tuple[int, int]  # width, height
    thumbnail: Image.Image
    caption: str


@dataclass
class SampleProbe:
    """What the pairs that were read hold."""

    read: int = 0
    image_bytes: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)  # width, height
    modes: Counter[str] = field(default_factory=Counter)
    captions: list[tuple[str, ...]] = field(default_factory=list)
    seconds: float = 0.0  # of reading and decoding
    faults: Counter[str] = field(default_factory=Counter)
    first_fault: str = ""
    bad_ids: list[int] = field(default_factory=list)
    without_replacement: str = ""  # where the first bad pair is that no other can replace
    shown: list[ShownPair] = field(default_factory=list)

    @property
    def bad(self) -> int:
        return sum(self.faults.values())


def probe_samples(source: Source, *, seed: int, count: int | None = None) -> SampleProbe:
    """Read `count` pairs in the order of a run with this seed; None: 500, or what five seconds allow."""
    ids = ids_to_read(source, seed, count or PROBED)
    probe = SampleProbe()
    end = time.monotonic() + SECONDS
    for id in track(ids, "reading pairs", len(ids)):
        if count is None and probe.read >= FEWEST and time.monotonic() > end:
            break
        probe.read += 1
        try:
            _probe_one(source, id, probe)
        except BadSample as bad:
            probe.faults[bad.reason] += 1
            probe.bad_ids.append(id)
            probe.first_fault = probe.first_fault or f"{bad.reason}, {bad.where or source.where(id)}"
    if probe.bad < probe.read and source.shard_ends is None:  # the neighbours of remote pairs may lie in another shard
        unreplaced = (id for id in probe.bad_ids[:BAD_FOLLOWED] if not _has_replacement(source, id))
        probe.without_replacement = next((source.where(id) for id in unreplaced), "")
    return probe


def ids_to_read(source: Source, seed: int, count: int) -> list[int]:
    """The first of the run's order, each once. Of remote data those of the first shard that has any: each further one
    would be downloaded."""
    ends = source.shard_ends
    order = order_of(source, seed) if ends is None else Order(int(ends[ends > 0][0]), seed)
    return list(dict.fromkeys(order.ids(0, min(count, order.size)).tolist()))


def _has_replacement(source: Source, id: int) -> bool:
    for other in ((id + step) % len(source) for step in range(1, min(TRIES, len(source) - 1) + 1)):
        with contextlib.suppress(BadSample):
            _read(source, other)
            return True
    return False


def _read(source: Source, id: int) -> tuple[Sample, Image.Image]:
    sample = source[id]
    if not sample.captions:
        raise BadSample("caption is missing", source.where(id))
    return sample, decode(sample.image)


def _probe_one(source: Source, id: int, probe: SampleProbe) -> None:
    start = time.perf_counter()
    try:
        sample, image = _read(source, id)
    finally:
        probe.seconds += time.perf_counter() - start
    probe.captions.append(sample.captions)
    probe.image_bytes += len(sample.image)
    probe.sizes.append(image.size)
    probe.modes[image.mode] += 1
    if len(probe.shown) < SHOWN:
        thumbnail = ImageOps.contain(image.convert("RGB"), (THUMBNAIL, THUMBNAIL))  # in the colours training sees
        probe.shown.append(ShownPair(id, image.size, thumbnail, sample.captions[0]))
