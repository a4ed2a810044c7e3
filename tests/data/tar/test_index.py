"""The index of a shard: which members are samples, what is lost, stored, and built again when the shard changes."""

from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from neuclip.data.sample import BadSample
from PIL import Image

from neuclip.data.decoding import decode
from neuclip.data.open import open_source
from neuclip.data.tar.index import DOTTED, build_index, load_index
from neuclip.data.tar.walk import NO_END_MARK, members
from neuclip.errors import RunFailed
from tests.data.small_shards import Member, image_bytes, pair, write_tar


def reasons(shard) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for reason, _, times in build_index(shard).notes:
        counts[reason] += times
    return dict(counts)


def test_the_stored_index_is_what_was_built(tmp_path):
    shard = write_tar(tmp_path / "0.tar", pair(0) + pair(1) + [("lonely.txt", b"no image")])
    (built, _), (stored, _) = load_index(shard), load_index(shard)
    assert (tmp_path / "0.tar.index.npz").exists()
    assert np.array_equal(built.rows, stored.rows) and built.notes == stored.notes
    assert built.captions.strings() == stored.captions.strings() == ["image 0", "image 1"]


def test_a_stored_index_is_used_and_a_changed_shard_is_noticed(tmp_path):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    assert open_source(str(shard)).captions() == ["image 0"]
    first = (tmp_path / "0.tar.index.npz").stat().st_mtime_ns
    assert open_source(str(shard)).captions() == ["image 0"]
    assert (tmp_path / "0.tar.index.npz").stat().st_mtime_ns == first
    write_tar(shard, pair(3))  # the same size to the byte, another time
    os.utime(shard, ns=(1, 1))
    assert open_source(str(shard)).captions() == ["image 3"]


@pytest.mark.parametrize("change", ["written in place", "replaced", "cut"])
def test_a_shard_that_is_written_again_while_it_is_read_ends_the_reading_with_its_name(tmp_path, change):
    shard = write_tar(tmp_path / "0.tar", pair(0) + pair(1))
    source = open_source(str(shard))
    assert change == "replaced" or source[0].captions == ("image 0",)  # a file that is open stays as it was
    if change == "replaced":
        write_tar(tmp_path / "other", pair(3) + pair(1)).replace(shard)
    elif change == "cut":
        os.truncate(shard, 700)
    else:
        write_tar(shard, pair(3) + pair(1))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(RunFailed, match=r"0\.tar: was written again while it was in use; .*--resume") as failure:
        source[0]
    assert "\n" not in str(failure.value)
    assert change == "cut" or open_source(str(shard)).captions() == ["image 3", "image 1"]


def test_a_broken_index_file_is_built_again(tmp_path):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    load_index(shard)
    place = tmp_path / "0.tar.index.npz"
    for broken in (b"", b"not a zip", place.read_bytes()[:300]):
        place.write_bytes(broken)
        assert len(load_index(shard)[0].rows) == 1


def test_a_read_only_folder_keeps_its_index_in_the_cache(tmp_path):
    shard = write_tar(tmp_path / "shards" / "0.tar", pair(0))
    shard.parent.chmod(0o555)
    try:
        assert len(open_source(str(shard.parent))) == 1
        assert [path.name for path in shard.parent.iterdir()] == ["0.tar"]
        assert len(list((tmp_path / "cache" / "indexes").glob("*-0.tar.index.npz"))) == 1
        assert open_source(str(shard.parent)).captions() == ["image 0"]
    finally:
        shard.parent.chmod(0o755)


def test_what_has_changed_since_a_shard_was_indexed_is_said(tmp_path, capsys):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    assert load_index(shard)[1] == "" and load_index(shard)[1] == ""
    os.utime(shard, ns=(1, 1))
    assert load_index(shard)[1] == "it was written again since it was indexed"
    size = shard.stat().st_size
    write_tar(shard, [member for number in range(9) for member in pair(number)])
    assert len(open_source(str(shard))) == 9
    said = capsys.readouterr().err
    assert f"{shard}: it had {size:,} bytes when it was indexed and has {shard.stat().st_size:,} now" in said
    assert said.count("\n") == 1


