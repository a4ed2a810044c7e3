"""Remote shards are read like local ones; a remote that misbehaves is asked again or ends in one line."""

from __future__ import annotations

import os
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path

import fsspec
import numpy as np
import pytest

from neuclip.data.mixture import order_of, split
from neuclip.data.order import ShardOrder
from neuclip.errors import RunFailed, UserError
from tests.builders.data import numbered, pair, spawned, tar_bytes, write_files, write_shards, write_tar
from tests.builders.reading import (
    batches,
    captions,
    content,
    failure,
    faults,
    fingerprint,
    ids_of,
    open_source,
    refusal,
    travelled,
)
from tests.builders.server import join_fetching


def fetched(server) -> dict[str, int]:
    return {name: count for name, count in server.got.items() if name.endswith(".tar")}


def copies_in(cache: Path) -> list[Path]:
    return [path for path in (cache / "shards").glob("*") if path.is_file()]


def cached(server, cache: Path) -> dict[str, Path]:
    """The copy of each shard that is here, whatever it is called."""
    copies = {path.read_bytes(): path for path in copies_in(cache)}
    shards = {shard.name: shard.read_bytes() for shard in server.folder.glob("*.tar")}
    return {name: copies[data] for name, data in shards.items() if data in copies}


def served(server, sizes: list[int], *, indexed: bool = False, **limits):
    """The shards opened at the server; `indexed`: with indexes beside them, so that opening fetches none."""
    write_shards(server.folder, sizes)
    if indexed:
        open_source(server.folder)
    return open_source(f"{server.url}/{{00000..{len(sizes) - 1:05d}}}.tar", **limits)


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_local_file_memory_and_http_shards_give_the_same_pairs(tmp_path, server, memory):
    write_shards(server.folder, [4, 0, 3, 1])
    for shard, numbers in enumerate((range(4), (), range(4, 7), (7,))):
        memory.pipe_file(f"/pairs/{shard:05d}.tar", tar_bytes(numbered(*numbers)))
        write_tar(tmp_path / "packed" / f"{shard:05d}.tar.gz", numbered(*numbers))
    local = open_source(server.folder)
    for address in (
        f"file://{server.folder}",
        f"file://{tmp_path}/packed/{{00000..00003}}.tar.gz",
        "memory://pairs",
        "memory://pairs/0*.tar",
        f"{server.url}/{{00000..00003}}.tar",
    ):
        source = open_source(address)
        assert content(source) == content(travelled(source)) == content(local), address
        assert fingerprint(source) == fingerprint(local) and source.kind == "remote tar"
        assert [reason for reason, _, _ in faults(source)] == [reason for reason, _, _ in faults(local)]
        assert source.shard_ends.tolist() == [4, 4, 7, 8]


def test_a_folder_is_listed_one_level_deep_without_hidden_files_and_packed_twins(memory, tmp_path):
    for number, name in enumerate(("b.tar", "a/0.tar", "b.tar.gz", "b.tgz", "a/b/deep.tar", ".c.tar")):
        memory.pipe_file(f"/listed/{name}", write_tar(tmp_path / name, pair(number)).read_bytes())
    memory.pipe_file("/listed/notes.txt", b"x")
    assert captions(open_source("memory://listed/")) == [("image 1",), ("image 0",)]


def test_each_shard_is_fetched_once_for_index_reading_and_later_sources_and_readers_at_once(server):
    write_shards(server.folder, [2, 2, 2])

    def read(signature: str):  # a renewed signature is no new shard
        return content(open_source(f"{server.url}/{{00000..00002}}.tar?X-Amz-Signature={signature}"))

    with ThreadPool(4) as pool:
        found = pool.map(read, "aabb")
    assert len(found[0]) == 6 and [read("b")] * 4 == found
    assert fetched(server) == {f"0000{number}.tar": 1 for number in range(3)}


def test_a_shard_that_changes_at_the_remote_is_fetched_again(server):
    for count in (2, 15):
        assert len(content(served(server, [count]))) == count


