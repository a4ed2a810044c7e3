"""Addresses become sources; the same pairs are the same pairs in whatever files they lie."""

from __future__ import annotations

import csv
import gzip
import pickle
import random

import pytest

from neuclip.data.fingerprint import fingerprint
from neuclip.data.open import open_source
from neuclip.data.sample import BadSample
from neuclip.data.tar.open_files import open_count
from neuclip.errors import UserError
from tests.data.small_shards import contents, image_bytes, pair, write_shards, write_tar


def test_tar_and_gzipped_tar_and_csv_give_the_same_pairs(tmp_path):
    write_shards(tmp_path / "plain", [4, 0, 3])
    (tmp_path / "packed").mkdir()
    for shard in (tmp_path / "plain").glob("*.tar"):
        (tmp_path / "packed" / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["caption", "image"])
        for number in range(7):
            (name, content), (_, caption) = pair(number)
            (tmp_path / name).write_bytes(content)
            writer.writerow([caption.decode(), name])
    sources = [open_source(str(tmp_path / name)) for name in ("plain", "packed", "pairs.csv")]
    first = contents(sources[0])
    assert [captions for _, captions in first] == [(f"image {number}",) for number in range(7)]
    for source in sources:
        assert contents(source) == first
        assert source.captions() == [f"image {number}" for number in range(7)]
        assert fingerprint(source) == fingerprint(sources[0])


def test_the_fingerprint_tells_other_captions_apart(tmp_path):
    prints = set()
    for number, captions in enumerate([("ab", "c"), ("a", "bc"), ("c", "ab"), ("ab", "c", "d")]):
        members = [
            m for k, text in enumerate(captions) for m in ((f"{k}.png", image_bytes(k)), (f"{k}.txt", text.encode()))
        ]
        prints.add(fingerprint(open_source(str(write_tar(tmp_path / f"{number}.tar", members))))["sha256"])
    assert len(prints) == 4


def test_ids_follow_sorted_shard_paths_one_level_deep(tmp_path):
    write_tar(tmp_path / "b.tar", pair(2))
    write_tar(tmp_path / "a" / "0.tar", pair(0))
    write_tar(tmp_path / "a" / "1.tar", pair(1))
    assert open_source(str(tmp_path)).captions() == ["image 0", "image 1", "image 2"]


def test_a_shard_and_its_packed_twin_are_read_once(tmp_path):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(shard.read_bytes()))
    assert len(open_source(str(tmp_path))) == 1


def test_a_packed_shard_that_changes_is_unpacked_again(tmp_path):
    shard = write_tar(tmp_path / "x.tar", pair(0))
    packed = tmp_path / "only.tar.gz"
    packed.write_bytes(gzip.compress(shard.read_bytes()))
    assert len(open_source(str(packed))) == 1
    packed.write_bytes(gzip.compress(write_tar(tmp_path / "x.tar", pair(0) + pair(1)).read_bytes()))
    assert len(open_source(str(packed))) == 2


def test_a_brace_pattern_opens_its_shards_and_no_others(tmp_path):
    write_shards(tmp_path, [1, 1, 1, 1])
    assert open_source(str(tmp_path / "{00001..00002}.tar")).captions() == ["image 1", "image 2"]


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


def test_a_image_with_a_label_needs_no_caption(tmp_path):
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
    with pytest.raises(BadSample) as caught:
        source[0]
    assert caught.value.reason == reason and "0.tar: a." in caught.value.where


def test_a_pickled_source_reads_the_same_and_holds_no_open_file(tmp_path):
    source = open_source(str(write_shards(tmp_path, [2, 2])))
    before = contents(source)
    copy = pickle.loads(pickle.dumps(source))
    assert open_count(source._number) == 2 and open_count(copy._number) == 0
    assert contents(copy) == before


def test_more_shards_than_open_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("neuclip.data.tar.open_files.OPEN_FILES", 2)
    source = open_source(str(write_shards(tmp_path, [1] * 7)))
    ids = list(range(7)) * 3
    random.Random(0).shuffle(ids)
    assert [source[id].captions[0] for id in ids] == [f"image {id}" for id in ids]


def test_a_csv_with_tabs_and_open_clips_columns_is_read(tmp_path):
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "pairs.csv").write_text("filepath\ttitle\n0.png\ta title, with a comma\n", encoding="utf-8-sig")
    assert open_source(str(tmp_path / "pairs.csv"))[0].captions == ("a title, with a comma",)


def test_named_columns_win_over_usual_names(tmp_path):
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "pairs.tsv").write_text("caption\tdeutsch\timage\tphoto\nred\trot\tnone.png\t0.png\n")
    source = open_source(str(tmp_path / "pairs.tsv"), image_column="photo", caption_column="deutsch")
    assert source[0].captions == ("rot",)


def test_bad_rows_of_a_csv_are_bad_alone(tmp_path):
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    rows = [
        b"image,caption",
        b"0.png,good",
        b"1.png,no such file",
        b"0.png,caf\xe9",
        b"0.png",
        b",no path",
        b"",
        b"0.png,last",
    ]
    (tmp_path / "pairs.csv").write_bytes(b"\n".join(rows))
    source = open_source(str(tmp_path / "pairs.csv"))
    reasons = []
    for id in range(len(source)):
        try:
            reasons.append(source[id].captions[0])
        except BadSample as bad:
            reasons.append(bad.reason)
    assert reasons == [
        "good", "image file cannot be read", "caption is not UTF-8", "caption is empty", "no image", "last",
    ]  # fmt: skip
    assert source.captions()[2] == ""


def refusal(address: object, **columns: str) -> str:
    with pytest.raises(UserError) as caught:
        open_source(str(address), **columns)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_messages_name_what_was_found_and_what_to_do(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "pairs.csv").write_text("url,words\nx,y\n")
    (tmp_path / "header.csv").write_text("image,caption\n")
    (tmp_path / "page.tar").write_text("<html>" * 200)
    (tmp_path / "zero.tar").write_bytes(b"")
    (tmp_path / "page.tar.gz").write_text("<html>")
    assert "icons-30k" in refusal("icon-30k") and "did you mean icons-30k/new-drawings" in refusal(
        "icon-30k/new-drawings"
    )
    assert "no such file or folder" in refusal(tmp_path / "missing")
    assert "no tar shards" in refusal(tmp_path / "empty")
    assert "unknown kind" in refusal(tmp_path / "notes.md")
    message = refusal(tmp_path / "pairs.csv")
    assert "url, words" in message and "--data.image_column" in message
    assert "--data.caption_column" in refusal(tmp_path / "pairs.csv", image_column="url")
    assert "did you mean 'words'" in refusal(tmp_path / "pairs.csv", image_column="url", caption_column="word")
    assert "holds no samples" in refusal(tmp_path / "header.csv")
    assert "not a tar file" in refusal(tmp_path / "page.tar")
    assert "shard is empty" in refusal(tmp_path / "zero.tar")
    assert "not a gzip file" in refusal(tmp_path / "page.tar.gz")
    assert "2 of 2 files do not exist" in refusal(tmp_path / "{0..1}.tar")
