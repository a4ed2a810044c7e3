"""The rows of all shards: a mapped file says what memory says, follows its shards, and is removed when unused."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest
from neuclip.data.fingerprint import fingerprint

from neuclip.data.open import open_source
from tests.data.small_shards import contents, image_bytes, pair, write_shards, write_tar


@pytest.fixture
def mapped(monkeypatch):
    monkeypatch.setattr("neuclip.data.tar.joined_index.MAPPED_FROM", 3)


def test_a_mapped_index_says_what_one_in_memory_says(tmp_path, monkeypatch):
    folder = str(write_shards(tmp_path / "shards", [2, 0, 4, 1]))
    in_memory = open_source(folder)
    monkeypatch.setattr("neuclip.data.tar.joined_index.MAPPED_FROM", 3)
    for _ in range(2):  # made, then found
        source = open_source(folder)
        assert source.joined.place is not None and in_memory.joined.place is None
        assert contents(source) == contents(in_memory) and source.faults == in_memory.faults
        assert source.captions_sha256 and fingerprint(source) == fingerprint(in_memory)


def test_a_mapped_index_is_not_copied_to_other_processes(tmp_path, mapped):
    sizes = []
    for count in (4, 200):
        source = open_source(str(write_shards(tmp_path / f"{count}", [count])))
        sizes.append(len(pickle.dumps(source)))
        copy = pickle.loads(pickle.dumps(source))
        assert not copy.joined.rows.flags.owndata and copy[count - 1].captions == (f"image {count - 1}",)
    assert abs(sizes[0] - sizes[1]) < 20  # the names of the files, whatever they hold


def grown_old(place: Path, days: float) -> None:
    os.utime(place, (time.time() - days * 24 * 3600,) * 2)


def test_a_mapped_index_follows_its_shards_and_the_old_one_goes_when_no_run_can_need_it(tmp_path, mapped):
    folder = write_shards(tmp_path / "shards", [2, 2])
    first = open_source(str(folder))
    write_shards(folder, [2, 5])
    second = open_source(str(folder))
    assert len(second) == 7 and second.joined.place != first.joined.place
    assert len(pickle.loads(pickle.dumps(first))) == 4  # a run that began before may start workers
    grown_old(first.joined.place, 8)
    write_shards(folder, [2, 6])
    third = open_source(str(folder))
    assert {place.name for place in third.joined.place.parent.iterdir()} == {
        second.joined.place.name,
        third.joined.place.name,
    }


def test_a_mapped_index_that_is_used_counts_as_new(tmp_path, mapped):
    folder = write_shards(tmp_path / "shards", [2, 2])
    source = open_source(str(folder))
    grown_old(source.joined.place, 40)
    pickle.loads(pickle.dumps(source))
    open_source(str(write_shards(tmp_path / "others", [2, 2])))
    assert source.joined.place.exists()


def test_mapped_indexes_that_nobody_used_for_a_month_are_removed(tmp_path, mapped):
    folder = tmp_path / "cache" / "indexes" / "joined"
    folder.mkdir(parents=True)
    for name, days in {"0-0.rows": 29, "0-1.rows": 31}.items():
        (folder / name).write_bytes(b"")
        grown_old(folder / name, days)
    place = open_source(str(write_shards(tmp_path / "shards", [2, 2]))).joined.place
    assert {other.name for other in folder.iterdir()} == {"0-0.rows", place.name}


def test_a_mapped_index_that_a_killed_process_began_is_removed_in_time(tmp_path, mapped, monkeypatch):
    unfinished = tmp_path / "cache" / "indexes" / "joined" / ".0-0.rows.abc.part"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"")
    open_source(str(write_shards(tmp_path / "shards", [2, 2])))
    assert unfinished.exists()
    monkeypatch.setattr("neuclip.data.tar.joined_index.UNFINISHED_SECONDS", -60)
    open_source(str(write_shards(tmp_path / "others", [2, 2])))
    assert not unfinished.exists()


def test_mapped_indexes_of_two_caption_keys_live_side_by_side(tmp_path, mapped):
    members = [m for k in range(4) for m in ((f"{k}.png", image_bytes(k)), (f"{k}.json", b'{"a": "one", "b": "two"}'))]
    shard = str(write_tar(tmp_path / "0.tar", members))
    sources = [open_source(shard, caption_key=key) for key in "abab"]
    assert len({source.joined.place for source in sources}) == 2
    assert [pickle.loads(pickle.dumps(source))[3].captions for source in sources] == [("one",), ("two",)] * 2


def test_shards_of_equal_names_sizes_and_times_in_two_folders_are_not_mixed_up(tmp_path, mapped, monkeypatch):
    for project, first in (("a", 0), ("b", 4)):
        members = [m for number in range(first, first + 4) for m in pair(number)]
        os.utime(write_tar(tmp_path / project / "shards" / "0.tar", members), ns=(1, 1))
    found = []
    for project in "ab":
        monkeypatch.chdir(tmp_path / project)
        source = open_source("shards")
        found.append((source.joined.place, fingerprint(source)["sha256"]))
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_a_broken_mapped_index_is_made_again(tmp_path, mapped):
    folder = str(write_shards(tmp_path / "shards", [2, 2]))
    place = open_source(folder).joined.place
    whole = place.read_bytes()
    for broken in (whole[:-3], whole[21:], b"", b"x" * 8, b"\xff" * 100):
        place.write_bytes(broken)
        assert len(open_source(folder)) == 4 and contents(open_source(folder))[3][1] == ("image 3",)
        assert place.read_bytes() == whole


def test_without_a_writable_cache_the_index_stays_in_memory(tmp_path, mapped, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "file" / "cache"))
    source = open_source(str(write_shards(tmp_path / "shards", [2, 2])))
    assert source.joined.place is None and len(contents(source)) == 4