def test_an_index_of_another_version_is_rebuilt_without_a_word(tmp_path, monkeypatch, capsys):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    monkeypatch.setattr("neuclip.data.tar.index.FORMAT", 1)
    load_index(shard)
    monkeypatch.undo()
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    assert open_source(str(shard)).captions() == ["image 0"] and capsys.readouterr().err == ""


def test_a_caption_key_has_an_index_of_its_own(tmp_path):
    members = [
        ("a.png", image_bytes(0)),
        ("a.txt", b"text"),
        ("a.json", b'{"caption": "usual", "alt": ["other", "more"]}'),
    ]
    shard = write_tar(tmp_path / "0.tar", members)
    for _ in range(2):
        assert open_source(str(shard))[0].captions == ("text",)
        source = open_source(str(shard), caption_key="alt")
        assert source[0].captions == ("other", "more") and source.captions() == ["other"]


def test_members_that_do_not_lie_together_are_one_sample(tmp_path):
    (a, a_text), (b, b_text) = pair(0), pair(1)
    source = open_source(str(write_tar(tmp_path / "0.tar", [a, b, b_text, a_text])))
    assert source.captions() == ["image 0", "image 1"]
    assert source[0].image == a[1] and source[1].image == b[1]


def test_what_has_no_image_is_no_sample_but_is_counted(tmp_path):
    shard = write_tar(tmp_path / "0.tar", [("x.txt", b"1"), *pair(0), ("y.json", b"{}"), ("z.mp3", b"")])
    source = open_source(str(shard))
    assert len(source) == 1 and reasons(shard) == {"no image": 3}
    assert [(fault.reason, fault.where, fault.times) for fault in source.faults] == [
        ("no image", f"{shard}: {name}", 1) for name in ("x", "y", "z")
    ]


def test_a_second_image_of_the_same_name_is_counted_and_the_first_stays(tmp_path):
    shard = write_tar(tmp_path / "0.tar", [*pair(0), ("00000.jpg", image_bytes(9, "jpg"))])
    assert open_source(str(shard))[0].image == image_bytes(0, "png") and reasons(shard) == {"name occurs twice": 1}


def test_hidden_files_are_not_samples(tmp_path):
    shard = write_tar(tmp_path / "0.tar", [("._a.png", b"x"), ("d/.b.png", b"x"), *pair(0)])
    assert len(build_index(shard).rows) == 1 and not reasons(shard)


def test_a_cut_off_shard_keeps_its_whole_samples_wherever_the_cut_is(tmp_path):
    whole = [m for number in range(4) for m in pair(number)]
    shard = write_tar(tmp_path / "0.tar", whole)
    data = shard.read_bytes()
    ends = [offset + size for _, offset, size in members(data, [])][1::2]  # where each sample's caption ends
    for cut in [*range(100, ends[-1], 397), *ends, *(end - 1 for end in ends)]:
        shard.write_bytes(data[:cut])
        index = build_index(shard)
        assert index.captions.strings() == [f"image {k}" for k, end in enumerate(ends) if end <= cut], cut
        if cut >= 512:
            assert [reason for reason, _, _ in index.notes if reason == "shard is cut off"]


def shard_of(tmp_path, numbers, form=tarfile.USTAR_FORMAT):
    return write_tar(tmp_path / "0.tar", [m for number in numbers for m in pair(number)], form)


def header_of(data: bytes, number: int) -> int:
    """Where the header of the so-manieth member begins."""
    return [offset for _, offset, _ in members(data, [])][number] - 512


@pytest.mark.parametrize("garbage", [b"\xff", b"\0"])
def test_a_damaged_header_costs_its_own_member_and_is_not_taken_for_the_end_of_the_shard(tmp_path, garbage):
    shard = shard_of(tmp_path, range(4))
    data = bytearray(shard.read_bytes())
    third, fourth = header_of(data, 2), header_of(data, 3)
    data[third : third + 512] = garbage * 512  # of image 1
    shard.write_bytes(data)
    index = build_index(shard)
    assert index.captions.strings() == ["image 0", "image 2", "image 3"]
    assert index.notes == (
        ("shard is damaged", f" at byte {third} to {fourth}", 1),
        ("no image", ": 00001", 1),
    )


