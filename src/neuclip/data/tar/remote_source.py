"""Image-text pairs in tar shards that lie elsewhere: each is fetched whole, and read here like a local one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np

from neuclip.data.locations import INDEX_SUFFIX
from neuclip.data.order import SHARDS_TOGETHER, Order, ShardOrder
from neuclip.data.sample import Sample
from neuclip.data.source import ShardFacts, SourceFiles
from neuclip.data.tar.cache import ShardCache, check_cache_size, digest_of
from neuclip.data.tar.gzip import damage_of, is_packed
from neuclip.data.tar.index import (
    BLOCK,
    NO_CAPTION,
    ShardIndex,
    build_index_of_file,
    cached_index_place,
    read_index,
    store_index,
)
from neuclip.data.tar.remote import TOGETHER, Gone, Limits, RemoteShard, TooLarge, ask, fetch, remote_shards
from neuclip.data.tar.source import TarSource
from neuclip.errors import RunFailed, UserError
from neuclip.progress import track
from neuclip.secrets import without_query

SIZE_AT = 124  # where a tar header has the size of its member, in octal digits
RECORD = 10_240  # bytes: tar writes whole records
SMALL_INDEX, LARGEST_INDEX = 1 << 20, 1 << 30  # bytes: of what is read into memory


class RemoteTarSource(TarSource):
    """As TarSource, for shards at URLs. Their indexes are those beside them (`x.tar.index.npz`), or are built by
    fetching each shard once; both are kept in the cache folder.

    >>> RemoteTarSource("pairs", remote_shards("s3://bucket/pairs", Limits()), "", Limits())
    """

    kind = "remote tar"
    fetches = True
    most_open = SHARDS_TOGETHER  # an open file keeps its disk space when it is evicted

    def __init__(self, name: str, remote: list[RemoteShard], caption_key: str, limits: Limits):
        self.remote = remote
        self.cache = ShardCache(limits)
        self.indexes_beside = True  # until one is missing
        self._ahead: list[int] = []  # shards that were fetched ahead last
        self._compared: set[int] = set()  # shards whose headers are odd and whose index fits
        urls = [without_query(shard.url) for shard in remote]
        self._join(name, urls, caption_key, urls, [digest_of(shard) for shard in remote])

    def order(self, seed: int) -> Order:
        check_cache_size([self], SHARDS_TOGETHER)
        return ShardOrder(self.joined.ends, seed)

    def mark_needed(self, order: Order, start: int) -> None:
        if isinstance(order, ShardOrder):
            self.cache.mark_used([self.remote[shard] for shard in order.shards_ahead(start)])

    def prefetch(self, order: Order, start: int, count: int) -> None:
        """Fetch the shards of the group that is read at `start` and of the next, in the background. The order of
        evaluation has no groups: it fetches each shard when it gets there."""
        if isinstance(order, ShardOrder) and (ahead := order.shards_ahead(start)) != self._ahead:
            self._ahead = ahead
            self.cache.want([self.remote[shard] for shard in ahead])

    def describe_files(self) -> SourceFiles:
        sizes = [shard.size for shard in self.remote]
        return SourceFiles(len(sizes), sum(sizes) if min(sizes) >= 0 else None)

    def file_versions(self) -> Iterator[str]:
        return map(digest_of, self.remote)

    def places(self) -> set[str]:
        return set(self.shards)

    def cheap_ids(self) -> int:
        """Those of the first shard that has any."""
        return int(self.joined.ends[self.joined.ends > 0][0])

    def shard_facts(self) -> ShardFacts:
        disk_bytes = [self._disk_bytes(shard) for shard in range(len(self.remote))]
        return ShardFacts(super().shard_facts().samples, disk_bytes, self.cache.limits.cache_size)

    def has_remote_indexes(self) -> bool:
        """As far as the listing says. Where it does not, because the indexes are known here, the first is asked for."""
        known = [shard.index_beside for shard in self.remote]
        if None not in known or not self.indexes_beside:
            return all(known)
        url = self.remote[0].url + INDEX_SUFFIX
        try:
            return "?" not in url and ask(url, lambda system, path: bool(system.exists(path)), self.cache.limits)
        except (UserError, RunFailed):
            return False

    def _disk_bytes(self, shard: int) -> int:
        """What a shard takes on this disk. For a packed shard, or one of unknown size, the index says where the last
        sample ends; what else may follow it is not counted."""
        remote = self.remote[shard]
        if remote.size >= 0 and not is_packed(remote.name):
            return remote.size
        rows = self._rows(shard)
        ends = [
            int((rows[f"{member}_block"].astype(np.int64) * BLOCK + rows[f"{member}_size"]).max(initial=0))
            for member in ("image", "caption")
        ]
        return (max(ends) + 2 * BLOCK + RECORD - 1) // RECORD * RECORD  # two empty blocks end a tar

    def _rows(self, shard: int) -> np.ndarray:
        ends = self.joined.ends
        return self.joined.rows[ends[shard - 1] if shard else 0 : ends[shard]]

    def _indexes(self) -> Iterator[ShardIndex]:
        missing = [shard for shard in range(len(self.remote)) if not self.index_places(shard)[0].exists()]
        try:
            self._make_indexes(missing)
        except Gone as gone:
            raise UserError(gone.message) from gone
        return super()._indexes()

    def _make_indexes(self, missing: list[int]) -> None:
        """Several at a time: most of the time is waiting for the remote."""
        if not missing:
            return
        self.index(missing[0])  # from now on it is known whether there are indexes beside the shards
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
        index, _ = read_index(self.index_places(shard)[0], (self.remote[shard].size, 0))
        if index is None:
            index = self._index_beside(shard) or self.reread(shard)
            self.store(shard, index)
        return index

    def reread(self, shard: int) -> ShardIndex:
        with os.fdopen(self.cache.open(self.remote[shard]), "rb") as file:  # open: it may be evicted meanwhile
            return build_index_of_file(file, self.caption_key, damage_of(self.cache.place(self.remote[shard])))

    def store(self, shard: int, index: ShardIndex) -> None:
        store_index(self.index_places(shard), index, (self.remote[shard].size, 0))

    def index_places(self, shard: int) -> list[Path]:
        remote = self.remote[shard]
        return [cached_index_place(digest_of(remote), remote.name, self.caption_key)]

    def _index_beside(self, shard: int) -> ShardIndex | None:
        """None when there is none: there cannot be one for packed shards, signed addresses and a caption key. Where the
        first shard has none, the others are not asked for."""
        remote = self.remote[shard]
        beside = remote.index_beside if remote.index_beside is not None else self.indexes_beside
        if not beside or self.caption_key or "?" in remote.url or not remote.name.lower().endswith(".tar"):
            self.indexes_beside = self.indexes_beside and remote.index_beside is True
            return None
        # It names each sample in fewer bytes than the headers of a tar do: it is smaller than its shard.
        most = min(max(remote.size, SMALL_INDEX), LARGEST_INDEX) if remote.size >= 0 else LARGEST_INDEX
        try:
            file = fetch(
                remote.url + INDEX_SUFFIX, self.cache.place(remote), -1, replace(self.cache.limits, cache_size=most)
            )
        except Gone:
            self.indexes_beside = False
            return None
        except TooLarge:
            self.changes[self.shards[shard]] = f"its index has more than {most:,} bytes"
            return None
        try:
            index, why_not = read_index(file, (remote.size, None), most)  # uploading changed the time
        finally:
            file.unlink(missing_ok=True)
        if index is None:
            self.changes[self.shards[shard]] = why_not or "its index is of another version"
        return index

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        self._check_index(id)
        return super().__getitem__(id)

    def _check_index(self, id: int) -> None:
        """An index beside a shard may be of an earlier version of it: tars grow in steps of 10,240 bytes, and the size
        often stays the same. The header before each member tells. Where its size stands elsewhere, the whole shard is
        compared."""
        image_block, image_size, caption_block, caption_size, kind, _ = self.joined.rows[id].item()
        shard = self.joined.shard_of(id)
        try:
            file = self._file(shard)
        except OSError:  # reading it says why
            return
        fits = _header_says(file, image_block, image_size)
        if fits and (kind == NO_CAPTION or _header_says(file, caption_block, caption_size)):
            return
        if shard not in self._compared:
            if not np.array_equal(self.reread(shard).rows, self._rows(shard)):
                raise RunFailed(
                    f"{self.shards[shard]}: is not the shard that the index beside it describes; run neuclip data "
                    f"index {self.shards[shard]} --verify, and upload the index anew"
                )
            self._compared.add(shard)

    def _open(self, shard: int) -> int:
        return self.cache.open(self.remote[shard])


def _header_says(file: int, block: int, size: int) -> bool:
    """Whether the tar header before this block is of a member of this size."""
    try:
        return int(os.pread(file, 12, (block - 1) * BLOCK + SIZE_AT).rstrip(b"\0 "), 8) == size
    except (OSError, ValueError):
        return False


def open_remote(name: str, address: str, caption_key: str, limits: Limits) -> RemoteTarSource:
    """Shards at a remote address: one, a brace pattern, or a folder."""
    return RemoteTarSource(name, remote_shards(address, limits), caption_key, limits)
