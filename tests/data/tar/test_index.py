"""The index of a shard: found by our own walk, stored, and found again when the shard changes."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from neuclip.cli.main import main
from neuclip.data.decoding import decode
from neuclip.data.fingerprint import fingerprint
from neuclip.data.open import open_source
from neuclip.data.sample import BadSample
from neuclip.data.tar.index import build_index, index_and_change, index_of
from neuclip.data.tar.walk import NO_END_MARK, Gap, members
from neuclip.errors import RunFailed
from tests.data.small_shards import contents, image_bytes, pair, write_shards, write_tar


def reasons(shard) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for reason, _, times in build_index(shard).notes:
        counts[reason] += times
    return dict(counts)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_walk_finds_what_tarfile_finds(tmp_path, form):
    names = ["a.png", "folder/b.txt", "d" * 90 + "/" + "e" * 60 + ".jpg", "s" * 98 + ".x", "f" * 100]
    if form != tarfile.USTAR_FORMAT:
        names += ["long/" * 60 + "c.png", "größe.txt"]
    shard = write_tar(tmp_path / "0.tar", [(name, name.encode() * 7) for name in names], form)
    data = shard.read_bytes()
    with tarfile.open(shard) as tar:
        expected = [(member.name.encode(), member.offset_data, member.size) for member in tar]
    gaps: list[Gap] = []
    assert list(members(data, gaps)) == expected and not gaps


def test_folders_and_links_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
            information = tarfile.TarInfo("a.png")
            information.type, information.linkname = kind, "b.png"
            tar.addfile(information)
    assert list(members((tmp_path / "0.tar").read_bytes(), [])) == []


def test_the_stored_index_is_what_was_built(tmp_path):
    shard = write_tar(tmp_path / "0.tar", pair(0) + pair(1) + [("lonely.txt", b"no image")])
    built, stored = index_of(shard), index_of(shard)
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
    index_of(shard)
    place = tmp_path / "0.tar.index.npz"
    for broken in (b"", b"not a zip", place.read_bytes()[:300]):
        place.write_bytes(broken)
        assert len(index_of(shard).rows) == 1


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
    assert index_and_change(shard)[1] == "" and index_and_change(shard)[1] == ""
    os.utime(shard, ns=(1, 1))
    assert index_and_change(shard)[1] == "it was written again since it was indexed"
    size = shard.stat().st_size
    write_tar(shard, [member for number in range(9) for member in pair(number)])
    assert len(open_source(str(shard))) == 9
    said = capsys.readouterr().err
    assert f"{shard}: it had {size:,} bytes when it was indexed and has {shard.stat().st_size:,} now" in said
    assert said.count("\n") == 1


def test_an_index_of_another_version_is_rebuilt_without_a_word(tmp_path, monkeypatch, capsys):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    monkeypatch.setattr("neuclip.data.tar.index.FORMAT", 1)
    index_of(shard)
    monkeypatch.undo()
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    assert open_source(str(shard)).captions() == ["image 0"] and capsys.readouterr().err == ""


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


def test_what_killed_processes_and_data_of_long_ago_left_is_removed(tmp_path, mapped):
    folder = tmp_path / "cache" / "indexes" / "joined"
    for name, days in {".unfinished-a": 8, ".unfinished-b": 1, "0-0": 29, "0-1": 31}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "rows").write_bytes(b"")
        grown_old(folder / name, days)
    place = open_source(str(write_shards(tmp_path / "shards", [2, 2]))).joined.place
    assert {other.name for other in folder.iterdir()} == {".unfinished-b", "0-0", place.name}


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
    for file in ("rows", "shards.json"):
        (place / file).write_bytes((place / file).read_bytes()[:-3])
        assert len(open_source(folder)) == 4 and contents(open_source(folder))[3][1] == ("image 3",)


def test_without_a_writable_cache_the_index_stays_in_memory(tmp_path, mapped, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "file" / "cache"))
    source = open_source(str(write_shards(tmp_path / "shards", [2, 2])))
    assert source.joined.place is None and len(contents(source)) == 4


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


def test_data_that_need_no_index_are_told_apart(tmp_path, capsys):
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "pairs.csv").write_text("image,caption\n0.png,a\n")
    assert main(["data", "index", str(tmp_path / "pairs.csv")]) == 2
    assert "holds no tar shards" in capsys.readouterr().err
    assert main(["data", "index"]) == 2 and main(["data", "list", "--verify"]) == 2
    assert "no flag --verify; the flags are --json" in capsys.readouterr().err


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


def test_a_damaged_header_costs_its_own_member_and_the_walk_goes_on_behind_it(tmp_path):
    shard = shard_of(tmp_path, range(4))
    data = bytearray(shard.read_bytes())
    third, fourth = header_of(data, 2), header_of(data, 3)
    data[third : third + 512] = b"\xff" * 512  # of image 1
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


def test_one_block_of_zeros_may_have_been_a_header_and_is_told(tmp_path):
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


def test_a_negative_size_is_no_header(tmp_path):
    data = bytearray(write_tar(tmp_path / "0.tar", pair(0)).read_bytes())
    data[124:136] = b"-0000001000\0"  # int() would take it, and the walk would go round in a ring
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * ord(" ") + sum(data[156:512]))
    gaps: list[Gap] = []
    assert [name for name, _, _ in members(bytes(data), gaps)] == [b"00000.txt"] and gaps[0].start == 0


def test_what_is_no_tar_file_is_told_apart_from_a_damaged_one(tmp_path):
    for content in (b"<html>", b"<html>" * 1000):
        (tmp_path / "0.tar").write_bytes(content)
        assert reasons(tmp_path / "0.tar") == {"shard is not a tar file": 1}


@pytest.mark.parametrize("extension", ["jfif", "tif", "TIFF", "avif", "jp2", "ppm", "ico"])
def test_every_kind_of_image_that_decodes_is_a_image_in_a_shard_and_in_a_folder(tmp_path, extension):
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


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_bytes_make_the_walk_hang_or_reach_outside_the_file(tmp_path_factory, data):
    content = bytearray(SHARD)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b"\0 -+_07x\x80\xffLKg5"))
    cut = data.draw(st.integers(0, len(content)))
    found, gaps = [], []
    for count, (_, offset, size) in enumerate(members(bytes(content[:cut]), gaps)):
        found.append((offset, size))
        assert count < 100
    assert all(size >= 0 and offset + size <= cut for offset, size in found)
    assert len(gaps) < 100 and all(0 <= gap.start <= gap.stop <= cut for gap in gaps)


def _shard_bytes() -> bytes:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        long = [("long/" * 40 + "c.png", b"x" * 600), ("größe.txt", b"y")]
        return write_tar(Path(folder) / "0.tar", pair(0) + long, tarfile.PAX_FORMAT).read_bytes()


SHARD = _shard_bytes()