def test_a_lost_block_costs_the_member_it_was_taken_from_and_not_the_next(tmp_path):
    for member in range(8):
        shard = shard_of(tmp_path, range(4))
        data = shard.read_bytes()
        block = header_of(data, member) + 512
        shard.write_bytes(data[:block] + data[block + 512 :])
        source = open_source(str(shard))
        found = {captions: image for image, captions in whole_pairs(source)}
        assert found == {(f"image {k}",): pair(k)[0][1] for k in range(4) if k != member // 2}, member
        assert member == 7 or reasons(shard)["shard is damaged"] == 1  # the last one's caption is zeros now


def whole_pairs(source) -> list[tuple[bytes, tuple[str, ...]]]:
    found = []
    for id in range(len(source)):
        try:
            found.append((source[id].image, source[id].captions))
        except BadSample:
            continue
    return found


def test_what_is_shifted_by_less_than_a_block_is_counted_sample_by_sample(tmp_path):
    shard = shard_of(tmp_path, range(6))
    data = shard.read_bytes()
    cut = header_of(data, 2) + 600
    shard.write_bytes(data[:cut] + data[cut + 1 :])
    assert build_index(shard).captions.strings()[:1] == ["image 0"]
    assert reasons(shard)["shard is damaged"] == 4  # 2 to 5; that the caption of 1 is lost too, reading it tells


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["l" * 120, "gr\u00f6\u00dfe " * 12])
def test_a_member_whose_long_name_is_lost_is_not_taken_for_another(tmp_path, form, name):
    long = [(f"{name}/{n}.{end}", content) for n in range(2) for end, content in (("png", b"x"), ("txt", b"y"))]
    shard = write_tar(tmp_path / "0.tar", [*pair(0), *long, *pair(1)], form)
    data = bytearray(shard.read_bytes())
    place = header_of(data, 1) + 1024  # the header that holds the long name of the first of these
    data[place : place + 512] = bytes(512)
    shard.write_bytes(data)
    index = build_index(shard)
    assert index.captions.strings() == ["image 0", "y", "image 1"]
    assert reasons(shard) == {"shard is damaged": 1, "no image": 1}


def test_members_with_headers_of_many_writers_are_found_behind_damage(tmp_path):
    """A pax header before each member, as webdataset's writer makes for times with fractions."""
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "0.tar", "w", format=form) as tar:
            for name, content in [m for number in range(5) for m in pair(number)]:
                information = tarfile.TarInfo(name)
                information.size, information.mtime = len(content), 1.5 if form == tarfile.PAX_FORMAT else 1
                tar.addfile(information, io.BytesIO(content))
        data = bytearray((tmp_path / "0.tar").read_bytes())
        place = header_of(data, 4)  # of image 2
        data[place : place + 512] = bytes(512)
        (tmp_path / "0.tar").write_bytes(data)
        assert build_index(tmp_path / "0.tar").captions.strings() == [f"image {k}" for k in (0, 1, 3, 4)]


@pytest.mark.parametrize("zeros", [2, 3, 18])
def test_a_second_tar_behind_the_first_is_read_and_nothing_is_lost(tmp_path, zeros):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    first = shard.read_bytes()[: header_of(shard.read_bytes(), 1) + 1024] + bytes(zeros * 512)
    second = write_tar(tmp_path / "1.tar", pair(1)).read_bytes()
    shard.write_bytes(first + second)
    assert build_index(shard).captions.strings() == ["image 0", "image 1"] and not reasons(shard)


def test_one_block_of_zeros_may_have_been_a_header_and_is_reported(tmp_path):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    content = shard.read_bytes()
    caption_end = header_of(content, 1) + 1024
    shard.write_bytes(content[:caption_end] + bytes(512) + content[: header_of(content, 1)] + bytes(1024))
    assert reasons(shard)["shard is damaged"] == 1