def test_a_remote_shard_that_is_cut_off_where_it_lies_is_reported_with_its_url(server):
    write_files(server.folder, {"0.tar": tar_bytes(numbered(0, 1))[: len(pair(0)[0][1]) + 2500]})
    [(reason, where, _), *_] = faults(open_source(f"{server.url}/0.tar"))
    assert reason == "shard is cut off" and where.startswith(f"{server.url}/0.tar")


# Indexes beside the shards


def test_an_index_beside_the_shards_spares_fetching_them(server):
    source = served(server, [2, 3], indexed=True)
    assert len(source) == 5 and fingerprint(source) == fingerprint(open_source(server.folder)) and not fetched(server)
    assert source[3].captions == ("image 3",) and fetched(server) == {"00001.tar": 1}


def test_an_index_beside_that_is_of_another_shard_is_not_believed(server):
    image = pair(0)[0]
    open_source(write_tar(server.folder / "0.tar", [image, ("00000.txt", b"a dog")]))
    write_tar(server.folder / "0.tar", numbered(*range(15)))
    assert len(content(open_source(f"{server.url}/0.tar"))) == 15
    write_tar(server.folder / "0.tar", [image, ("00000.txt", b"a dog with a very long tail")])  # of the same size
    message = failure(lambda: open_source(f"{server.url}/0.tar")[0])
    assert f"{server.url}/0.tar: does not match the index beside it" in message


@pytest.mark.parametrize("spoilt", ["endless", "bomb", "damaged", "cut"])
def test_an_index_beside_that_is_too_large_or_damaged_is_not_read_and_the_shard_is_indexed_here(server, spoilt):
    open_source(write_shards(server.folder, [3]))
    index = server.folder / "00000.tar.index.npz"
    if spoilt == "endless":
        server.faults[index.name] = ["endless"] * 9
        index.write_bytes(b"")
    elif spoilt == "bomb":
        np.savez_compressed(index, stamp=np.zeros(3, np.int64), rows=np.zeros(30_000_000, np.uint8))
    else:
        index.write_bytes(b"no index" if spoilt == "damaged" else index.read_bytes()[:300])
    assert len(content(open_source(f"{server.url}/00000.tar"))) == 3 and server.sent < 100_000_000


# Training


def test_the_order_of_remote_data_is_equal_for_any_workers_and_ranks(server):
    source = served(server, [3, 5, 2, 6], indexed=True)  # the workers fetch
    order = order_of(source, 7)
    expected = ShardOrder([3, 8, 10, 16], 7).ids(0, 24).tolist()
    options = {"order": order, "seed": 7, "batch_size": 4, "steps": 6}
    found = list(batches(source, transform=spawned, workers=1, **options))  # in a process that began afresh
    assert ids_of(found) == expected and not any(batch.faults for batch in found)
    shares = [batches(source, rank=rank, ranks=2, **options) for rank in range(2)]
    assert [id for step in zip(*shares, strict=True) for id in ids_of(step)] == expected
    assert fetched(server) == {f"0000{number}.tar": 1 for number in range(4)}


