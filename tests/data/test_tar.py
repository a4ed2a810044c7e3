"""Tar shards: which members are samples, what is lost, and the index, which follows its shards."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import pickle
import random
import resource
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from neuclip.cli.main import main
from tests.builders.data import (
    Pair,
    captions,
    content,
    decode,
    encoded,
    failure,
    fault_counts,
    fault_of,
    faults,
    fingerprint,
    header_of,
    image_bytes,
    open_shards_at_once,
    open_source,
    outcomes,
    pair,
    pairs,
    refusal,
    tar_bytes,
    travelled,
    write,
    write_shards,
    write_tar,
)

FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def texts(address: object, **columns: str) -> list[str]:
    return [one[0] for one in captions(open_source(address, **columns))]


# Members


@pytest.mark.parametrize("form", FORMS)
def test_the_samples_are_the_members_that_tarfile_finds(tmp_path, form):
    names = ["a", "folder/b", "d" * 90 + "/" + "e" * 60, "s" * 95, "f" * 96]
    names += ["long/" * 60 + "c", "größe"] if form != tarfile.USTAR_FORMAT else []
    members = pairs(*names)
    write_tar(tmp_path / "0.tar", members, form, time=1.5 if form == tarfile.PAX_FORMAT else 1)
    with tarfile.open(tmp_path / "0.tar") as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}
    assert content(open_source(tmp_path / "0.tar")) == [
        (found[f"{name}.png"], (found[f"{name}.txt"].decode(),)) for name in names
    ]
    assert faults(open_source(tmp_path / "0.tar")) == []


def test_folders_links_and_hidden_files_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
            information = tarfile.TarInfo("a.png")
            information.type, information.linkname, information.size = kind, "b.png", 0
            tar.addfile(information)
        for name, data in [("._a.png", b"x"), ("d/.b.png", b"x"), ("no dot", b"x"), *pair(0)]:
            information = tarfile.TarInfo(name)
            information.size = len(data)
            tar.addfile(information, io.BytesIO(data))
    source = open_source(tmp_path / "0.tar")
    assert captions(source) == [("image 0",)] and faults(source) == []


def test_a_size_that_stands_in_a_pax_header_alone_is_believed(tmp_path):
    member = tarfile.TarInfo("00000.txt")
    member.pax_headers = {"size": "5"}  # its own header says 0
    caption = member.tobuf(tarfile.PAX_FORMAT) + b"a dog".ljust(512, b"\0")
    image = tar_bytes(pair(0))[: header_of(tar_bytes(pair(0)), 1)]
    (tmp_path / "0.tar").write_bytes(image + caption + bytes(1024))
    assert texts(tmp_path / "0.tar") == ["a dog"]


def test_a_size_in_binary_is_believed(tmp_path):
    data = bytearray(tar_bytes(pair(0)))
    data[124:136] = b"\x80" + int(data[124:135], 8).to_bytes(11, "big")  # as GNU tar writes the sizes of large files
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 8 * ord(" ") + sum(data[156:512]))
    (tmp_path / "0.tar").write_bytes(data)
    assert content(open_source(tmp_path / "0.tar")) == [(pair(0)[0][1], ("image 0",))]


def test_members_that_do_not_lie_together_are_one_sample(tmp_path):
    (a, a_text), (b, b_text) = pair(0), pair(1)
    source = open_source(write_tar(tmp_path / "0.tar", [a, b, b_text, a_text]))
    assert content(source) == [(a[1], ("image 0",)), (b[1], ("image 1",))]


def test_pairs_with_dots_in_their_names_are_all_read(tmp_path):
    stems = [f"v1.2-{number:03d}" for number in range(10)] + ["a.b/dr. who 1", "a.b/dr. who 2", "plain"]
    source = open_source(write_tar(tmp_path / "0.tar", pairs(*stems)))
    assert content(source) == [(image_bytes(n), (stem,)) for n, stem in enumerate(stems)] and faults(source) == []


def test_further_members_of_a_sample_stay_its_members(tmp_path):
    more = [("0.seg.png", image_bytes(8)), ("0.seg.txt", b"mask"), ("0.left.view.png", b"x"), ("0.npy", b"y")]
    for shuffled in (pairs("0", "1") + more, more + pairs("0", "1"), pairs("1", "0") + more):
        source = open_source(write_tar(tmp_path / "0.tar", shuffled))
        assert sorted(captions(source)) == [("0",), ("1",)] and faults(source) == []


def test_what_has_no_image_is_no_sample_but_is_counted_with_its_name(tmp_path):
    members = [("x.txt", b"1"), *pair(0), ("y.json", b"{}"), ("z.mp3", b""), ("00000.jpg", image_bytes(9, "jpg"))]
    shard = write_tar(tmp_path / "0.tar", members)
    source = open_source(shard)
    assert content(source) == [(image_bytes(0), ("image 0",))]  # of two images of one name the first stays
    expected = [("no image", f"{shard}: {name}", 1) for name in ("x", "y", "z")]
    assert sorted(faults(source)) == sorted([*expected, ("name occurs twice", f"{shard}: 00000.jpg", 1)])
    lonely = [(f"{number:02d}.txt", b"alone") for number in range(30)]
    source = open_source(write_tar(tmp_path / "1.tar", [*pair(0), *lonely]))
    assert fault_counts(source) == {"no image": 30} and len(faults(source)) == 10  # the last stands for the others
    assert faults(source)[9][1].endswith(": 09 and 20 more")


def test_captions_come_from_txt_else_from_the_key_of_json(tmp_path):
    members = [
        ("a.JPG", image_bytes(0, "jpg")), ("a.json", b'{"caption": "from json"}'),
        ("b.png", image_bytes(1)), ("b.json", b'{"caption": "no", "alt": "other"}'), ("b.txt", b"from text\n"),
        ("c.png", image_bytes(2)), ("c.json", b'{"caption": ["one", "two"], "alt": ["b", null, "c"], "o,d": "e"}'),
    ]  # fmt: skip
    shard = write_tar(tmp_path / "0.tar", members)
    for _ in range(2):  # made, then found: each key has an index of its own
        assert captions(open_source(shard)) == [("from json",), ("from text",), ("one", "two")]
        assert outcomes(open_source(shard, caption_key="alt")) == ["caption is missing", "other", "b"]
        assert open_source(shard, caption_key="alt")[2].captions == ("b", "c")
        assert open_source(shard, caption_key="alt,caption")[2].captions == ("b", "c", "one", "two")
        assert open_source(shard, caption_key="o,d")[2].captions == ("e",)
    fingerprints = {fingerprint(open_source(shard, caption_key=key)) for key in ("", "alt", "o,d")}
    assert len(fingerprints) == 3


def test_an_image_with_a_label_needs_no_caption(tmp_path):
    source = open_source(write_tar(tmp_path / "0.tar", [("a.png", image_bytes(0)), ("a.cls", b"1")]))
    assert captions(source) == [()]


@pytest.mark.parametrize(
    ("name", "text", "outcome"),
    [
        ("a.png", b"x", "caption is missing"),
        ("a.txt", b" \n", "caption is empty"),
        ("a.txt", b"caf\xe9", "caption is not UTF-8"),
        ("a.txt", b"a" * ((1 << 20) + 1), "caption is too long"),
        ("a.txt", b"a" * (1 << 20), "a" * (1 << 20)),
        ("a.json", b'{"title": "t"}', "caption is missing"),
        ("a.json", b"{", "caption is missing"),
        ("a.json", b"[]", "caption is missing"),
        ("a.json", b'{"caption": []}', "caption is missing"),
        ("a.json", b'{"caption": ""}', "caption is empty"),
        ("a.json", b'{"caption": ["", " ", "third"]}', "third"),
        ("a.json", b'{"caption": "\\ud800 half"}', "? half"),
        ("a.json", b"[" * 100_000, "caption is missing"),
    ],
)
def test_a_sample_without_a_usable_caption_keeps_its_id_and_is_bad(tmp_path, name, text, outcome):
    members = [("a.png", image_bytes(0)), *([(name, text)] if name != "a.png" else []), *pair(5)]
    source = open_source(write_tar(tmp_path / "0.tar", members))
    assert outcomes(source) == [outcome, "image 5"]
    if outcome.startswith("caption"):
        assert "0.tar: a." in fault_of(source, 0).where
        own = [Pair("a.png", image_bytes(0), ()), Pair("b.png", image_bytes(5), ("image 5",))]
        assert fingerprint(source) == fingerprint(open_source(write("jsonl", tmp_path, own)))  # as reading says


def test_a_json_member_without_the_caption_says_which_keys_it_has(tmp_path):
    about = b'{"url": "http://x", "text": "a cat", "width": 3}'
    shard = write_tar(tmp_path / "0.tar", [("0.png", image_bytes(0)), ("0.json", about)])
    where = fault_of(open_source(shard), 0).where
    assert where == f"{shard}: 0.json (its keys are url, text, width: name one with --data.caption_key text)"
    assert texts(shard, caption_key="text") == ["a cat"]
    write_tar(shard, [("0.png", image_bytes(0)), ("0.json", b'{"width": null}')])
    assert "no key of it holds a text" in fault_of(open_source(shard), 0).where
    write_tar(shard, [("0.png", image_bytes(0)), ("0.json", b'{"caption": "", "text": "a cat"}')])
    assert "keys" not in fault_of(open_source(shard), 0).where  # the key is there, and empty


@pytest.mark.parametrize("extension", ["jfif", "tif", "TIFF", "avif", "jp2", "ppm", "ico"])
def test_every_kind_of_image_that_decodes_is_an_image_in_a_shard_and_in_a_folder(tmp_path, extension):
    kind = {"jfif": "JPEG", "tif": "TIFF", "jp2": "JPEG2000"}.get(extension, extension.upper())
    members = [(f"a.{extension}", encoded(Image.new("RGB", (16, 16), (200, 10, 10)), kind)), ("a.txt", b"red")]
    shard = write_tar(tmp_path / "shards" / "0.tar", members)
    (tmp_path / "folder").mkdir()
    for name, data in members:
        (tmp_path / "folder" / name).write_bytes(data)
    for source in (open_source(shard), open_source(tmp_path / "folder")):
        assert decode(source[0].image).convert("RGB").getpixel((3, 3))[0] > 150 and captions(source) == [("red",)]


# Damage; more of it in test_fuzzed_shards.py


def damaged(path: Path, data: bytes) -> object:
    path.write_bytes(data)
    return open_source(path)


def test_a_cut_off_shard_keeps_its_whole_samples_wherever_the_cut_is(tmp_path):
    data = tar_bytes([m for number in range(4) for m in pair(number)])
    ends = [header_of(data, number) + 512 + len(f"image {number // 2}") for number in (1, 3, 5, 7)]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        spans = [(member.offset, member.offset_data + member.size) for member in tar]
    for cut in [*range(ends[0], ends[-1], 997), *ends[:-1], *(end - 1 for end in ends[1:])]:
        source = damaged(tmp_path / "0.tar", data[:cut])
        whole = [text for text in outcomes(source) if text.startswith("image")]
        assert whole[: len(ends)] == [f"image {k}" for k, end in enumerate(ends) if end <= cut], cut
        if any(start < cut < stop for start, stop in spans):  # not in the zeros between two members
            assert len(source) < 4 and fault_counts(source)


@pytest.mark.parametrize("garbage", [b"\xff", b"\0"])
def test_a_damaged_header_pairs_nothing_wrongly_and_its_place_is_told(tmp_path, garbage):
    data = bytearray(tar_bytes([m for number in range(4) for m in pair(number)]))
    place = header_of(data, 2)
    data[place : place + 512] = garbage * 512  # of image 1
    source = damaged(tmp_path / "0.tar", data)
    assert content(source)[0] == (pair(0)[0][1], ("image 0",))
    assert set(content(source)) <= {(pair(k)[0][1], (f"image {k}",)) for k in (0, 2, 3)}
    assert sum(fault_counts(source).values()) >= 4 - len(source)
    assert any(f"{tmp_path / '0.tar'} at byte " in where for _, where, _ in faults(source))


def test_a_negative_size_and_a_flipped_byte_are_not_believed(tmp_path):
    whole = tar_bytes(pair(0) + pair(1))
    for change in ("size", "name"):
        data = bytearray(whole)
        place = header_of(whole, 2)
        if change == "size":
            data[place + 124 : place + 136] = b"-0000001000\0"  # int() would take it, and the walk would turn round
            header = data[place : place + 512]
            data[place + 148 : place + 156] = b"%06o\0 " % (sum(header[:148]) + 8 * ord(" ") + sum(header[156:]))
        else:
            data[place] ^= 1  # its name would be another sample's
        source = damaged(tmp_path / "0.tar", data)
        assert captions(source) == [("image 0",)] and sum(fault_counts(source).values()) >= 1


def test_a_shard_is_read_up_to_the_damage_and_what_lies_behind_it_is_counted(tmp_path):
    data = bytearray(tar_bytes([m for number in range(6) for m in pair(number)]))
    place = header_of(data, 4)  # of image 2: its caption and three pairs lie behind it
    data[place : place + 512] = b"\xff" * 512
    source = damaged(tmp_path / "0.tar", data)
    assert captions(source) == [("image 0",), ("image 1",)]
    [(reason, where, times)] = faults(source)
    assert (reason, times) == ("shard is damaged", 4) and str(place) in where.replace(",", "")


def test_an_image_with_an_unknown_ending_is_named_and_not_guessed(tmp_path):
    shard = write_tar(tmp_path / "0.tar", [*pair(0), ("x.img", image_bytes(1)), ("x.txt", b"a caption")])
    assert faults(open_source(shard)) == [("no image", f"{shard}: x", 1)]


@pytest.mark.parametrize("zeros", [2, 3, 18])
def test_a_second_tar_behind_the_first_is_read_and_nothing_is_lost(tmp_path, zeros):
    first = tar_bytes(pair(0))
    joined = first[: header_of(first, 1) + 1024] + bytes(zeros * 512) + tar_bytes(pair(1))
    source = damaged(tmp_path / "0.tar", joined)
    assert captions(source) == [("image 0",), ("image 1",)] and faults(source) == []


def test_tars_without_an_end_mark_are_whole(tmp_path):
    for number, path in enumerate(sorted(write_shards(tmp_path, [4, 4, 2]).glob("*.tar"))):
        path.write_bytes(path.read_bytes()[: -(-len(path.read_bytes().rstrip(b"\0")) // 512) * 512])
        assert len(open_source(path)) == [4, 4, 2][number]
    assert faults(open_source(tmp_path)) == []


def test_a_download_that_made_room_beforehand_and_was_interrupted_is_told(tmp_path):
    write_shards(tmp_path, [1, 3])
    first = tmp_path / "00000.tar"
    first.write_bytes(first.read_bytes() + bytes(1 << 20))
    assert fault_counts(open_source(tmp_path)) == {"shard ends in zeros": 1} and len(open_source(tmp_path)) == 4


@pytest.mark.parametrize("data", [b"<html>", b"<html>" * 1000, b""])
def test_what_is_no_tar_file_beside_shards_is_a_fault_with_a_reason_of_its_own(tmp_path, data):
    write_shards(tmp_path, [1])
    (tmp_path / "1.tar").write_bytes(data)
    reason = "shard is not a tar file" if data else "shard is empty"
    assert faults(open_source(tmp_path)) == [(reason, faults(open_source(tmp_path))[0][1], 1)]
    assert str(tmp_path / "1.tar") in faults(open_source(tmp_path))[0][1]


# The index


def test_a_stored_index_is_used_and_a_changed_shard_is_noticed(tmp_path):
    folder = write_shards(tmp_path / "shards", [1, 3])
    before = open_source(folder)
    index = folder / "00000.tar.index.npz"
    first = index.stat().st_mtime_ns
    again = open_source(folder)
    assert index.stat().st_mtime_ns == first and content(again) == content(before) and again.faults == before.faults
    assert fingerprint(again) == fingerprint(before)
    write_tar(folder / "00000.tar", pair(3))  # the same size to the byte, another time
    os.utime(folder / "00000.tar", ns=(1, 1))
    assert texts(folder) == ["image 3", "image 1", "image 2", "image 3"]
    write_tar(folder / "00001.tar", pair(4) + pair(5))
    assert texts(folder) == ["image 3", "image 4", "image 5"]


def test_a_read_only_folder_keeps_its_index_in_the_cache(tmp_path, cache):
    shard = write_tar(tmp_path / "shards" / "0.tar", pair(0))
    shard.parent.chmod(0o555)
    try:
        for _ in range(2):
            assert texts(shard.parent) == ["image 0"]
            assert [path.name for path in shard.parent.iterdir()] == ["0.tar"]
        assert len(list((cache / "indexes").glob("*0.tar.index.npz"))) == 1
    finally:
        shard.parent.chmod(0o755)


def test_a_cache_that_cannot_be_written_is_one_line_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "file" / "cache"))
    assert "point NEUCLIP_CACHE to a folder with room" in refusal(write_shards(tmp_path / "shards", [2, 2]))


def test_mapped_rows_are_not_copied_to_other_processes(tmp_path, monkeypatch):
    sizes = []
    for count in (4, 200):
        source = open_source(write_shards(tmp_path / f"{count}", [count]))
        sizes.append(len(pickle.dumps(source)))
        assert travelled(source)[count - 1].captions == (f"image {count - 1}",)
    assert abs(sizes[0] - sizes[1]) < 20  # the names of the files, whatever they hold


def test_mapped_rows_of_other_shards_keys_and_folders_are_not_mixed_up(tmp_path, monkeypatch):
    for project, first in (("a", 0), ("b", 4)):
        members = [m for number in range(first, first + 4) for m in pair(number)]
        members += [("x.png", image_bytes(0)), ("x.json", json.dumps({"k": project}).encode())]
        os.utime(write_tar(tmp_path / project / "shards" / "0.tar", members), ns=(1, 1))
    found = []
    for project in "ab":  # the same names, sizes and times
        monkeypatch.chdir(tmp_path / project)
        sources = [open_source("shards", caption_key=key) for key in ("", "k")]
        found += [outcomes(travelled(source))[4 * number] for number, source in enumerate(sources)]
    assert found == ["image 0", "a", "image 4", "b"]


def test_many_shards_at_once_are_indexed_as_one_by_one(tmp_path):
    sizes = [2, 0, 1, 3, 0, 2, 0, 4]
    folder = write_shards(tmp_path / "shards", sizes)
    (folder / "00004.tar").write_bytes(b"<html>" * 200)
    one_by_one = [open_source(folder / f"{shard:05d}.tar") for shard, size in enumerate(sizes) if size]
    for index in folder.glob("*.npz"):
        index.unlink()
    together = open_source(folder)
    assert content(together) == [one for source in one_by_one for one in content(source)]
    assert fault_counts(together) == {"shard is not a tar file": 1}


def test_data_index_tells_what_it_found(tmp_path, capsys):
    folder = write_shards(tmp_path / "shards", [2, 3])
    write_tar(folder / "00002.tar", [*pair(9), ("x.txt", b"lonely")])
    assert main(["data", "index", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "shards: 6 samples" in said and "in 3 shards" in said and "index" in said
    assert str(folder) in said and "without" not in said and "no image" in said
    assert main(["data", "index", str(folder), "--data.caption_key", "nope"]) == 0
    said = capsys.readouterr().out
    assert "6 samples" in said and "without" in said
    path = write("csv", tmp_path / "table", [Pair("0.png", image_bytes(0), ("a",))])
    assert main(["data", "index", path]) == 2
    assert "holds no tar shards" in capsys.readouterr().err


# Reading while files come, go and change


@pytest.mark.parametrize("change", ["written in place", "replaced", "cut"])
def test_a_shard_that_is_written_again_while_it_is_read_ends_the_reading_with_its_name(tmp_path, change):
    shard = write_tar(tmp_path / "0.tar", pair(0) + pair(1))
    source = open_source(shard)
    assert change == "replaced" or source[0].captions == ("image 0",)  # a file that is open stays as it was
    if change == "replaced":
        write_tar(tmp_path / "other", pair(3) + pair(1)).replace(shard)
    elif change == "cut":
        os.truncate(shard, 700)
    else:
        write_tar(shard, pair(3) + pair(1))
    os.utime(shard, ns=(1, 1))
    message = failure(lambda: source[0])
    assert "0.tar: was written again while it was in use; " in message and "--resume" in message
    assert change == "cut" or texts(shard) == ["image 3", "image 1"]


@pytest.mark.parametrize("name", ["ENOMEM", "ESTALE", "EIO", "ETIMEDOUT", "EACCES"])
def test_what_the_machine_cannot_read_now_ends_the_run_and_changes_no_image(tmp_path, name, monkeypatch):
    shard = write_tar(tmp_path / "0.tar", pair(0))
    source = open_source(shard)
    whole, code = os.open, getattr(errno, name)

    def failing(path, *arguments, **options):
        if str(path) == str(shard):
            raise OSError(code, os.strerror(code), str(path))
        return whole(path, *arguments, **options)

    monkeypatch.setattr(os, "open", failing)
    message = failure(lambda: source[0])
    assert f"0.tar: cannot be read ({os.strerror(code)}" in message and "--resume" in message


@pytest.fixture
def few_files():
    """As `ulimit -n` with a small number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0) for _ in range(20)]  # the smallest free numbers
    for file in spare:
        os.close(file)
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_shards_than_the_system_allows_open_files_are_read(tmp_path, few_files, monkeypatch):
    open_shards_at_once(monkeypatch, 8)
    source = open_source(",".join(str(write_shards(tmp_path / name, [1] * 9)) for name in "abcd"))
    ids = list(range(36)) * 2
    random.Random(0).shuffle(ids)
    few_files()
    assert [source[id].captions for id in ids] == [(f"image {id % 9}",) for id in ids]


