"""`neuclip data index`: the index of shards made ahead of training, told about, and compared with the shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from neuclip.data.faults import by_reason
from neuclip.data.locations import parts_of
from neuclip.data.open import open_source
from neuclip.data.sample import BadSample
from neuclip.data.tar.cache import digest_of
from neuclip.data.tar.index import BLOCK, ROW, ShardIndex, cached_place, places_of
from neuclip.data.tar.remote_source import RemoteTarSource
from neuclip.data.tar.source import TarSource
from neuclip.errors import RunFailed, UserError
from neuclip.progress import track


def opened_shards(address: str, caption_key: str = "") -> list[tuple[str, TarSource]]:
    """The tar sources of an address, each with its part of it; opening makes what is missing of their indexes."""
    names = [part for part, _ in parts_of(address)]
    source = open_source(address, caption_key=caption_key)
    parts = zip(names, source.parts, strict=True)
    found = [(part, source) for part, source in parts if isinstance(source, TarSource)]
    if not found:
        raise UserError(f"{address}: holds no tar shards, and other data need no index; nothing to do")
    return found


def index_facts(address: str, source: TarSource) -> dict[str, Any]:
    """What the index says, for programs; `changed`: shards that were indexed again when they were opened."""
    files = [place for place in _index_files(source) if place is not None]
    without = _without_caption(source)
    return {
        "address": address,
        "name": source.name,
        "samples": len(source),
        "shards": len(source.shards),
        "without_caption": len(without),
        "first_without_caption": _why_without(source, int(without[0])) if len(without) else "",
        "index_folders": list(dict.fromkeys(str(file.parent) for file in files)),
        "index_bytes": sum(file.stat().st_size for file in files),
        "index_not_stored": len(source.shards) - len(files),
        "index_mapped_from": None if source.joined.place is None else str(source.joined.place),
        "faults": dict(by_reason(source.faults).most_common()),
        "changed": dict(source.changes),
    }


def index_report(source: TarSource, facts: dict[str, Any]) -> Iterator[str]:
    """The same in lines for people, each fault with its place."""
    yield f"{source.name}: {_plural(len(source), 'sample')} in {_plural(len(source.shards), 'shard')}"
    mapped = facts["index_mapped_from"]
    place = "in memory" if mapped is None else f"mapped from {mapped}"
    yield f"index: {_stored(source, facts)}; {ROW.itemsize} bytes per sample {place}"
    if empty := facts["without_caption"]:
        first = facts["first_without_caption"]
        yield f"without a caption: {_plural(empty, 'sample')}{f'; first: {first}' if first else ''}"
    for shard, change in source.changes.items():
        yield f"changed: {shard}: {change}"
    for fault in source.faults:
        several = f" ({fault.times:,})" if fault.times > 1 else ""
        yield f"fault: {fault.reason}{several}: {fault.where}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _without_caption(source: TarSource) -> np.ndarray:
    """Ids."""
    pieces = track(source.caption_pieces(), "counting captions", len(source.shards), "shards")
    starts = [0, *source.joined.ends.tolist()]
    empty = [np.flatnonzero(np.diff(piece.first.ends, prepend=0) == 0) for piece in pieces]
    return np.concatenate([ids + start for ids, start in zip(empty, starts, strict=False)])


def _why_without(source: TarSource, id: int) -> str:
    """As reading it says; "" of an image with a label, which needs no caption."""
    try:
        source[id]
    except (BadSample, RunFailed) as bad:
        return f"{bad.reason}, {bad.where}" if isinstance(bad, BadSample) else str(bad)
    return ""


def _index_files(source: TarSource) -> Iterator[Path | None]:
    """Of each shard, where its index lies, which depends on what can be written; None: nowhere."""
    if isinstance(source, RemoteTarSource):
        places = [[cached_place(digest_of(shard), shard.name, source.caption_key)] for shard in source.remote]
    else:
        places = [places_of(path, source.caption_key) for path in source.paths]
    for choice in places:
        yield next((place for place in choice if place.is_file()), None)


def _stored(source: TarSource, facts: dict[str, Any]) -> str:
    if isinstance(source, RemoteTarSource):
        return "in the cache folder"
    folders, missing = facts["index_folders"], facts["index_not_stored"]
    where = (
        f"in {folders[0]}{f' and {len(folders) - 1} other folders' if folders[1:] else ''}" if folders else "nowhere"
    )
    return f"{where}{f'; {missing:,} could not be stored and are made again by every run' if missing else ''}"


def verified(source: TarSource) -> Iterator[tuple[str, str]]:
    """Read every shard again; say of each that does not fit its index what differs, and correct the index."""
    for shard in track(range(len(source.shards)), "verifying", len(source.shards), "shards"):
        found = source.reread(shard)
        wrong = difference(source.index(shard), found)
        if wrong:
            source.store(shard, found)
            source.joined.forget()
            yield source.shards[shard], wrong


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
            return f"image {number} has {size:,} bytes at byte {place:,}, in its index {size_was:,} at byte {was:,}"
        return f"caption or label {number} does not lie where its index says, or is of another kind"
    captions = zip(stored.captions.strings(), found.captions.strings(), strict=True)
    for number, (before, now) in enumerate(captions):
        if before != now:
            return f"caption {number} is {now!r}, in its index {before!r}"
    if not np.array_equal(stored.further, found.further):
        return "captions beyond the first are not those that its index counts"
    return "" if stored.notes == found.notes else "its faults are not those that its index lists"
