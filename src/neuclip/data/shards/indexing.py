"""`neuclip data index`: the index of shards made ahead of training, told about, and compared with the shards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuclip.data.shards.index import BLOCK, ROW, ShardIndex, places_of
from neuclip.data.source import open_source
from neuclip.data.sources.remote_tar import RemoteTarSource
from neuclip.data.sources.tar import TarSource
from neuclip.errors import AskedWrongly
from neuclip.progress import track


def opened_shards(address: str, caption_key: str = "") -> list[TarSource]:
    """The tar sources of an address; opening makes what is missing of their indexes."""
    source = open_source(address, caption_key=caption_key)
    found = [part for part in getattr(source, "sources", (source,)) if isinstance(part, TarSource)]
    if not found:
        raise AskedWrongly(f"{address}: holds no tar shards, and other data need no index; nothing to do")
    return found


def index_report(source: TarSource) -> Iterator[str]:
    """What the index says, in lines for people."""
    yield f"{source.name}: {len(source):,} samples in {len(source.shards):,} shards"
    place = "in memory" if source.joined.place is None else f"mapped from {source.joined.place}"
    yield f"index: {_stored(source)}; {ROW.itemsize} bytes per sample {place}"
    texts = track(source.caption_texts(), "counting captions", len(source.shards), "shards")
    if empty := sum(int((np.diff(text.ends, prepend=0) == 0).sum()) for text in texts):
        yield f"without a caption: {empty:,} samples"
    for shard, change in source.changes.items():
        yield f"changed: {shard}: {change}"
    for fault in source.faults:
        several = f" ({fault.times:,})" if fault.times > 1 else ""
        yield f"fault: {fault.reason}{several}: {fault.where}"


def _stored(source: TarSource) -> str:
    """Where the index files lie, which depends on what can be written."""
    if isinstance(source, RemoteTarSource):
        return "in the cache folder"
    found = [[place for place in places_of(path, source.caption_key) if place.is_file()] for path in source.paths]
    folders = list(dict.fromkeys(str(places[0].parent) for places in found if places))
    missing = found.count([])
    where = (
        f"in {folders[0]}{f' and {len(folders) - 1} other folders' if folders[1:] else ''}" if folders else "nowhere"
    )
    return f"{where}{f'; {missing:,} could not be stored and are made again by every run' if missing else ''}"


def verified(source: TarSource) -> Iterator[str]:
    """Read every shard again; say of each that does not fit its index what differs, and correct the index."""
    for shard in track(range(len(source.shards)), "verifying", len(source.shards), "shards"):
        found = source.reread(shard)
        wrong = difference(source.index(shard), found)
        if wrong:
            source.store(shard, found)
            source.joined.forget()
            yield f"{source.shards[shard]}: {wrong}"


def difference(stored: ShardIndex, found: ShardIndex) -> str:
    """The first thing that differs, "" if nothing does."""
    if len(stored.rows) != len(found.rows):
        return f"its index has {len(stored.rows):,} samples, the shard has {len(found.rows):,}"
    if (stored.rows != found.rows).any():
        number = int(np.flatnonzero(stored.rows != found.rows)[0])
        before, now = stored.rows[number], found.rows[number]
        was, size_was = int(before["image_block"]) * BLOCK, int(before["image_size"])
        place, size = int(now["image_block"]) * BLOCK, int(now["image_size"])
        if (was, size_was) != (place, size):
            return f"picture {number} has {size:,} bytes at byte {place:,}, in its index {size_was:,} at byte {was:,}"
        return f"caption or label {number} does not lie where its index says, or is of another kind"
    captions = zip(stored.captions.strings(), found.captions.strings(), strict=True)
    for number, (before, now) in enumerate(captions):
        if before != now:
            return f"caption {number} is {now!r}, in its index {before!r}"
    return "" if stored.notes == found.notes else "its faults are not those that its index lists"
