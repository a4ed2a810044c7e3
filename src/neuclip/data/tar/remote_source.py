"""Image-text pairs in remote tar shards. Each shard is downloaded completely and then read like a local one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import BinaryIO

import numpy as np

from neuclip.data.order import SHARDS_TOGETHER
from neuclip.data.tar.index import (
    INDEX_SUFFIX,
    SMALL_INDEX,
    ShardIndex,
    build_index,
    index_name,
    index_of_file,
    read_index,
    store_index,
)
from neuclip.data.tar.remote import CONTINUE, PARALLEL_REQUESTS, Limits, RemoteNotFound, RemoteShard, ShardCache, fetch
from neuclip.data.tar.source import TarSource
from neuclip.errors import RunFailed, UserError
from neuclip.files import cache_folder, new_file
from neuclip.progress import track
from neuclip.secrets import without_query

LARGEST_INDEX = 1 << 30  # bytes; an index is read into memory


class RemoteTarSource(TarSource):
    """A TarSource for shards at URLs. Their indexes are downloaded if they are beside the shards (`x.tar.index.npz`);
    otherwise each shard is downloaded once to build its index. Both are kept in the cache folder.

    >>> RemoteTarSource("pairs", list_shards(["s3://bucket/pairs"], Limits()), "", Limits())        # doctest: +SKIP
    """

    kind = "remote tar"

    def __init__(self, name: str, remote: Sequence[RemoteShard], caption_key: str, limits: Limits):
        self.remote, self.limits = list(remote), limits
        self.paths, self.stamps = [], []
        self._indexes_beside = True  # assumed until one is missing
        self._ahead: list[int] = []  # the shards of the latest prefetch
        self.cache = ShardCache(limits)  # without a check of downloads, which needs the index
        urls = [without_query(shard.url) for shard in self.remote]
        self._join(name, urls, caption_key, [urls, [shard.key for shard in self.remote]])
        self.cache = ShardCache(limits, self._check)
        self.shard_ends = self.ends

    def prefetch(self, shards: Sequence[int]) -> None:
        """Download these shards in the background: the group that is read now, and the next group."""
        ahead = list(shards)
        if ahead != self._ahead:
            self._ahead = ahead
            self.cache.prefetch([self.remote[shard] for shard in ahead])

    def refuse_small_cache(self) -> None:
        """Raise UserError if the cache is too small for two groups of shards, the one that is read and the next one:
        shards would be downloaded over and over."""
        sizes = sorted((shard.size for shard in self.remote), reverse=True)[: 2 * SHARDS_TOGETHER]
        if sum(sizes) > self.limits.cache_size:
            raise UserError(
                f"data.cache_size {self.limits.cache_size:,} is too small: {len(sizes)} shards of {self.name} must be "
                f"on disk at the same time; give --data.cache_size {sum(sizes)} or more"
            )

    def _open(self, shard: int) -> BinaryIO:
        return _open_shard(self.cache, self.remote[shard])

    def _check(self, shard: RemoteShard, file: Path) -> None:
        """Raise RunFailed if a download does not match its index. An index beside a shard may belong to an earlier
        version, often of the same size, because tars grow in steps."""
        number = self.remote.index(shard)
        rows = self.rows[self.ends[number - 1] if number else 0 : self.ends[number]]
        if not np.array_equal(build_index(file, self.caption_key).rows, rows):
            for copy in (self._index_path(shard), self.joined):
                copy.unlink(missing_ok=True)
            raise RunFailed(
                f"{self.shards[number]}: does not match the index beside it; remove that index, or build it again with "
                "neuclip data index and upload it, then start again"
            )

    def _indexes(self) -> Iterator[ShardIndex]:
        try:
            first = self._index(0)  # sets _indexes_beside
            missing = [shard for shard in self.remote[1:] if not self._index_path(shard).exists()]
            if missing and not self._indexes_beside:
                sizes = [shard.size for shard in self.remote]
                size = f"{sum(sizes) / 1e6:,.0f} MB in total" if min(sizes) >= 0 else "their size is not known"
                print(f"indexing {len(self.remote)} shards: each is fetched once, {size}", file=sys.stderr)
            yield first
            with ThreadPool(PARALLEL_REQUESTS) as pool:
                rest = pool.imap(self._index, range(1, len(self.remote)))
                yield from track(rest, "indexing", len(self.remote) - 1, "remote shards") if missing else rest
        except RemoteNotFound as error:
            raise UserError(str(error).removesuffix(f"; {CONTINUE}")) from error

    def _index_path(self, shard: RemoteShard) -> Path:
        return cache_folder() / "indexes" / f"{shard.key}-{index_name(shard.name, self.caption_key)}"

    def _index(self, number: int) -> ShardIndex:
        shard = self.remote[number]
        index = read_index(self._index_path(shard), shard.size, 0)
        if index is None:
            index = self._index_beside(shard)
            if index is None:
                with self.cache.open(shard) as file:  # kept open, because it may be evicted meanwhile
                    index = index_of_file(file, self.caption_key)
            store_index([self._index_path(shard)], index, shard.size, 0)
        return index

    def _index_beside(self, shard: RemoteShard) -> ShardIndex | None:
        """Download the index beside a shard; None if there is none. Packed shards, signed URLs and caption keys never
        have one. After the first missing index, no others are requested."""
        if not self._indexes_beside or self.caption_key or "?" in shard.url or not shard.name.lower().endswith(".tar"):
            self._indexes_beside = False
            return None
        # An index is smaller than its shard, because a tar's headers take more bytes per sample.
        max_bytes = min(max(shard.size, SMALL_INDEX), LARGEST_INDEX) if shard.size >= 0 else LARGEST_INDEX
        path = cache_folder() / "indexes" / f"{shard.key}-fetched{INDEX_SUFFIX}"
        try:
            with new_file(path) as file:
                fetch(shard.url + INDEX_SUFFIX, Path(file.name), -1, max_bytes, self.limits)
        except RemoteNotFound:
            self._indexes_beside = False
            return None
        except RunFailed as error:
            print(f"{error}; the shard is fetched and indexed instead", file=sys.stderr)
            return None
        index = read_index(path, shard.size, None, max_bytes)  # any time, because uploading changed it
        path.unlink(missing_ok=True)
        return index


@lru_cache(maxsize=SHARDS_TOGETHER)  # few, because an open file takes disk space even after it is evicted
def _open_shard(cache: ShardCache, shard: RemoteShard) -> BinaryIO:
    return cache.open(shard)
