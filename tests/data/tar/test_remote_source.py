"""Remote shards are read like local ones, in an order that needs few of them on the disk."""

from __future__ import annotations

import gzip
import os
import pickle
import tarfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from neuclip.data.fingerprint import fingerprint
from neuclip.data.tar.cache import check_cache_size

from neuclip.cli.main import main
from neuclip.data.loader import Batches, sequential
from neuclip.data.mixture import Mixture, MixtureOrder
from neuclip.data.open import open_source
from neuclip.data.order import ShardOrder
from neuclip.data.source import ShardFacts
from neuclip.data.tar.remote import Limits
from neuclip.errors import RunFailed, UserError
from tests.data.small_shards import contents, pair, write_shards, write_tar
from tests.data.small_transforms import afresh, plain, tokenize
from tests.misbehaving_server import QUICK, join_fetching


def packed(folder: Path, target: Path) -> None:
    target.mkdir()
    for shard in folder.glob("*.tar"):
        (target / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))


def test_local_file_memory_and_http_shards_give_the_same_pairs(tmp_path, server):
    write_shards(server.folder, [4, 0, 3, 1])
    packed(server.folder, tmp_path / "packed")
    memory = fsspec.filesystem("memory")
    for shard in server.folder.glob("*.tar"):
        memory.pipe_file(f"/pairs/{shard.name}", shard.read_bytes())
    local = open_source(str(server.folder))
    for address in (
        f"file://{server.folder}",
        f"file://{tmp_path}/packed/{{00000..00003}}.tar.gz",
        "memory://pairs",
        f"{server.url}/{{00000..00003}}.tar",
        f"{server.url}/",
        f"{server.url}/*.tar",
        "memory://pairs/0*.tar",
    ):
        source = open_source(address, limits=QUICK)
        assert contents(source) == contents(local) and fingerprint(source) == fingerprint(local), address
        assert [fault.reason for fault in source.faults] == [fault.reason for fault in local.faults]
    memory.rm("/pairs", recursive=True)


def test_each_shard_is_fetched_once_for_index_and_reading_and_later_sources(server):
    write_shards(server.folder, [2, 2, 2])
    for _ in range(2):
        contents(open_source(f"{server.url}/{{00000..00002}}.tar", limits=QUICK))
    assert {name: count for name, count in server.got.items() if name.endswith(".tar")} == {
        f"0000{number}.tar": 1 for number in range(3)
    }


def test_an_index_beside_the_shards_spares_fetching_them(server):
    open_source(str(write_shards(server.folder, [2, 3])))
    source = open_source(f"{server.url}/{{00000..00001}}.tar", limits=QUICK)
    assert len(source) == 5 and source.captions()[4] == "image 4"
    assert not any(name.endswith(".tar") for name in server.got)
    assert source[3].captions == ("image 3",) and server.got["00001.tar"] == 1


def test_an_index_beside_that_is_of_another_shard_is_not_believed(server, capsys):
    open_source(str(write_shards(server.folder, [2])))
    index = (server.folder / "00000.tar.index.npz").read_bytes()
    write_shards(server.folder, [15])
    (server.folder / "00000.tar.index.npz").write_bytes(index)
    assert len(open_source(f"{server.url}/00000.tar", limits=QUICK)) == 15
    assert "bytes when it was indexed" in capsys.readouterr().err


def test_an_index_beside_whose_shard_has_other_captions_of_the_same_size_is_not_believed(server, capsys):
    image = pair(0)[0]
    write_tar(server.folder / "0.tar", [image, ("00000.txt", b"a dog")])
    size = (server.folder / "0.tar").stat().st_size
    open_source(str(server.folder / "0.tar"))
    write_tar(server.folder / "0.tar", [image, ("00000.txt", b"a dog with a very long tail")])
    assert (server.folder / "0.tar").stat().st_size == size
    source = open_source(f"{server.url}/0.tar", limits=QUICK)
    with pytest.raises(RunFailed, match=rf"{server.url}/0\.tar: .*neuclip data index {server.url}/0\.tar --verify"):
        source[0]
    assert main(["data", "index", f"{server.url}/0.tar", "--verify"]) == 1
    capsys.readouterr()
    assert open_source(f"{server.url}/0.tar", limits=QUICK)[0].captions == ("a dog with a very long tail",)


