"""Members of shards with more than one dot in their names: parts of a sample, pairs of their own, or counted losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip.data.open import open_source
from neuclip.data.tar.index import DOTTED, build_index
from tests.data.small_shards import Member, image_bytes, write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))


def pairs(*stems: str) -> list[Member]:
    return [
        member
        for number, stem in enumerate(stems)
        for member in ((f"{stem}.png", image_bytes(number)), (f"{stem}.txt", stem.encode()))
    ]


def notes(path: Path, members: list[Member]) -> list[tuple[str, int]]:
    return [(reason, times) for reason, _, times in build_index(write_tar(path / "0.tar", members)).notes]


def test_pairs_with_dots_in_their_names_are_all_read(tmp_path):
    stems = [f"v1.2-{number:03d}" for number in range(10)] + ["a.b/dr. who 1", "a.b/dr. who 2", "plain"]
    source = open_source(str(write_tar(tmp_path / "0.tar", pairs(*stems))))
    assert source.captions() == stems and source.faults == ()
    assert [source[id].captions for id in range(len(source))] == [(stem,) for stem in stems]
    assert [source[id].image for id in (0, 12)] == [image_bytes(0), image_bytes(12)]


def test_further_members_of_a_sample_stay_its_members(tmp_path):
    further = [
        ("0.seg.png", image_bytes(8)),
        ("0.seg.jpg", image_bytes(9)),
        ("0.seg.txt", b"mask"),
        ("0.left.view.png", b"x"),
    ]
    for members in (pairs("0", "1") + further, further + pairs("0", "1"), pairs("1", "0") + further):
        index = build_index(write_tar(tmp_path / "0.tar", members))
        assert sorted(index.captions.strings()) == ["0", "1"] and index.notes == ()


def test_every_image_that_no_pair_can_be_made_of_is_counted(tmp_path):
    images = [(f"v1.2-{number:03d}.png", image_bytes(number)) for number in range(15)]
    assert notes(tmp_path, images)[-1] == (DOTTED, 6)  # the last of ten places tells of the others
    assert sum(times for _, times in notes(tmp_path, images)) == 15
    views = [("0.txt", b"both"), ("0.left.png", image_bytes(0)), ("0.right.png", image_bytes(1))]
    assert notes(tmp_path, views) == [("no image", 1), (DOTTED, 1), (DOTTED, 1)]
    assert notes(tmp_path, pairs("v1.0")[:1] + pairs("v1.1")) == [(DOTTED, 1)]
    twice = [*pairs("v1.0"), ("v1.0.jpg", image_bytes(1))]
    assert notes(tmp_path, twice) == [("name occurs twice", 1)]


@pytest.mark.parametrize("stems", [("0", "1"), ("v1.0", "v1.1"), ("v1.0", "v1.1", "v1.2")])
def test_a_cut_takes_one_dotted_pair_and_not_its_neighbours(tmp_path, stems):
    whole = write_tar(tmp_path / "0.tar", pairs(*stems)).read_bytes()
    last = build_index(tmp_path / "0.tar").rows[-1]["image_block"].item() * 512
    (tmp_path / "0.tar").write_bytes(whole[: last + 10])
    index = build_index(tmp_path / "0.tar")
    assert index.captions.strings() == list(stems[:-1])
    assert [(reason, times) for reason, _, times in index.notes] == [("shard is cut off", 1)]


def test_a_shard_that_ends_with_a_further_member_and_no_mark_has_lost_nothing(tmp_path):
    members = [*pairs("0", "1"), ("1.seg.png", image_bytes(2))]
    content = write_tar(tmp_path / "0.tar", members).read_bytes().rstrip(b"\0")
    (tmp_path / "0.tar").write_bytes(content + bytes(-len(content) % 512))
    index = build_index(tmp_path / "0.tar")
    assert index.captions.strings() == ["0", "1"] and open_source(str(tmp_path / "0.tar")).faults == ()