def test_reading_fetches_the_shards_of_its_group_and_the_next_and_asking_for_ids_fetches_nothing(server):
    source = served(server, [2] * 8, indexed=True)
    order = ShardOrder(source.shard_ends, seed=3, together=2)
    source, order = travelled((source, order))
    order.ids(0, 16)
    join_fetching()
    assert not fetched(server)
    ahead = order.group_at(4).shards.tolist()
    server.faults[f"{ahead[0]:05d}.tar"] = ["fail"] * 2  # what fails in the background is tried again when it is needed
    assert ids_of(batches(source, order=order, batch_size=1)) == order.ids(0, 1).tolist()
    join_fetching()
    wanted = {f"{shard:05d}.tar" for shard in (*order.group_at(0).shards.tolist(), *ahead)}
    assert set(fetched(server)) <= wanted and len(fetched(server)) >= 2
    assert sorted(ids_of(batches(source, order=order, batch_size=4, steps=4))) == list(range(16))


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_a_remote_that_disappears_in_mid_epoch_fails_the_run_in_one_line(server, cache, fault):
    source = served(server, [4] * 6)
    order = ShardOrder(source.shard_ends, seed=0, together=2)
    first = [f"{shard:05d}.tar" for shard in order.group_at(0).shards.tolist()]
    for name, path in cached(server, cache).items():
        if name not in first:
            path.unlink()
    server.spoil_everything(fault)
    seen = []
    with pytest.raises(RunFailed) as raised:
        for batch in batches(source, order=order, batch_size=4, steps=6):
            seen += batch.ids.tolist()
    assert seen == order.ids(0, 8).tolist()  # all that could be had, and nothing that stands in for the rest
    message = str(raised.value)
    assert f"{server.url}/0000" in message and "\n" not in message and "--resume" in message


def test_the_cache_never_holds_more_than_its_size_and_the_longest_unused_go(server, cache):
    size = (write_shards(server.folder, [3]) / "00000.tar").stat().st_size
    source = served(server, [3] * 4, indexed=True, cache_size=2 * size)
    for shard, left in ((0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [0, 2]), (3, [2, 3]), (1, [1, 3])):
        source = travelled(source)  # which has no open files
        assert source[3 * shard].captions == (f"image {3 * shard}",)
        join_fetching()
        assert sorted(cached(server, cache)) == [f"{number:05d}.tar" for number in left]
        for path in cached(server, cache).values():  # the next use is a later one, whatever the clock's grain
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))


def test_a_cache_that_is_too_small_for_the_order_is_refused(server):
    source = served(server, [3] * 4, cache_size=15_000)
    assert "give --data.cache_size " in refusal(lambda: order_of(source, 0))
    assert len(content(source)) == 12  # in source order even a small one serves


def test_remote_and_local_sources_with_weights_come_as_often_as_these_say(server, tmp_path):
    write_shards(server.folder, [2] * 6)
    local = write_shards(tmp_path / "local", [3])
    source = open_source(f"{server.url}/{{00000..00003}}.tar:2,{server.url}/{{00004..00005}}.tar,{local}:3")
    ids = ids_of(batches(source, order=order_of(source, 0), batch_size=29, steps=2))
    assert Counter(ids) == Counter({id: 4 if id < 8 else 2 if id < 12 else 6 for id in range(15)})
    assert source.kind == "remote tar+tar"


def test_remote_data_hold_out_from_few_shards_and_are_trained_on_shard_by_shard(server):
    source = served(server, [10] * 6)
    training, held_out = split(source, 15, seed=0)
    assert sorted(captions(training) + captions(held_out)) == sorted(captions(source))
    assert len({held_out.where(id).split(": ")[0] for id in range(15)}) == 2
    order = order_of(training, 0)
    assert isinstance(order, ShardOrder) and sorted(order.ids(0, 45).tolist()) == list(range(45))
    assert ids_of(batches(training, order=order, batch_size=9, steps=5)) == order.ids(0, 45).tolist()


# Misbehaviour


@pytest.mark.parametrize("fault", ["cut", "short", "fail", "stall"])
def test_what_goes_wrong_twice_is_tried_a_third_time(server, fault, cache):
    server.faults["00000.tar"] = [fault] * 2
    source = served(server, [3], timeout=0.3 if fault == "stall" else 20)
    assert len(content(source)) == 3 and not list((cache / "shards").glob(".*.part"))