def test_a_tar_without_an_end_mark_is_whole_and_one_that_leaves_half_a_pair_is_cut_off(tmp_path):
    shard = write_tar(tmp_path / "0.tar", pair(0) + pair(1))
    data = shard.read_bytes()
    shard.write_bytes(data[: header_of(data, 3) + 1024])
    assert build_index(shard).captions.strings() == ["image 0", "image 1"] and reasons(shard) == {NO_END_MARK: 0}
    shard.write_bytes(data[: header_of(data, 3)])
    assert build_index(shard).captions.strings() == ["image 0"] and reasons(shard) == {"shard is cut off": 1}


def test_hidden_members_are_of_no_sample_when_they_are_damaged_either(tmp_path):
    shard = write_tar(tmp_path / "0.tar", [*pair(0), ("a/.x.png", b"x" * 9), ("b.png", b"y"), ("c.png", b"z")])
    data = shard.read_bytes()
    cut = header_of(data, 2) - 1
    shard.write_bytes(data[:cut] + data[cut + 1 :])  # no header behind it begins at a whole block
    assert len(build_index(shard).rows) == 1 and reasons(shard) == {"shard is damaged": 2}  # b and c


def test_a_header_with_a_flipped_byte_is_not_believed(tmp_path):
    shard = write_tar(tmp_path / "0.tar", pair(0) + pair(1))
    data = bytearray(shard.read_bytes())
    data[header_of(data, 2)] ^= 1  # its name would be another sample's
    shard.write_bytes(data)
    assert build_index(shard).captions.strings() == ["image 0"]
    assert reasons(shard) == {"shard is damaged": 1, "no image": 1}


def test_what_is_no_tar_file_has_a_reason_of_its_own(tmp_path):
    for content in (b"<html>", b"<html>" * 1000):
        (tmp_path / "0.tar").write_bytes(content)
        assert reasons(tmp_path / "0.tar") == {"shard is not a tar file": 1}


@pytest.mark.parametrize("extension", ["jfif", "tif", "TIFF", "avif", "jp2", "ppm", "ico"])
def test_every_kind_of_image_that_decodes_is_an_image_in_a_shard_and_in_a_folder(tmp_path, extension):
    stream = io.BytesIO()
    kind = {"jfif": "JPEG", "tif": "TIFF", "jp2": "JPEG2000"}.get(extension, extension.upper())
    Image.new("RGB", (16, 16), (200, 10, 10)).save(stream, kind)
    members = [(f"a.{extension}", stream.getvalue()), ("a.txt", b"red")]
    shard = write_tar(tmp_path / "shards" / "0.tar", members)
    (tmp_path / "folder").mkdir()
    for name, content in members:
        (tmp_path / "folder" / name).write_bytes(content)
    for source in (open_source(str(shard)), open_source(str(tmp_path / "folder"))):
        assert decode(source[0].image).convert("RGB").getpixel((3, 3))[0] > 150 and source[0].captions == ("red",)


def test_the_index_holds_the_caption_that_reading_gives(tmp_path):
    captions = [b'{"caption": ["", " ", "third"]}', b'{"caption": "\\ud800 half"}', b'{"caption": []}', b"[]", b" x "]
    members = [m for k, raw in enumerate(captions) for m in ((f"{k}.png", image_bytes(k)), (f"{k}.json", raw))]
    source = open_source(str(write_tar(tmp_path / "0.tar", [*members, ("9.png", image_bytes(9)), ("9.txt", b" x\n")])))
    read = []
    for id in range(len(source)):
        try:
            read.append(source[id].captions[0])
        except BadSample:
            read.append("")
    assert source.captions() == read == ["third", "? half", "", "", "", "x"]


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
    for shuffled in (pairs("0", "1") + further, further + pairs("0", "1"), pairs("1", "0") + further):
        index = build_index(write_tar(tmp_path / "0.tar", shuffled))
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
