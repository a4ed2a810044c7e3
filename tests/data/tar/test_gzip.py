"""Packed shards: unpacked once into the cache; what is damaged is kept up to the damage, and counted."""

from __future__ import annotations

import gzip
import os
import re
import time
from pathlib import Path

import pytest
from neuclip.data.tar.gzip import damage_of, plain_tars, unpack

from neuclip.data.convert import convert
from neuclip.data.faults import FaultLog
from neuclip.data.open import open_source
from neuclip.data.tar.index import build_index
from neuclip.errors import RunFailed, UserError
from neuclip.records import read_lines
from tests.data.small_shards import pair, write_tar

PAIRS = 40


@pytest.fixture
def packed(tmp_path) -> bytes:
    members = [member for number in range(PAIRS) for member in pair(number)]
    return gzip.compress(write_tar(tmp_path / "plain" / "0.tar", members).read_bytes(), mtime=0)


def test_a_packed_shard_is_unpacked_however_its_ending_is_written(tmp_path, packed):
    for name in ("A.TAR.GZ", "b.Tar.Gz", "C.TGZ", "d.tar.gz", "e.tgz"):
        (tmp_path / name).write_bytes(packed)
        assert len(open_source(str(tmp_path / name))) == PAIRS
        assert plain_tars([tmp_path / name])[0].name == f"{name[0]}.tar"


def faults_of(shard: Path) -> list[tuple[str, str, int]]:
    """Those that a new source of it tells."""
    return [(fault.reason, fault.where, fault.times) for fault in open_source(str(shard)).faults]


def test_a_packed_shard_with_a_wrong_checksum_or_more_behind_it_keeps_all_that_is_in_it(tmp_path, packed, capsys):
    wrong = bytearray(packed)
    wrong[-6] ^= 1
    for name, content in {"checksum": bytes(wrong), "behind": packed + b"<html> 404"}.items():
        shard = tmp_path / f"{name}.tar.gz"
        shard.write_bytes(content)
        assert len(open_source(str(shard))) == PAIRS
        said = capsys.readouterr().err
        assert f"{shard}: packed shard is damaged at packed byte " in said and said.count("\n") == 1
        [(reason, where, times)] = faults_of(shard)  # once more, now that it is unpacked
        assert (reason, times) == ("packed shard is damaged", 1)
        at, of = (int(word) for word in re.search(r"gz at packed byte (\d+) of (\d+) \(.+\)$", where).groups())
        assert len(packed) - 8 <= at < of == len(content)


def test_a_packed_shard_in_several_members_with_padding_is_whole(tmp_path, packed, capsys):
    tar = gzip.decompress(packed)
    several = gzip.compress(tar[:7000]) + gzip.compress(b"") + bytes(600) + gzip.compress(tar[7000:]) + bytes(70_000)
    (tmp_path / "0.tar.gz").write_bytes(several)
    assert plain_tars([tmp_path / "0.tar.gz"])[0].read_bytes() == tar and capsys.readouterr().err == ""


