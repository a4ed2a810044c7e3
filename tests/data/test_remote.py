"""Remote shards are read like local ones; a remote that misbehaves is asked again or ends in one line."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path

import fsspec
import numpy as np
import pytest

from neuclip.errors import RunFailed, UserError
from tests.builders.data import (
    ShardOrder,
    afresh,
    batches,
    captions,
    content,
    failure,
    faults,
    fingerprint,
    open_source,
    order_of,
    pair,
    refusal,
    shard_ends,
    split,
    tar_bytes,
    travelled,
    write_shards,
    write_tar,
)
from tests.builders.server import join_fetching


def fetched(server) -> dict[str, int]:
    return {name: count for name, count in server.got.items() if name.endswith(".tar")}


def cached(server, cache: Path) -> dict[str, Path]:
    """The copy of each shard that is here, whatever it is called."""
    copies = {path.read_bytes(): path for path in (cache / "shards").glob("*") if path.is_file()}
    shards = {shard.name: shard.read_bytes() for shard in server.folder.glob("*.tar")}
    return {name: copies[data] for name, data in shards.items() if data in copies}


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_local_file_memory_and_http_shards_give_the_same_pairs(tmp_path, server, memory):
    write_shards(server.folder, [4, 0, 3, 1])
    (tmp_path / "packed").mkdir()
    for shard in server.folder.glob("*.tar"):
        memory.pipe_file(f"/pairs/{shard.name}", shard.read_bytes())
        (tmp_path / "packed" / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
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
        assert shard_ends(source) == [4, 4, 7, 8]


def test_a_folder_is_listed_one_level_deep_without_hidden_files_and_packed_twins(memory):
    for number, name in enumerate(("b.tar", "a/0.tar", "b.tar.gz", "b.tgz", "a/b/deep.tar", ".c.tar")):
        data = tar_bytes(pair(number))
        memory.pipe_file(f"/listed/{name}", gzip.compress(data) if name.endswith("gz") else data)
    memory.pipe_file("/listed/notes.txt", b"x")
    assert captions(open_source("memory://listed/")) == [("image 1",), ("image 0",)]


def test_each_shard_is_fetched_once_for_index_reading_and_later_sources(server):
    write_shards(server.folder, [2, 2, 2])
    for signature in ("a", "b", "b"):  # a renewed signature is no new shard
        address = f"{server.url}/{{00000..00002}}.tar?X-Amz-Signature={signature}"
        assert len(content(open_source(address))) == 6
    assert fetched(server) == {f"0000{number}.tar": 1 for number in range(3)}


def test_readers_that_need_a_shard_at_once_fetch_it_once(server):
    write_shards(server.folder, [3])
    with ThreadPool(4) as pool:
        found = pool.map(lambda _: content(open_source(f"{server.url}/00000.tar")), range(4))
    assert len(found[0]) == 3 and all(one == found[0] for one in found) and fetched(server) == {"00000.tar": 1}


def test_an_index_beside_the_shards_spares_fetching_them(server):
    open_source(write_shards(server.folder, [2, 3]))
    source = open_source(f"{server.url}/{{00000..00001}}.tar")
    assert len(source) == 5 and fingerprint(source) == fingerprint(open_source(server.folder)) and not fetched(server)
    assert source[3].captions == ("image 3",) and fetched(server) == {"00001.tar": 1}


def test_an_index_beside_that_is_of_another_shard_is_not_believed(server):
    open_source(write_shards(server.folder, [2]))
    index = (server.folder / "00000.tar.index.npz").read_bytes()
    write_shards(server.folder, [15])
    (server.folder / "00000.tar.index.npz").write_bytes(index)
    assert len(content(open_source(f"{server.url}/00000.tar"))) == 15


def test_an_index_beside_whose_shard_has_other_members_of_the_same_size_gives_no_wrong_caption(server):
    image = pair(0)[0]
    write_tar(server.folder / "0.tar", [image, ("00000.txt", b"a dog")])
    open_source(server.folder / "0.tar")
    write_tar(server.folder / "0.tar", [image, ("00000.txt", b"a dog with a very long tail")])
    source = open_source(f"{server.url}/0.tar")
    try:
        assert source[0].captions == ("a dog with a very long tail",)
    except RunFailed as error:
        assert f"{server.url}/0.tar: " in str(error) and "\n" not in str(error)


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


def test_a_shard_that_changes_at_the_remote_is_fetched_again(server):
    for count in (2, 15):
        write_shards(server.folder, [count])
        assert len(content(open_source(f"{server.url}/00000.tar"))) == count


def test_a_remote_shard_that_is_cut_off_where_it_lies_is_reported_with_its_url(server):
    whole = tar_bytes(pair(0) + pair(1))
    (server.folder / "0.tar").write_bytes(whole[: len(pair(0)[0][1]) + 2500])
    [(reason, where, _), *_] = faults(open_source(f"{server.url}/0.tar"))
    assert reason == "shard is cut off" and where.startswith(f"{server.url}/0.tar")


# Training


def test_the_order_of_remote_data_is_equal_for_any_workers_and_ranks(server):
    write_shards(server.folder, [3, 5, 2, 6])
    source = open_source(f"{server.url}/{{00000..00003}}.tar")
    order = order_of(source, 7)
    expected = ShardOrder(shard_ends(source), 7).ids(0, 24).tolist()
    for workers, ranks in ((0, 1), (0, 2)):
        options = {"order": order, "seed": 7, "batch_size": 4, "steps": 6, "workers": workers, "ranks": ranks}
        rows = [batches(source, rank=rank, **options) for rank in range(ranks)]
        assert [id for step in zip(*rows, strict=True) for batch in step for id in batch.ids.tolist()] == expected


def test_workers_that_fetch_begin_afresh_and_give_the_same_batches(server):
    write_shards(server.folder, [3, 5])
    open_source(server.folder)  # the index beside them: the workers then fetch
    source = open_source(f"{server.url}/{{00000..00001}}.tar")
    options = {"order": order_of(source, 0), "batch_size": 4, "steps": 2}
    found = list(batches(source, transform=afresh, workers=1, **options))
    assert [id for batch in found for id in batch.ids.tolist()] == order_of(source, 0).ids(0, 8).tolist()
    assert not any(batch.faults for batch in found) and fetched(server) == {"00000.tar": 1, "00001.tar": 1}


def test_reading_fetches_the_shards_of_its_group_and_the_next_and_asking_for_ids_fetches_nothing(server):
    write_shards(server.folder, [2] * 8)
    open_source(server.folder)  # the index beside them
    source = open_source(f"{server.url}/{{00000..00007}}.tar")
    order = ShardOrder(shard_ends(source), seed=3, together=2)
    source, order = travelled((source, order))
    order.ids(0, 16)
    join_fetching()
    assert not fetched(server)
    ahead = order.group_at(4).shards.tolist()
    server.faults[f"{ahead[0]:05d}.tar"] = ["fail"] * 2  # what fails in the background is tried again when it is needed
    assert next(batches(source, order=order, batch_size=1)).ids.tolist() == order.ids(0, 1).tolist()
    join_fetching()
    wanted = {f"{shard:05d}.tar" for shard in (*order.group_at(0).shards.tolist(), *ahead)}
    assert set(fetched(server)) <= wanted and len(fetched(server)) >= 2
    ids = [id for batch in batches(source, order=order, batch_size=4, steps=4) for id in batch.ids.tolist()]
    assert sorted(ids) == list(range(16))


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_a_remote_that_disappears_in_mid_epoch_fails_the_run_in_one_line(server, cache, fault):
    write_shards(server.folder, [4] * 6)
    source = open_source(f"{server.url}/{{00000..00005}}.tar")
    order = ShardOrder(shard_ends(source), seed=0, together=2)
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
    write_shards(server.folder, [3] * 4)
    size = (server.folder / "00000.tar").stat().st_size
    open_source(server.folder)  # the indexes beside them
    source = open_source(f"{server.url}/{{00000..00003}}.tar", cache_size=2 * size)
    for shard, left in ((0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [0, 2]), (3, [2, 3]), (1, [1, 3])):
        source = travelled(source)  # which has no open files
        assert source[3 * shard].captions == (f"image {3 * shard}",)
        join_fetching()
        assert sorted(cached(server, cache)) == [f"{number:05d}.tar" for number in left]
        for path in cached(server, cache).values():  # the next use is a later one, whatever the clock's grain
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))


def test_a_cache_that_is_too_small_for_the_order_is_refused(server):
    write_shards(server.folder, [3] * 4)
    source = open_source(f"{server.url}/{{00000..00003}}.tar", cache_size=15_000)
    assert "give --data.cache_size " in refusal(lambda: order_of(source, 0))
    assert len(content(source)) == 12  # in source order even a small one serves


def test_remote_and_local_sources_with_weights_come_as_often_as_these_say(server, tmp_path):
    write_shards(server.folder, [2] * 6)
    local = write_shards(tmp_path / "local", [3])
    source = open_source(f"{server.url}/{{00000..00003}}.tar:2,{server.url}/{{00004..00005}}.tar,{local}:3")
    order = order_of(source, 0)
    ids = [id for batch in batches(source, order=order, batch_size=29, steps=2) for id in batch.ids.tolist()]
    assert Counter(ids) == Counter({id: 4 if id < 8 else 2 if id < 12 else 6 for id in range(15)})
    assert source.kind == "remote tar+tar"


def test_remote_data_hold_out_from_few_shards_and_are_trained_on_shard_by_shard(server):
    write_shards(server.folder, [10] * 6)
    source = open_source(f"{server.url}/{{00000..00005}}.tar")
    training, held_out = split(source, 15, seed=0)
    assert sorted(captions(training) + captions(held_out)) == sorted(captions(source))
    assert len({held_out.where(id).split(": ")[0] for id in range(15)}) == 2
    order = order_of(training, 0)
    assert isinstance(order, ShardOrder) and sorted(order.ids(0, 45).tolist()) == list(range(45))
    found = [id for batch in batches(training, order=order, batch_size=9, steps=5) for id in batch.ids.tolist()]
    assert found == order.ids(0, 45).tolist()


# Misbehaviour


@pytest.mark.parametrize("fault", ["cut", "short", "fail", "stall"])
def test_what_goes_wrong_twice_is_tried_a_third_time(server, fault, cache):
    write_shards(server.folder, [3])
    server.faults["00000.tar"] = [fault] * 2
    source = open_source(f"{server.url}/00000.tar", timeout=0.3 if fault == "stall" else 20)
    assert len(content(source)) == 3 and not list((cache / "shards").glob(".*.part"))


@pytest.mark.parametrize(
    ("fault", "timeout", "kind", "words"),
    [
        ("stall", 0.2, RunFailed, "2 tries"),
        ("cut", 20, RunFailed, "2 tries"),
        ("short", 20, RunFailed, "5,120 of 10,240 bytes came"),
        ("fail", 20, RunFailed, "503"),
        ("gone", 20, UserError, "there is no such file"),
        ("deny", 20, UserError, "access is denied"),
        ("endless", 20, RunFailed, "more than"),
        ("trickle", 0.3, RunFailed, "bytes per second came"),
    ],
)
def test_a_remote_that_never_works_ends_in_one_line_that_shows_no_secret(server, cache, fault, timeout, kind, words):
    write_shards(server.folder, [3])
    server.spoil_everything(fault)
    url = server.url.replace("://", "://me:SECRET@")
    options = {"timeout": timeout, "tries": 2, "cache_size": 10_000_000}
    message = refusal(f"{url}/00000.tar?signature=SECRET", kind, **options)
    assert "/00000.tar: " in message and "127.0.0.1" in message and words in message and "SECRET" not in message
    assert not [file for file in (cache / "shards").glob("*") if file.is_file()]


def test_what_works_shows_no_user_and_no_password(server, capfd):
    write_shards(server.folder, [3])
    source = open_source(f"{server.url.replace('://', '://me:SECRET@')}/00000.tar")
    printed = capfd.readouterr()
    assert "SECRET" not in f"{source.name} {source.where(0)} {source.faults} {printed.out} {printed.err}"
    assert "http://***@127.0.0.1" in source.where(0)


def test_an_endless_shard_of_unknown_size_ends_at_that_of_the_cache(server, cache):
    server.faults = {"unknown.tar": ["endless"] * 9}
    message = failure(lambda: open_source(f"{server.url}/unknown.tar", cache_size=1_000_000, tries=2))
    assert "data.cache_size" in message and "1,000,000" in message
    assert not [file for file in (cache / "shards").iterdir() if file.is_file()]


def test_a_packed_shard_that_unpacks_to_more_than_the_cache_or_is_none_is_refused(server, cache):
    (server.folder / "0.tar.gz").write_bytes(gzip.compress(bytes(3_000_000)))
    message = failure(lambda: open_source(f"{server.url}/0.tar.gz", cache_size=1_000_000))
    assert "0.tar.gz" in message and "data.cache_size" in message
    (server.folder / "1.tar.gz").write_bytes(b"<html>not here</html>")
    assert f"{server.url}/1.tar.gz: " in failure(lambda: open_source(f"{server.url}/1.tar.gz"))
    assert not [file for file in (cache / "shards").iterdir() if file.is_file()]


@pytest.mark.parametrize("address", ["{}/", "{}/*.tar"])
def test_a_web_server_is_not_listed_and_a_pattern_is_asked_for(server, address):
    write_shards(server.folder, [1])
    message = refusal(address.format(server.url))
    assert "web servers are not listed; give a pattern such as" in message and not server.got


def test_a_server_that_is_not_there_ends_in_one_line(server):
    server.shutdown()
    server.server_close()
    message = failure(lambda: open_source(f"{server.url}/00000.tar", tries=2))
    assert "00000.tar: could not be fetched in 2 tries" in message and "Connect" in message


def test_bad_addresses_are_refused_in_one_line(server):
    for address, words in (
        ("nowhere://bucket/0.tar", "nowhere"),
        ("memory://empty", "no tar shards"),
        (f"{server.url}/", "give a pattern"),
        (f"{server.url}/{{0..2}}.tar", "there is no such file"),
    ):
        assert words in refusal(address) and "--resume" not in refusal(address)  # no run has begun


@pytest.mark.parametrize(
    "address",
    [
        "reference://0.tar::file:///tmp/references.json",
        "reference://0.tar::file:///tmp/references.json]",  # as if :: were part of a host
        "http://[::1]/0.tar::file:///tmp/references.json",
        "file:///tmp/{a,b::file:///tmp/c}.tar",
        "reference://0.tar",
        "simplecache::https://h/0.tar",
        "sftp://h/0.tar",
        "S3://h/0.tar",
    ],
)
def test_no_address_and_no_line_of_a_list_reaches_file_systems_that_are_not_meant(address, tmp_path):
    message = refusal(address)
    assert "not opened" in message or "several sources stand between commas" in message
    (tmp_path / "shards.txt").write_text(f"{address}\n")
    message = refusal(tmp_path / "shards.txt")
    assert "not opened" in message or "no such file" in message or "not exist" in message or "between commas" in message


def test_a_host_with_colons_is_no_chain():
    assert "http://[::1]:9/0.tar: could not be fetched" in failure(lambda: open_source("http://[::1]:9/0.tar", tries=1))


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
