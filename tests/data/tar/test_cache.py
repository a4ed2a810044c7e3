"""Copies of remote shards: each is fetched once and whole, the longest unused go, a new signature is no new one."""

from __future__ import annotations

import os
import threading
from multiprocessing.pool import ThreadPool
from pathlib import Path

import fsspec
import pytest
from neuclip.data.tar.cache import ShardCache, digest_of

from neuclip.data.open import open_source
from neuclip.data.tar.remote import Limits, RemoteShard, describe_shards
from neuclip.errors import RunFailed
from tests.data.small_shards import contents, write_shards
from tests.misbehaving_server import QUICK, Server, join_fetching


def test_a_signature_that_is_renewed_does_not_make_another_shard_and_an_id_does():
    def digest(query: str, version: str = "etag") -> str:
        return digest_of(RemoteShard(f"https://host/x.tar{query}", 100, version))

    assert digest("?X-Amz-Date=1&X-Amz-Signature=a") == digest("?X-Amz-Date=2&X-Amz-Signature=b") == digest("")
    assert digest("?id=1&Expires=5&Signature=a&Key-Pair-Id=k") == digest("?id=1&Expires=6&Signature=b&Key-Pair-Id=k")
    assert digest("?sv=1&se=2&sp=r&sig=a") == digest("?sv=1&se=3&sp=r&sig=b")
    assert digest("?id=1&X-Goog-Signature=a") != digest("?id=2&X-Goog-Signature=a")
    assert digest("?se=1") != digest("?se=2")  # a letter or two that belong to no signature
    assert digest("?X-Amz-Signature=a", version="") != digest("?X-Amz-Signature=b", version="")


def test_a_renewed_signature_fetches_nothing_again(server):
    write_shards(server.folder, [2])
    for signature in ("a", "b"):
        contents(open_source(f"{server.url}/00000.tar?X-Amz-Signature={signature}", limits=QUICK))
    assert server.got["00000.tar"] == 1


class Overlapping(fsspec.AbstractFileSystem):
    """One file of 100 bytes. The first try stops in the middle, and wakes as the second, of a fifth, ends."""

    protocol = "overlapping"
    cachable = False
    tries = 0
    wake, awoken = threading.Event(), threading.Event()

    def get_file(self, rpath, lpath, callback=None, **options):
        Overlapping.tries += 1
        this = Overlapping.tries
        with Path(lpath).open("wb", buffering=0) as file:
            file.write({1: b"x" * 50, 2: b"x" * 20}.get(this, b"x" * 100))
            if this == 1:
                self.wake.wait(20)
                file.write(b"x" * 50)
                self.awoken.set()
        if this == 2:
            self.wake.set()
            self.awoken.wait(20)


def test_a_try_that_was_left_behind_writes_to_no_file_that_is_used(cache, monkeypatch):
    monkeypatch.setattr("neuclip.data.locations.PROTOCOLS", ("overlapping",))
    fsspec.register_implementation("overlapping", Overlapping, clobber=True)
    shard = RemoteShard("overlapping://x.tar", 100, "1")
    place = ShardCache(Limits(10**9, stall_seconds=1, attempts=3, first_wait=0)).path(shard)
    assert place.read_bytes() == b"x" * 100 and Overlapping.tries == 3
    join_fetching()
    assert [file.name for file in (cache / "shards").iterdir() if file.is_file()] == [place.name]


def shards_at(server: Server, sizes: list[int]) -> list:
    write_shards(server.folder, sizes)
    return describe_shards([f"{server.url}/{number:05d}.tar" for number in range(len(sizes))], QUICK)


def test_the_longest_unused_shards_are_evicted_and_open_ones_stay_readable(server):
    shards = shards_at(server, [3] * 4)
    one = shards[0].size
    cache = ShardCache(Limits(cache_size=2 * one, stall_seconds=20))
    file = cache.open(shards[0])
    for number, shard in enumerate(shards):
        os.utime(cache.path(shard), ns=(number, number))  # the order of use, whatever the clock's grain
    assert [cache.place(shard).exists() for shard in shards] == [False, False, True, True]
    assert len(os.pread(file, one, 0)) == one
    os.close(file)
    os.utime(cache.path(shards[2]))
    cache.path(shards[0])
    assert [cache.place(shard).exists() for shard in shards] == [True, False, True, False]


def test_what_a_killed_download_left_is_removed_in_time_and_what_another_process_moves_is_not(
    server, cache, monkeypatch
):
    (cache / "shards").mkdir(parents=True)
    (cache / "unpacked" / "0123").mkdir(parents=True)
    downloading, unpacking, unpacked = (
        cache / name for name in ("shards/.x.tar.abc.part", "unpacked/0123/.x.tar.abc.part", "unpacked/0123/x.tar")
    )
    for file in (downloading, unpacking, unpacked):
        file.write_bytes(b"half")
        os.utime(file, (1, 1))  # the time of the packed shard, which an unpacked one gets just before it is moved
    first, second = shards_at(server, [1, 1])
    ShardCache(QUICK).path(first)
    assert downloading.exists()
    monkeypatch.setattr("neuclip.data.tar.cache.KILLED_SECONDS", -60)
    ShardCache(QUICK).path(second)
    # What lies unpacked is of local shards, whose sources remove it by a rule of their own.
    assert not downloading.exists() and unpacking.exists() and unpacked.exists()


def test_readers_that_need_a_shard_at_once_fetch_it_once(server):
    shard = shards_at(server, [3])[0]
    with ThreadPool(6) as pool:
        places = pool.map(lambda _: ShardCache(QUICK).path(shard), range(6))
    assert len(set(places)) == 1 and server.got["00000.tar"] == 1


def test_wanted_shards_are_fetched_in_the_background(server):
    shards = shards_at(server, [1] * 5)
    cache = ShardCache(QUICK)
    cache.want(shards)
    join_fetching()
    assert all(cache.place(shard).exists() for shard in shards)
    assert [server.got[shard.name] for shard in shards] == [1] * 5


def test_a_shard_that_cannot_be_fetched_ahead_does_not_stop_the_others(server):
    shards = shards_at(server, [1] * 3)
    server.faults["00000.tar"] = ["gone"]
    cache = ShardCache(QUICK)
    cache.want(shards)
    join_fetching()
    assert [cache.place(shard).exists() for shard in shards] == [False, True, True]
    assert cache.path(shards[0]).exists()


def test_what_nobody_expected_while_fetching_ahead_reaches_the_reader_and_fetching_goes_on(server, monkeypatch):
    shards = shards_at(server, [1] * 3)
    cache = ShardCache(QUICK)
    evict = cache._evict
    monkeypatch.setattr(cache, "_evict", lambda place: 1 / 0)
    cache.want(shards[:1])
    join_fetching()
    monkeypatch.setattr(cache, "_evict", evict)
    cache.want(shards[1:])
    join_fetching()
    assert all(cache.place(shard).exists() for shard in shards[1:])
    with pytest.raises(ZeroDivisionError):
        cache.path(shards[0])
    assert cache.path(shards[0]).exists()


def test_a_packed_shard_that_is_not_gzip_ends_in_one_line_with_its_url(server):
    (server.folder / "0.tar.gz").write_bytes(b"<html>not here</html>")
    with pytest.raises(RunFailed, match=rf"{server.url}/0\.tar\.gz: cannot be unpacked \(nothing in it can be read"):
        open_source(f"{server.url}/0.tar.gz", limits=QUICK)
