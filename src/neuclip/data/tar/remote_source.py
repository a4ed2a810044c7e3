"""Image-text pairs in tar shards that lie elsewhere: each is fetched whole, and read here like a local one."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from neuclip.data.locations import INDEX_SUFFIX
from neuclip.data.order import Order
from neuclip.data.sample import Sample
from neuclip.data.source import SourceFiles
from neuclip.data.tar.cache import ShardCache, digest_of
from neuclip.data.tar.gzip import damage_of
from neuclip.data.tar.index import (
    BLOCK,
    NO_CAPTION,
    ShardIndex,
    cached_place,
    index_of_file,
    read_index,
    write_index,
)
from neuclip.data.tar.remote import (
    TOGETHER,
    Gone,
    Limits,
    RemoteShard,
    asked_for,
    fetch_bytes,
    without_query,
)
from neuclip.data.tar.source import TarSource
from neuclip.errors import RunFailed
from neuclip.progress import track

SIZE_AT = 124  # where a tar header has the size of its member, in octal digits
SHARDS_TOGETHER = 16  # that training mixes at a time; part of the order, so a change of it changes every remote run


class RemoteTarSource(TarSource):
    """As TarSource, for shards at URLs. Their indexes are those beside them (`x.tar.index.npz`), or made by fetching
    each shard once; both are kept in the cache folder.

    >>> RemoteTarSource("pairs", remote_shards("s3://bucket/pairs", Limits()), "", Limits())
    """

    kind = "remote tar"
    fetches = True
    most_open = SHARDS_TOGETHER  # an open file keeps its disk space when it is evicted

    def __init__(self, name: str, remote: list[RemoteShard], caption_key: str, limits: Limits):
        self.remote = remote
        self.cache = ShardCache(limits)
        self.indexes_beside = True  # until one is missing
        self._compared: set[int] = set()  # shards whose headers are odd and whose index fits
        shown = [without_query(shard.url) for shard in remote]
        self._join(name, shown, [digest_of(shard) for shard in remote], caption_key)

    def _numbers(self) -> Iterator[int]:
        missing = [shard for shard in range(len(self.remote)) if not self._place(shard).exists()]
        try:
            self._make_indexes(missing)
        except Gone as gone:
            raise asked_for(gone) from gone
        yield from super()._numbers()

    def _make_indexes(self, missing: list[int]) -> None:
        """Several at a time: most of the time is waiting for the remote."""
        if not missing:
            return
        self._make_index(missing[0])  # whether there are indexes beside the shards is then known
        rest = missing[1:]
        if rest and not self.indexes_beside:
            sizes = [self.remote[shard].size for shard in missing]
            size = f"{sum(sizes) / 1e6:,.0f} MB in all" if min(sizes) >= 0 else "their size is not known"
            print(f"indexing {len(missing)} shards: each is fetched once, {size}", file=sys.stderr)
        with ThreadPool(TOGETHER) as pool:
            for _ in track(pool.imap_unordered(self._make_index, rest), "indexing", len(rest), "remote shards"):
                pass

    def _make_index(self, shard: int) -> None:
        self.index(shard)

    def index(self, shard: int) -> ShardIndex:
        index, _ = read_index(self._place(shard), (self.remote[shard].size, 0))
        if index is None:
            index = self._index_beside(shard) or self.reread(shard)
            self.store(shard, index)
        return index

    def reread(self, shard: int) -> ShardIndex:
        with os.fdopen(self.cache.open(self.remote[shard]), "rb") as file:  # open: it may be evicted meanwhile
            damage = damage_of(self.cache.place(self.remote[shard]))
            return index_of_file(file, self.caption_key, damage)

    def store(self, shard: int, index: ShardIndex) -> None:
        write_index(self._place(shard), index, (self.remote[shard].size, 0))

    def _place(self, shard: int) -> Path:
        remote = self.remote[shard]
        return cached_place(digest_of(remote), remote.name, self.caption_key)

    def _index_beside(self, shard: int) -> ShardIndex | None:
        """None when there is none: for packed shards, signed addresses and other captions than the usual there cannot
        be one. Where the first shard has none, the others are not asked for."""
        remote = self.remote[shard]
        beside = remote.index_beside if remote.index_beside is not None else self.indexes_beside
        if not beside or self.caption_key or "?" in remote.url or not remote.name.lower().endswith(".tar"):
            self.indexes_beside = self.indexes_beside and remote.index_beside is True
            return None
        try:
            content = fetch_bytes(remote.url + INDEX_SUFFIX, self.cache.limits)
        except Gone:
            self.indexes_beside = False
            return None
        index, why_not = read_index(io.BytesIO(content), (remote.size, None))  # uploading changed the time
        if index is None:
            self.changes[self.shards[shard]] = why_not or "its index is of another version"
        return index

    def __getitem__(self, id: int) -> Sample:
        if 0 <= id < len(self):
            self._check_index(id)
        return super().__getitem__(id)

    def _check_index(self, id: int) -> None:
        """An index beside a shard may be of what the shard was before: tars grow in steps of 10,240 bytes, so the size
        tells little. The header before each member tells; a few, with their size in another place, are looked up."""
        image_block, image_size, caption_block, caption_size, kind, _ = self.joined.rows[id].item()
        shard = self.joined.shard_of(id)
        try:
            file = self._file(shard)
        except OSError:  # reading tells
            return
        fits = _header_says(file, image_block, image_size)
        if fits and (kind == NO_CAPTION or _header_says(file, caption_block, caption_size)):
            return
        if shard not in self._compared:
            first = int(self.joined.ends[shard - 1]) if shard else 0
            found = self.reread(shard).rows
            if not np.array_equal(found, self.joined.rows[first : self.joined.ends[shard]]):
                raise RunFailed(
                    f"{self.shards[shard]}: is not the shard that the index beside it describes; run neuclip data "
                    f"index {self.shards[shard]} --verify, and upload the index anew"
                )
            self._compared.add(shard)

    def order(self, seed: int) -> Order:
        from neuclip.data.mixture_order import order_of

        return order_of(self, seed)

    def describe_files(self) -> SourceFiles:
        sizes = [shard.size for shard in self.remote]
        return SourceFiles(len(sizes), sum(sizes) if min(sizes) >= 0 else None)

    def places(self) -> set[str]:
        return set(self.shards)

    def cheap_ids(self) -> int | None:
        return int(next(end for end in self.joined.ends if end > 0))

    def _open(self, shard: int) -> int:
        return self.cache.open(self.remote[shard])


def _header_says(file: int, block: int, size: int) -> bool:
    """Whether the tar header before this block is of a member of this size."""
    try:
        return int(os.pread(file, 12, (block - 1) * BLOCK + SIZE_AT).rstrip(b"\0 "), 8) == size
    except (OSError, ValueError):
        return False