@pytest.mark.parametrize(
    ("fault", "timeout", "kind", "words"),
    [
        ("stall", 0.2, RunFailed, "2 attempts"),
        ("cut", 20, RunFailed, "2 attempts"),
        ("short", 20, RunFailed, "received 5,120 of 10,240 bytes"),
        ("fail", 20, RunFailed, "503"),
        ("gone", 20, UserError, "there is no such file"),
        ("deny", 20, UserError, "access is denied"),
        ("endless", 20, RunFailed, "more than"),
        ("trickle", 0.3, RunFailed, "received fewer than 100,000 bytes per second"),
    ],
)
def test_a_remote_that_never_works_ends_in_one_line_that_shows_no_secret(server, cache, fault, timeout, kind, words):
    write_shards(server.folder, [3])
    server.spoil_everything(fault)
    url = server.url.replace("://", "://me:SECRET@")
    options = {"timeout": timeout, "tries": 2, "cache_size": 10_000_000}
    message = refusal(f"{url}/00000.tar?signature=SECRET", kind, **options)
    assert "/00000.tar: " in message and "127.0.0.1" in message and words in message and "SECRET" not in message
    assert not copies_in(cache)


def test_what_works_shows_no_user_and_no_password(server, capfd):
    write_shards(server.folder, [3])
    source = open_source(f"{server.url.replace('://', '://me:SECRET@')}/00000.tar")
    printed = capfd.readouterr()
    assert "SECRET" not in f"{source.name} {source.where(0)} {source.faults} {printed.out} {printed.err}"
    assert "http://***@127.0.0.1" in source.where(0)


def test_what_is_larger_than_the_cache_packed_or_of_unknown_size_is_refused_and_leaves_nothing(server, cache):
    server.faults = {"unknown.tar": ["endless"] * 9}
    message = failure(f"{server.url}/unknown.tar", cache_size=1_000_000, tries=2)
    assert "data.cache_size" in message and "1,000,000" in message
    write_tar(server.folder / "0.tar.gz", [("a.png", bytes(3_000_000))])
    message = failure(f"{server.url}/0.tar.gz", cache_size=1_000_000)
    assert "0.tar.gz" in message and "data.cache_size" in message
    write_files(server.folder, {"1.tar.gz": b"<html>not here</html>"})
    assert f"{server.url}/1.tar.gz: " in failure(f"{server.url}/1.tar.gz")
    assert not copies_in(cache)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("{}/", "web servers cannot be listed; give a pattern such as"),
        ("{}/*.tar", "web servers cannot be listed; give a pattern such as"),
        ("{}/{{0..2}}.tar", "there is no such file"),
        ("nowhere://bucket/0.tar", "nowhere"),
        ("memory://empty", "no tar shards"),
    ],
)
def test_bad_addresses_are_refused_in_one_line_and_nothing_else_is_asked_for(server, address, words):
    message = refusal(address.format(server.url))
    assert words in message and "--resume" not in message  # no run has begun
    assert server.got.keys() <= {"0.tar", "1.tar", "2.tar"}


def test_a_server_that_is_not_there_ends_in_one_line(server):
    server.shutdown()
    server.server_close()
    message = failure(f"{server.url}/00000.tar", tries=2)
    assert "00000.tar: could not be fetched in 2 attempts" in message and "Connect" in message


class Refusing(fsspec.AbstractFileSystem):
    """Says what s3fs says: an error of Python's, whose cause is botocore's."""

    protocol = "refusing"
    cachable = False
    tries = 0

    def info(self, path, **options):
        Refusing.tries += 1
        kind = {"denied": PermissionError, "missing": FileNotFoundError}[path.strip("/").partition("/")[0]]
        raise kind("what was wrong") from RuntimeError("NoSuchBucket or AccessDenied")


@pytest.mark.parametrize(("bucket", "words"), [("denied", "access is denied"), ("missing", "there is no such file")])
def test_a_bucket_that_is_missing_or_closed_is_asked_once(bucket, words, monkeypatch):
    monkeypatch.setattr("neuclip.data.locations.PROTOCOLS", ("file", "memory", "refusing"))
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    Refusing.tries = 0
    assert f"refusing://{bucket}/0.tar: {words}" in refusal(f"refusing://{bucket}/0.tar")
    assert Refusing.tries == 1
