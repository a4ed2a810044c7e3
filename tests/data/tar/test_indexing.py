"""`neuclip data index`: what the indexes say, and whether they fit their shards."""

from __future__ import annotations

import os

import pytest

from neuclip.cli.main import main
from neuclip.data.open import open_source
from tests.data.small_shards import image_bytes, pair, write_shards, write_tar


def test_data_index_tells_what_it_found_and_verifies_it(tmp_path, capsys):
    folder = write_shards(tmp_path / "shards", [2, 3])
    write_tar(folder / "00002.tar", [*pair(9), ("x.txt", b"lonely")])
    assert main(["data", "index", str(folder), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "shards: 6 samples in 3 shards" in said and "21 bytes per sample" in said
    assert f"index: in {folder}; " in said and "without a caption" not in said
    assert f"no image: {folder / '00002.tar'}: x" in said and "all shards fit their index" in said


def test_data_index_counts_samples_without_a_caption(tmp_path, capsys):
    folder = write_shards(tmp_path / "shards", [2, 3])
    assert main(["data", "index", str(folder), "--data.caption_key", "nope"]) == 0
    assert "without a caption: 5 samples" in capsys.readouterr().out


def test_verify_fails_for_a_shard_that_has_changed_since_its_index(tmp_path, capsys):
    folder = write_shards(tmp_path / "shards", [2, 3])
    open_source(str(folder))
    write_tar(folder / "00001.tar", pair(9))
    assert main(["data", "index", str(folder), "--verify"]) == 1
    assert "1 shard did not fit the index" in capsys.readouterr().out
    assert main(["data", "index", str(folder), "--verify"]) == 0


@pytest.mark.parametrize("mapped_from", [3, 1000])
def test_verify_says_what_differs_and_corrects_it(tmp_path, capsys, monkeypatch, mapped_from):
    monkeypatch.setattr("neuclip.data.tar.joined_index.MAPPED_FROM", mapped_from)
    folder = write_shards(tmp_path / "shards", [1, 2, 1])
    open_source(str(folder))
    shard = folder / "00001.tar"
    before = shard.stat()
    shard.write_bytes(shard.read_bytes().replace(b"image 2", b"image X"))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and time tell nothing
    assert "image 2" in open_source(str(folder)).captions()
    assert main(["data", "index", str(folder), "--verify"]) == 1
    said = capsys.readouterr().out
    assert f"{shard}: caption 1 is 'image X', in its index 'image 2'; indexed again" in said
    assert "1 shard did not fit" in said
    assert open_source(str(folder)).captions() == ["image 0", "image 1", "image X", "image 3"]
    assert main(["data", "index", str(folder), "--verify"]) == 0


def test_a_write_between_rereading_and_storing_is_not_certified(tmp_path):
    shard = write_shards(tmp_path / "shards", [2]) / "00000.tar"
    os.utime(shard, ns=(1, 1))
    source = open_source(str(shard))
    found = source.reread(0)
    shard.write_bytes(shard.read_bytes().replace(b"image 1", b"image X"))
    source.store(0, found)
    assert open_source(str(shard)).captions() == ["image 0", "image X"]


def test_data_that_need_no_index_are_refused(tmp_path, capsys):
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "pairs.csv").write_text("image,caption\n0.png,a\n")
    assert main(["data", "index", str(tmp_path / "pairs.csv")]) == 2
    assert "holds no tar shards" in capsys.readouterr().err
    assert main(["data", "index"]) == 2 and main(["data", "list", "--verify"]) == 2
    assert "no flag --verify; the flags are --json" in capsys.readouterr().err


def test_data_index_reads_remote_shards(server, capsys):
    write_shards(server.folder, [2, 3])
    assert main(["data", "index", f"{server.url}/{{00000..00001}}.tar", "--verify"]) == 0
    assert "5 samples in 2 shards" in capsys.readouterr().out
