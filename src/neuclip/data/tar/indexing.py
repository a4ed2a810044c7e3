"""`neuclip data index`: what the indexes of shards say, and whether they fit their shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from neuclip.data.faults import by_reason
from neuclip.data.sample import BadSample
from neuclip.data.source import Source
from neuclip.data.tar.index import BLOCK, ROW, ShardIndex
from neuclip.data.tar.source import TarSource
from neuclip.errors import RunFailed
from neuclip.formatting import plural
from neuclip.progress import track
from neuclip.secrets import without_query


def is_tar(source: Source) -> TypeGuard[TarSource]:
    """Whether it is made of tar shards, and has an index."""
    return source.shard_facts() is not None


def index_facts(address: str, source: TarSource) -> dict[str, Any]:
    """What the index says, for programs; `changed`: shards that were indexed again when they were opened."""
    files = [file for shard in range(len(source.shards)) if (file := _index_file(source, shard)) is not None]
    empty = _ids_without_caption(source)
    return {
        "address": without_query(address),
        "name": source.name,
        "samples": len(source),
        "shards": len(source.shards),
        "without_caption": len(empty),
        "first_without_caption": _why_without_caption(source, int(empty[0])) if len(empty) else "",
        "index_folders": list(dict.fromkeys(str(file.parent) for file in files)),
        "index_bytes": sum(file.stat().st_size for file in files),
        "index_not_stored": len(source.shards) - len(files),
        "index_mapped_from": None if source.joined.place is None else str(source.joined.place),
        "faults": dict(by_reason(source.faults).most_common()),
        "changed": dict(source.changes),
    }


def index_report(source: TarSource, facts: dict[str, Any]) -> list[str]:
    """The same in lines for people, each fault with its place."""
    mapped = facts["index_mapped_from"]
    in_memory = "in memory" if mapped is None else f"mapped from {mapped}"
    lines = [
        f"{source.name}: {plural(len(source), 'sample')} in {plural(len(source.shards), 'shard')}",
        f"index: {_stored(source, facts)}; {ROW.itemsize} bytes per sample {in_memory}",
    ]
    if empty := facts["without_caption"]:
        first = facts["first_without_caption"]
        lines.append(f"without a caption: {plural(empty, 'sample')}{f'; first: {first}' if first else ''}")
    lines += [f"changed: {shard}: {change}" for shard, change in source.changes.items()]
    for fault in source.faults:
        several = f" ({fault.times:,})" if fault.times > 1 else ""
        lines.append(f"fault: {fault.reason}{several}: {fault.where}")
    return lines


def _index_file(source: TarSource, shard: int) -> Path | None:
    """Where the index of a shard lies, which depends on what can be written; None: nowhere."""
    return next((place for place in source.index_places(shard) if place.is_file()), None)


def _stored(source: TarSource, facts: dict[str, Any]) -> str:
    if source.fetches:
        return "in the cache folder"
    folders, missing = facts["index_folders"], facts["index_not_stored"]
    others = f" and {len(folders) - 1} other folders" if folders[1:] else ""
    where = f"in {folders[0]}{others}" if folders else "nowhere"
    return f"{where}; {missing:,} could not be stored and are built again by every run" if missing else where


def _ids_without_caption(source: TarSource) -> np.ndarray:
    pieces = track(source.caption_pieces(), "counting captions", len(source.shards), "shards")
    empty = [np.diff(piece.first.ends, prepend=0) == 0 for piece in pieces]
    return np.flatnonzero(np.concatenate(empty))


def _why_without_caption(source: TarSource, id: int) -> str:
    """As reading it says; "" of an image with a label, which needs no caption."""
    try:
        source[id]
    except BadSample as bad:
        return f"{bad.reason}, {bad.where}"
    except RunFailed as failure:
        return str(failure)
    return ""


def verify(source: TarSource) -> Iterator[tuple[str, str]]:
    """Read every shard again. Of each that does not fit its index: its name and what differs; the index is replaced."""
    for shard in track(range(len(source.shards)), "verifying", len(source.shards), "shards"):
        index = source.reread(shard)
        if wrong := _difference(source.index(shard), index):
            source.store(shard, index)
            source.joined.forget()
            yield source.shards[shard], wrong


def _difference(stored: ShardIndex, index: ShardIndex) -> str:
    """The first thing in which the stored index differs from that of the shard; "" if nothing does."""
    if len(stored.rows) != len(index.rows):
        return f"its index has {len(stored.rows):,} samples, the shard has {len(index.rows):,}"
    if (stored.rows != index.rows).any():
        number = int(np.flatnonzero(stored.rows != index.rows)[0])
        before, now = _image_place(stored.rows[number]), _image_place(index.rows[number])
        if before != now:
            return f"image {number} has {now}, in its index {before}"
        return f"caption or label {number} does not lie where its index says, or is of another kind"
    captions = zip(stored.captions.strings(), index.captions.strings(), strict=True)
    for number, (before, now) in enumerate(captions):
        if before != now:
            return f"caption {number} is {now!r}, in its index {before!r}"
    if not np.array_equal(stored.further, index.further):
        return "captions beyond the first are not those that its index counts"
    return "" if stored.notes == index.notes else "its faults are not those that its index lists"


def _image_place(row: np.ndarray) -> str:
    return f"{int(row['image_size']):,} bytes at byte {int(row['image_block']) * BLOCK:,}"