def test_a_packed_shard_that_is_cut_keeps_all_that_comes_before_the_cut(tmp_path, packed, capsys):
    tar = gzip.decompress(packed)
    (tmp_path / "cut.tar.gz").write_bytes(packed[: len(packed) // 2])
    kept = len(open_source(str(tmp_path / "cut.tar.gz")))
    assert 10 < kept < PAIRS and "cut.tar.gz: packed shard is cut off at its end" in capsys.readouterr().err
    shown = f"{tmp_path / 'cut.tar.gz'} at its end, packed byte {len(packed) // 2}"
    for _ in range(2):  # once, though the tar that came out of it is cut off too
        assert faults_of(tmp_path / "cut.tar.gz") == [("packed shard is cut off", shown, 1)]
    stored = bytearray(gzip.compress(tar, compresslevel=0, mtime=0))  # in blocks of bytes as they are
    length = int.from_bytes(stored[11:13], "little")  # of the first block, behind 10 bytes of header and its kind
    second = 10 + 5 + length
    stored[second] = 7  # no kind of block
    (tmp_path / "stored.tar.gz").write_bytes(stored)
    assert plain_tars([tmp_path / "stored.tar.gz"])[0].read_bytes() == tar[:length]


def test_a_cut_behind_a_whole_pair_is_counted_too(tmp_path, packed):
    tar = gzip.decompress(packed)
    behind = build_index(tmp_path / "plain" / "0.tar").rows[2]["image_block"].item() * 512 - 512
    stored = gzip.compress(tar[:behind], compresslevel=0)  # the plain tar of two pairs is not taken for a damaged one
    (tmp_path / "0.tar.gz").write_bytes(stored)
    assert len(open_source(str(tmp_path / "0.tar.gz"))) == 2 and faults_of(tmp_path / "0.tar.gz") == []
    (tmp_path / "0.tar.gz").write_bytes(stored[:-8])
    assert len(open_source(str(tmp_path / "0.tar.gz"))) == 2
    assert [fault[0] for fault in faults_of(tmp_path / "0.tar.gz")] == ["packed shard is cut off"]


def test_damage_of_a_packed_shard_is_in_every_index_of_it_until_it_is_fetched_again(tmp_path, packed, monkeypatch):
    shard = tmp_path / "0.tar.gz"
    shard.write_bytes(packed[: len(packed) // 2])
    [copy] = plain_tars([shard])
    faults = faults_of(shard)
    copy.with_name("0.tar.index.npz").unlink()
    assert faults_of(shard) == faults and len(faults) == 1
    copy.unlink()
    assert faults_of(shard) == faults
    monkeypatch.setattr("neuclip.data.tar.joined_index.MAPPED_FROM", 3)
    assert faults_of(shard) == faults == faults_of(shard)
    shard.write_bytes(packed)
    assert faults_of(shard) == []
    assert damage_of(copy) is not None
    unpack(shard, copy)
    assert damage_of(copy) is None  # nor does the note outlive the copy that it is about


def test_damage_of_a_packed_shard_is_listed_by_a_run_and_by_a_conversion(tmp_path, packed):
    (tmp_path / "0.tar.gz").write_bytes(packed[: len(packed) // 2])
    open_source(str(tmp_path / "0.tar.gz"))
    source = open_source(str(tmp_path / "0.tar.gz"))
    log = FaultLog(tmp_path / "skipped.jsonl", 0.05)
    log.note_source(source)
    assert log.counts == {"packed shard is cut off": 1}
    assert convert(source, tmp_path / "shards").skipped == log.counts
    assert read_lines(tmp_path / "shards" / "skipped.jsonl") == read_lines(tmp_path / "skipped.jsonl")


def test_damage_of_a_remote_packed_shard_is_reported_when_its_copy_is_gone(tmp_path, packed, cache):
    (tmp_path / "0.tar.gz").write_bytes(packed[: len(packed) // 2])
    first = open_source(f"file://{tmp_path}/0.tar.gz")
    assert [(fault.reason, fault.times) for fault in first.faults] == [("packed shard is cut off", 1)]
    [copy] = (cache / "shards").glob("*.tar")
    copy.unlink()
    assert open_source(f"file://{tmp_path}/0.tar.gz").faults == first.faults


@pytest.mark.parametrize("content", [b"<html>" * 100, bytes(5000), b"\x1f\x8b\x08"])
def test_what_gives_not_one_byte_is_no_gzip_file(tmp_path, content):
    (tmp_path / "0.tar.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"0\.tar\.gz: is not a gzip file"):
        open_source(str(tmp_path / "0.tar.gz"))


def test_what_a_killed_unpacking_left_is_removed_in_time_and_one_that_is_at_its_end_is_not(
    tmp_path, packed, cache, monkeypatch
):
    unfinished = cache / "unpacked" / "0123" / ".0.tar.x.part"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"half")
    os.utime(unfinished, (1, 1))  # just before it is moved, an unpacked file gets the time of its shard
    (tmp_path / "0.tar.gz").write_bytes(packed)
    open_source(str(tmp_path / "0.tar.gz"))
    assert unfinished.exists()
    monkeypatch.setattr("neuclip.data.tar.gzip.UNFINISHED_SECONDS", -60)
    open_source(str(tmp_path / "0.tar.gz"))
    assert not unfinished.exists()


def days_unused(copy: Path, days: float) -> None:
    os.utime(copy.parent, (time.time() - days * 24 * 3600,) * 2)


def test_unpacked_copies_go_after_a_month_without_use(tmp_path, packed, cache):
    for name in ("read", "old", "new", "opened"):
        (tmp_path / f"{name}.tar.gz").write_bytes(packed)
    copies = {name: plain_tars([tmp_path / f"{name}.tar.gz"])[0] for name in ("read", "old", "new")}
    source = open_source(str(tmp_path / "read.tar.gz"))
    (cache / "unpacked" / "my images").mkdir()
    for copy, days in {"read": 31, "old": 31, "new": 29}.items():
        days_unused(copies[copy], days)
    days_unused(cache / "unpacked" / "my images" / "x", 31)
    assert source[0].captions == ("image 0",)  # a run that lasts long opens its shards again and again
    open_source(str(tmp_path / "opened.tar.gz"))
    assert {name for name, copy in copies.items() if copy.exists()} == {"read", "new"}
    assert (cache / "unpacked" / "my images").exists()
    days_unused(copies["new"], 31)
    inode = copies["new"].stat().st_ino
    open_source(str(tmp_path / "new.tar.gz"))
    assert copies["new"].stat().st_ino == inode  # it was not removed just before it was needed


def test_a_copy_that_is_gone_in_mid_run_ends_the_run_and_changes_no_image(tmp_path, packed):
    (tmp_path / "0.tar.gz").write_bytes(packed)
    source = open_source(str(tmp_path / "0.tar.gz"))
    source.paths[0].unlink()
    with pytest.raises(RunFailed, match=r"0\.tar\.gz: its unpacked copy has gone from the cache; .*--resume"):
        source[0]


def test_a_second_process_that_unpacks_the_same_shard_does_not_disturb_the_first(tmp_path, packed):
    (tmp_path / "0.tar.gz").write_bytes(packed)
    source = open_source(str(tmp_path / "0.tar.gz"))
    unpack(tmp_path / "0.tar.gz", source.paths[0])
    assert source[0].captions == ("image 0",)


def test_samples_of_a_packed_shard_are_named_after_it(tmp_path, packed):
    (tmp_path / "0.tar.gz").write_bytes(packed)
    assert open_source(str(tmp_path / "0.tar.gz")).where(1) == f"{tmp_path / '0.tar.gz'}: 00001.jpg"
