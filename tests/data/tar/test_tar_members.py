"""What the members of a shard become: images, captions, labels, bad samples."""

from __future__ import annotations

import gzip
import pickle
import random

import pytest

from neuclip.data.open import open_source
from neuclip.data.tar.source import open_count
from tests.data.small_shards import contents, image_bytes, pair, write_shards, write_tar
from tests.data.small_tables import fault_of


def test_captions_and_labels_come_from_json_and_cls_members(tmp_path):
    members = [
        ("a.JPG", image_bytes(0, "jpg")), ("a.json", b'{"caption": "from json"}'), ("a.cls", b"3"),
        ("b.png", image_bytes(1)), ("b.json", b'{"caption": "no"}'), ("b.txt", b"from text\n"), ("b.cls", b"0\n"),
        ("c.png", image_bytes(2)), ("c.json", b'{"caption": ["one", "two"]}'), ("c.cls", b"7"),
    ]  # fmt: skip
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    assert [source[id].captions for id in range(3)] == [("from json",), ("from text",), ("one", "two")]
    assert source.captions() == ["from json", "from text", "one"]
    assert source.labels() == [3, 0, 7]


def test_an_image_with_a_label_needs_no_caption(tmp_path):
    source = open_source(str(write_tar(tmp_path / "0.tar", [("a.png", image_bytes(0)), ("a.cls", b"1")])))
    assert source[0].captions == ()


def test_labels_are_none_unless_every_sample_has_one(tmp_path):
    assert open_source(str(write_tar(tmp_path / "0.tar", [*pair(0), ("00000.cls", b"1"), *pair(1)]))).labels() is None


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("a.png", b"x")], "caption is missing"),
        ([("a.png", b"x"), ("a.txt", b" \n")], "caption is empty"),
        ([("a.png", b"x"), ("a.txt", b"caf\xe9")], "caption is not UTF-8"),
        ([("a.png", b"x"), ("a.json", b'{"title": "t"}')], "caption is missing"),
        ([("a.png", b"x"), ("a.json", b"{")], "caption is missing"),
    ],
)
def test_a_sample_without_a_usable_caption_keeps_its_id_and_is_bad(tmp_path, members, reason):
    source = open_source(str(write_tar(tmp_path / "0.tar", [*members, *pair(5)])))
    assert len(source) == 2 and source.captions() == ["", "image 5"]
    fault = fault_of(source, 0)
    assert fault.reason == reason and "0.tar: a." in fault.where


def test_a_packed_shard_that_changes_is_unpacked_again(tmp_path):
    shard = write_tar(tmp_path / "x.tar", pair(0))
    packed = tmp_path / "only.tar.gz"
    packed.write_bytes(gzip.compress(shard.read_bytes()))
    assert len(open_source(str(packed))) == 1
    packed.write_bytes(gzip.compress(write_tar(tmp_path / "x.tar", pair(0) + pair(1)).read_bytes()))
    assert len(open_source(str(packed))) == 2


def test_a_pickled_source_reads_the_same_and_holds_no_open_file(tmp_path):
    source = open_source(str(write_shards(tmp_path, [2, 2])))
    before = contents(source)
    copy = pickle.loads(pickle.dumps(source))
    assert open_count(source._number) == 2 and open_count(copy._number) == 0
    assert contents(copy) == before


def test_more_shards_than_open_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("neuclip.data.tar.source.OPEN_FILES", 2)
    source = open_source(str(write_shards(tmp_path, [1] * 7)))
    ids = list(range(7)) * 3
    random.Random(0).shuffle(ids)
    assert [source[id].captions[0] for id in ids] == [f"image {id}" for id in ids]