def test_a_size_that_stands_in_a_pax_header_alone_fits_its_index(server):
    member = tarfile.TarInfo("00000.txt")
    member.pax_headers = {"size": "5"}  # its own header says 0
    caption = member.tobuf(tarfile.PAX_FORMAT) + b"a dog".ljust(512, b"\0")
    name, content = pair(0)[0]
    image = write_tar(server.folder / "0.tar", [(name, content)]).read_bytes()[: 512 + -(-len(content) // 512) * 512]
    (server.folder / "0.tar").write_bytes(image + caption + bytes(1024))
    assert open_source(f"{server.url}/0.tar", limits=QUICK)[0].captions == ("a dog",)


def test_a_shard_that_changes_at_the_remote_is_fetched_again(server):
    for count in (2, 15):
        write_shards(server.folder, [count])
        assert len(contents(open_source(f"{server.url}/00000.tar", limits=QUICK))) == count


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_a_remote_that_disappears_in_mid_epoch_fails_the_run_in_one_line(server, cache, workers, fault):
    write_shards(server.folder, [4] * 6)
    source = open_source(f"{server.url}/{{00000..00005}}.tar", limits=QUICK)
    order = ShardOrder(source.joined.ends, seed=0, together=2)
    batches = Batches(source, order, batch_size=4, transform=plain, tokenize=tokenize, seed=0, workers=workers)
    first = order.group_at(0).shards.tolist()
    for shard, remote in enumerate(source.remote):
        if shard not in first:
            source.cache.place(remote).unlink()
    server.spoil_everything(fault)
    seen = []
    with pytest.raises(RunFailed, match=rf"{server.url}/0000\d\.tar: ") as raised:
        for batch in batches.steps(0, 6):
            seen += batch.ids.tolist()
    assert seen == order.ids(0, 8).tolist()  # all that could be had, and nothing that stands in for the rest
    assert "\n" not in str(raised.value) and "--resume" in str(raised.value)


def test_remote_training_order_is_equal_for_any_workers_and_ranks(server):
    write_shards(server.folder, [3, 5, 2, 6])
    source = open_source(f"{server.url}/{{00000..00003}}.tar", limits=QUICK)
    order = source.order(7)
    assert isinstance(order, ShardOrder)
    expected = ShardOrder(source.joined.ends, 7).ids(0, 24).tolist()
    for workers, ranks in ((0, 1), (2, 1), (1, 2)):
        rows = [
            Batches(
                source, order, batch_size=4, transform=plain, tokenize=tokenize, seed=7, workers=workers, rank=rank,
                ranks=ranks,
            ).steps(0, 6)
            for rank in range(ranks)
        ]  # fmt: skip
        assert [id for step in zip(*rows, strict=True) for batch in step for id in batch.ids.tolist()] == expected


def mixed_order(source: Mixture, seed: int, together: int) -> MixtureOrder:
    orders = [ShardOrder(part.joined.ends, seed, together) for part in source.parts]
    return MixtureOrder(orders, source.weights, seed)


def test_remote_sources_with_weights_are_mixed_a_few_shards_of_each_at_a_time(tmp_path, server):
    write_shards(server.folder, [2] * 60)
    open_source(str(server.folder))  # the indexes beside them
    room = 40 * 10_240  # of 60 shards, and of two groups from each source
    address = f"{server.url}/{{00000..00029}}.tar:2,{server.url}/{{00030..00059}}.tar:0.5"
    source = open_source(address, limits=replace(QUICK, cache_size=room))
    for seed in (0, 1):
        order = mixed_order(source, seed, together=8)
        batches = Batches(source, order, batch_size=30, transform=plain, tokenize=tokenize, seed=0, workers=0)
        ids = [id for batch in batches.steps(0, 10) for id in batch.ids.tolist()]  # two epochs
        assert Counter(ids) == Counter({id: 4 if id < 60 else 1 for id in range(120)})
    for thread in threading.enumerate():  # it removes old shards when a new one is there
        if thread.name == "fetch shards":
            thread.join()
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.tar")) <= room


def test_a_part_that_moves_on_slowly_keeps_its_shards_in_the_smallest_cache_while_a_fast_one_passes(server, cache):
    write_shards(server.folder, [2] * 32)
    open_source(str(server.folder))  # the indexes beside them
    address = f"{server.url}/{{00000..00023}}.tar:2,{server.url}/{{00024..00031}}.tar:0.25"
    source = open_source(address, limits=replace(QUICK, cache_size=8 * 10_240))
    check_cache_size(source.parts, together=2)
    order = mixed_order(source, seed=0, together=2)
    for start in range(0, 2 * order.size, 4):
        source.prefetch(order, start, 4)
        join_fetching()
        for file in (cache / "shards").glob("*.tar"):  # the next use is a later one, whatever the clock's grain
            os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**9))
    slow = {name: count for name, count in server.got.items() if name in {f"{n:05d}.tar" for n in range(24, 32)}}
    assert len(slow) >= 4 and set(slow.values()) == {1}


@pytest.mark.parametrize("how", ["training", "evaluation"])
def test_workers_that_fetch_begin_afresh_and_give_the_same_batches(server, how):
    write_shards(server.folder, [3, 5])
    open_source(str(server.folder))  # the index beside them: the workers then fetch
    sources = [open_source(f"{server.url}/{{00000..00001}}.tar", limits=QUICK)]
    sources += [open_source(f"{server.url}/{{00000..00001}}.tar,{server.folder}", limits=QUICK)]
    expected = [0, 1, 2, 3, 4, 5, 6, 7]
    for source in sources[: 1 if how == "training" else 2]:
        if how == "training":
            order = source.order(0)
            batches = Batches(
                source, order, batch_size=4, transform=afresh, tokenize=tokenize, seed=0, workers=2
            ).steps(0, 2)
            expected = ShardOrder(source.joined.ends, 0).ids(0, 8).tolist()
        else:
            batches = sequential(source, transform=afresh, batch_size=4, workers=2)
        found = list(batches)
        assert [id for batch in found for id in batch.ids.tolist()][:8] == expected
        assert not any(batch.faults for batch in found) and server.got["00001.tar"] == 1