# Packed shards


@pytest.mark.parametrize("name", ["A.TAR.GZ", "C.TGZ", "d.tar.gz"])
def test_a_packed_shard_is_unpacked_once_whatever_the_case_of_its_suffix(tmp_path, name, cache):
    shard = tmp_path / "shards" / name
    shard.parent.mkdir()
    tar = tar_bytes(pair(0) + pair(1))
    shard.write_bytes(gzip.compress(tar[:700]) + gzip.compress(b"") + gzip.compress(tar[700:]))  # as if it were one
    assert texts(shard) == ["image 0", "image 1"] and open_source(shard).where(1) == f"{shard}: 00001.jpg"
    copies = {path: path.stat().st_ino for path in cache.rglob("*.tar")}
    assert texts(shard) == ["image 0", "image 1"] and len(copies) == 1
    assert {path: path.stat().st_ino for path in cache.rglob("*.tar")} == copies
    shard.write_bytes(gzip.compress(tar_bytes(pair(2))))
    assert texts(shard) == ["image 2"]
    for path in cache.rglob("*.tar"):
        path.unlink()
    assert texts(shard) == ["image 2"]


def test_a_copy_that_is_gone_in_mid_run_ends_the_run_and_changes_no_image(tmp_path, cache):
    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(tar_bytes(pair(0))))
    source = open_source(tmp_path / "0.tar.gz")
    for path in cache.rglob("*.tar"):
        path.unlink()
    message = failure(lambda: source[0])
    assert "0.tar" in message and "--resume" in message


@pytest.mark.parametrize("damage", ["cut", "checksum", "flipped"])
def test_a_damaged_packed_shard_is_refused_and_to_be_fetched_again(tmp_path, damage, cache):
    packed = bytearray(gzip.compress(tar_bytes([m for number in range(9) for m in pair(number)])))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[-6 if damage == "checksum" else len(packed) // 2] ^= 1
    (tmp_path / "0.tar.gz").write_bytes(packed)
    for _ in range(2):
        message = refusal(tmp_path / "0.tar.gz")
        assert message.startswith(f"{tmp_path / '0.tar.gz'}: is damaged") and "fetch it again" in message
    assert not list(cache.rglob("*.tar"))


@pytest.mark.parametrize("data", [b"<html>" * 100, bytes(5000), b"\x1f\x8b\x08"])
def test_what_is_no_gzip_file_is_refused_with_its_name(tmp_path, data):
    (tmp_path / "0.tar.gz").write_bytes(data)
    assert "0.tar.gz: " in refusal(tmp_path / "0.tar.gz")