def test_reading_a_window_fetches_the_shards_of_its_group_and_the_next_and_asking_for_ids_fetches_nothing(
    server, monkeypatch
):
    monkeypatch.setattr("neuclip.data.tar.cache.LOCKS", 1 << 40)  # shards that share a lock are not fetched ahead
    write_shards(server.folder, [2] * 8)
    open_source(str(server.folder))  # the index beside them
    source = open_source(f"{server.url}/{{00000..00007}}.tar", limits=QUICK)
    source, order = pickle.loads(pickle.dumps((source, ShardOrder(source.joined.ends, seed=3, together=2))))
    order.ids(0, 16)
    join_fetching()
    assert not any(name.endswith(".tar") for name in server.got)
    batches = Batches(source, order, batch_size=1, transform=plain, tokenize=tokenize, seed=0, workers=0)
    assert next(batches.steps(0, 1)).ids.tolist() == order.ids(0, 1).tolist()
    join_fetching()
    wanted = {*order.group_at(0).shards.tolist(), *order.group_at(4).shards.tolist()}
    assert {int(name[:5]) for name in server.got if name.endswith(".tar")} == wanted and len(wanted) == 4


def test_a_cache_that_is_too_small_for_the_order_is_refused(server):
    write_shards(server.folder, [3] * 4)
    address = f"{server.url}/{{00000..00003}}.tar"
    source = open_source(address, limits=Limits(cache_size=15_000, first_wait=0))
    with pytest.raises(UserError, match=r"give --data\.cache_size \d+ or more"):
        source.order(0)
    twice = f"{address}:2,{server.folder},{server.url}/{{00000..00002}}.tar"
    with pytest.raises(UserError, match=r"7 shards of .* give --data\.cache_size 71680 or more"):
        open_source(twice, limits=Limits(cache_size=60_000)).order(0)
    assert len(contents(source)) == 12  # in source order even a small one serves


def test_the_room_that_packed_shards_and_those_of_unknown_size_need_is_that_of_the_unpacked(tmp_path, server):
    write_shards(server.folder, [3] * 4)
    packed(server.folder, tmp_path / "packed")
    source = open_source(f"file://{tmp_path}/packed", limits=Limits(cache_size=40_000))
    assert sum(shard.size for shard in source.remote) < 20_000
    with pytest.raises(UserError, match=r"give --data\.cache_size 40960 or more"):
        source.order(0)
    source = open_source(f"file://{server.folder}", limits=Limits(cache_size=40_000))
    source.remote = [replace(shard, size=-1) for shard in source.remote]
    with pytest.raises(UserError, match=r"give --data\.cache_size 40960 or more"):
        source.order(0)


def test_a_remote_shard_that_is_cut_off_where_it_lies_is_reported_with_its_url(server):
    whole = write_tar(server.folder / "0.tar", pair(0) + pair(1)).read_bytes()
    (server.folder / "0.tar").write_bytes(whole[: len(pair(0)[0][1]) + 2500])
    source = open_source(f"{server.url}/0.tar", limits=QUICK)
    assert source.faults[0].reason == "shard is cut off" and source.faults[0].where.startswith(f"{server.url}/0.tar")


def test_a_remote_source_says_what_it_is_made_of(server):
    sizes = [shard.stat().st_size for shard in sorted(write_shards(server.folder, [0, 2, 3]).glob("*.tar"))]
    address = f"{server.url}/{{00000..00002}}.tar"
    source = open_source(address, limits=Limits(cache_size=10**6))
    assert source.kind == "remote tar" and source.fetches and source.describe_files() == (3, sum(sizes))
    assert source.shard_facts() == ShardFacts([0, 2, 3], sizes, 10**6)
    assert source.cheap_ids() == 2  # of the second shard: the first has none
    assert source.places() == {f"{server.url}/{number:05d}.tar" for number in range(3)}
    mixture = open_source(f"{address},{server.folder}", limits=QUICK)
    assert mixture.kind == "remote tar+tar" and mixture.fetches and len(mixture.parts) == 2
    assert mixture.describe_files() == (6, 2 * sum(sizes)) and len(mixture.places()) == 6
    assert mixture.cheap_ids() is None and mixture.shard_facts() is None


@pytest.mark.parametrize("stored", [False, True])
def test_whether_indexes_lie_beside_remote_shards_is_known_or_asked(server, stored):
    write_shards(server.folder, [2, 3])
    if stored:
        open_source(str(server.folder))  # writes them
    for _ in range(2):  # the second time the indexes are in the cache, and the remote is asked
        assert open_source(f"{server.url}/{{00000..00001}}.tar", limits=QUICK).has_remote_indexes() == stored
