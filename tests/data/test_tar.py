"""Tar shards: which members are samples, what is lost, the index that follows its shards, and packed shards."""

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

import pytest
from PIL import Image

from neuclip.data.decoding import decode
from tests.builders.data import (
    Pair,
    encoded,
    header_of,
    image_bytes,
    numbered,
    pair,
    pairs,
    tar_bytes,
    write,
    write_files,
    write_shards,
    write_tar,
)
from tests.builders.reading import (
    captions,
    content,
    failure,
    fault_of,
    faults,
    fingerprint,
    open_source,
    outcomes,
    refusal,
    texts,
    travelled,
)

FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def opened(tmp_path, data: bytes):
    (tmp_path / "0.tar").write_bytes(data)
    return open_source(tmp_path / "0.tar")


def with_checksum(data: bytearray, place: int = 0) -> bytearray:
    header = data[place : place + 512]
    data[place + 148 : place + 156] = b"%06o\0 " % (sum(header[:148]) + 8 * ord(" ") + sum(header[156:]))
    return data


# Members


@pytest.mark.parametrize("form", FORMS)
def test_the_samples_are_the_members_that_tarfile_finds(tmp_path, form):
    names = ["a", "folder/b", "d" * 90 + "/" + "e" * 60, "s" * 95, "f" * 96]
    names += ["long/" * 60 + "c", "größe"] if form != tarfile.USTAR_FORMAT else []
    write_tar(tmp_path / "0.tar", pairs(*names), form, time=1.5 if form == tarfile.PAX_FORMAT else 1)
    with tarfile.open(tmp_path / "0.tar") as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar}
    source = open_source(tmp_path / "0.tar")
    expected = [(found[f"{name}.png"], (found[f"{name}.txt"].decode(),)) for name in names]
    assert content(source) == expected and faults(source) == []


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


def test_a_size_in_binary_or_in_a_pax_header_alone_is_believed(tmp_path):
    whole = tar_bytes(pair(0))
    data = bytearray(whole)
    data[124:136] = b"\x80" + int(data[124:135], 8).to_bytes(11, "big")  # as GNU tar writes the sizes of large files
    assert content(opened(tmp_path, with_checksum(data))) == [(pair(0)[0][1], ("image 0",))]
    member = tarfile.TarInfo("00000.txt")
    member.pax_headers = {"size": "5"}  # its own header says 0
    caption = member.tobuf(tarfile.PAX_FORMAT) + b"a dog".ljust(512, b"\0")
    assert captions(opened(tmp_path, whole[: header_of(whole, 1)] + caption + bytes(1024))) == [("a dog",)]


def test_pairs_with_dots_in_their_names_are_samples_and_further_members_of_a_sample_are_not(tmp_path):
    stems = [*(f"v1.2-{number:03d}" for number in range(10)), "a.b/dr. who 1", "a.b/dr. who 2", "plain"]
    source = open_source(write_tar(tmp_path / "0.tar", pairs(*stems)))
    assert content(source) == [(image_bytes(n), (stem,)) for n, stem in enumerate(stems)] and faults(source) == []
    more = [("0.seg.png", image_bytes(8)), ("0.seg.txt", b"mask"), ("0.left.view.png", b"x"), ("0.npy", b"y")]
    (a, a_text, b, b_text) = pairs("0", "1")
    for members in ([a, b, b_text, a_text, *more], [*more, a, a_text, b, b_text]):  # together or not
        source = open_source(write_tar(tmp_path / "0.tar", members))
        assert content(source) == [(a[1], ("0",)), (b[1], ("1",))] and faults(source) == []


def test_what_has_no_image_is_no_sample_but_is_counted_with_its_name(tmp_path):
    more = [("z.mp3", b""), ("00000.jpg", image_bytes(9, "jpg")), ("w.img", image_bytes(1)), ("w.txt", b"not guessed")]
    shard = write_tar(tmp_path / "0.tar", [("x.txt", b"1"), *pair(0), ("y.json", b"{}"), *more])
    source = open_source(shard)
    assert content(source) == [(image_bytes(0), ("image 0",))]  # of two images of one name the first stays
    expected = [("no image", f"{shard}: {name}", 1) for name in ("x", "y", "z", "w")]
    assert sorted(faults(source)) == sorted([*expected, ("name occurs twice", f"{shard}: 00000.jpg", 1)])
    lonely = [(f"{number:02d}.txt", b"alone") for number in range(30)]
    found = faults(open_source(write_tar(tmp_path / "1.tar", [*pair(0), *lonely])))
    assert len(found) == 10 and sum(times for _, _, times in found) == 30  # the last stands for the others
    assert found[9][1].endswith(": 09 and 20 more")


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
    assert len({fingerprint(open_source(shard, caption_key=key)) for key in ("", "alt", "o,d")}) == 3


@pytest.mark.parametrize(
    ("name", "text", "outcome"),
    [
        ("a.png", b"x", "caption is missing"),
        ("a.txt", b" \n", "caption is empty"),
        ("a.txt", b"caf\xe9", "caption is not UTF-8"),
        ("a.txt", b"a" * ((1 << 20) + 1), "caption is too long"),
        ("a.txt", b"a" * (1 << 20), "a" * (1 << 20)),
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


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (b'{"url": "http://x", "text": "a cat", "width": 3}',
         "(its keys are url, text, width: name one with --data.caption_key text)"),
        (b'{"width": null}', "none of its keys has a text"),
        (b'{"caption": "", "text": "a cat"}', ""),  # the key is there, and empty
    ],
)  # fmt: skip
def test_a_json_member_without_the_caption_says_which_keys_it_has(tmp_path, about, words):
    shard = write_tar(tmp_path / "0.tar", [("0.png", image_bytes(0)), ("0.json", about)])
    where = fault_of(open_source(shard), 0).where
    assert where.startswith(f"{shard}: 0.json") and words in where and ("keys" in where) == ("keys" in words)


@pytest.mark.parametrize("extension", ["jfif", "tif", "TIFF", "avif", "jp2", "ppm", "ico"])
def test_every_kind_of_image_that_decodes_is_an_image_in_a_shard_and_in_a_folder(tmp_path, extension):
    kind = {"jfif": "JPEG", "tif": "TIFF", "jp2": "JPEG2000"}.get(extension, extension.upper())
    members = [(f"a.{extension}", encoded(Image.new("RGB", (16, 16), (200, 10, 10)), kind)), ("a.txt", b"red")]
    places = write_tar(tmp_path / "shards" / "0.tar", members), write_files(tmp_path / "folder", dict(members))
    for source in map(open_source, places):
        assert decode(source[0].image).convert("RGB").getpixel((3, 3))[0] > 150 and captions(source) == [("red",)]


# What is lost; more of it in test_damage.py


def test_a_cut_off_shard_keeps_its_whole_samples_wherever_the_cut_is(tmp_path):
    data = tar_bytes(numbered(*range(4)))
    ends = [header_of(data, number) + 512 + len(f"image {number // 2}") for number in (1, 3, 5, 7)]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        spans = [(member.offset, member.offset_data + member.size) for member in tar]
    for cut in (*range(ends[0], ends[-1], 997), *ends[:-1], *(end - 1 for end in ends[1:])):
        source = opened(tmp_path, data[:cut])
        whole = [text for text in outcomes(source) if text.startswith("image")]
        assert whole[: len(ends)] == [f"image {k}" for k, end in enumerate(ends) if end <= cut], cut
        if any(start < cut < stop for start, stop in spans):  # not in the zeros between two members
            assert len(source) < 4 and faults(source)


def test_a_shard_is_read_up_to_the_damage_and_what_lies_behind_it_is_counted(tmp_path):
    whole = tar_bytes(numbered(*range(6)))
    place = header_of(whole, 4)  # of image 2: its caption and three pairs lie behind it
    for garbage in (b"\xff", b"\0"):
        data = bytearray(whole)
        data[place : place + 512] = garbage * 512
        source = opened(tmp_path, data)
        assert captions(source) == [("image 0",), ("image 1",)]
        assert faults(source) == [("shard is damaged", f"{tmp_path / '0.tar'} at byte {place}", 4)]


def test_a_negative_size_is_not_believed(tmp_path):
    data = bytearray(tar_bytes(numbered(0, 1)))
    place = header_of(data, 2)
    data[place + 124 : place + 136] = b"-0000001000\0"  # int() would take it, and the walk would turn round
    source = opened(tmp_path, with_checksum(data, place))
    assert captions(source) == [("image 0",)] and faults(source)


@pytest.mark.parametrize("zeros", [2, 3, 18])
def test_a_second_tar_behind_the_first_is_read_and_nothing_is_lost(tmp_path, zeros):
    first = tar_bytes(pair(0))
    source = opened(tmp_path, first[: header_of(first, 1) + 1024] + bytes(zeros * 512) + tar_bytes(pair(1)))
    assert captions(source) == [("image 0",), ("image 1",)] and faults(source) == []


def test_a_tar_without_an_end_mark_is_whole_and_one_with_a_megabyte_of_zeros_is_an_interrupted_download(tmp_path):
    data = tar_bytes(numbered(0, 1, 2))
    source = opened(tmp_path, data[: -(-len(data.rstrip(b"\0")) // 512) * 512])
    assert len(source) == 3 and faults(source) == []
    source = opened(tmp_path, data + bytes(1 << 20))  # which made room beforehand
    assert len(source) == 3 and [(reason, times) for reason, _, times in faults(source)] == [("shard ends in zeros", 1)]


@pytest.mark.parametrize(("data", "reason"), [(b"<html>" * 1000, "shard is not a tar file"), (b"", "shard is empty")])
def test_what_is_no_tar_file_is_refused_alone_and_a_fault_with_its_name_beside_shards(tmp_path, data, reason):
    write_shards(tmp_path, [1])
    (tmp_path / "1.tar").write_bytes(data)
    assert reason in refusal(tmp_path / "1.tar")
    [(found, where, times)] = faults(open_source(tmp_path))
    assert (found, times) == (reason, 1) and str(tmp_path / "1.tar") in where


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
    write_tar(folder / "00001.tar", numbered(4, 5))
    assert texts(folder) == ["image 3", "image 4", "image 5"]


def test_a_read_only_folder_keeps_its_index_in_the_cache(tmp_path, cache, monkeypatch):
    shard = write_tar(tmp_path / "shards" / "0.tar", pair(0))
    shard.parent.chmod(0o555)
    try:
        for _ in range(2):
            assert texts(shard.parent) == ["image 0"]
            assert [path.name for path in shard.parent.iterdir()] == ["0.tar"]
        assert len(list((cache / "indexes").glob("*0.tar.index.npz"))) == 1
    finally:
        shard.parent.chmod(0o755)
    monkeypatch.setenv("NEUCLIP_CACHE", str(shard / "cache"))  # where no folder can be
    assert "set NEUCLIP_CACHE to a folder with enough space" in refusal(shard)


def test_rows_are_mapped_and_not_copied_to_other_processes(tmp_path):
    sizes = []
    for count in (4, 200):
        source = open_source(write_shards(tmp_path / f"{count}", [count]))
        sizes.append(len(pickle.dumps(source)))
        assert travelled(source)[count - 1].captions == (f"image {count - 1}",)
    assert abs(sizes[0] - sizes[1]) < 20  # the names of the files, whatever they hold


def test_rows_of_other_shards_keys_and_folders_are_not_mixed_up(tmp_path, monkeypatch):
    found = []
    for project, first in (("a", 0), ("b", 4)):  # the same names, sizes and times
        about = json.dumps({"k": project}).encode()
        members = [*numbered(*range(first, first + 4)), ("x.png", image_bytes(0)), ("x.json", about)]
        os.utime(write_tar(tmp_path / project / "shards" / "0.tar", members), ns=(1, 1))
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
    assert [(reason, times) for reason, _, times in faults(together)] == [("shard is not a tar file", 1)]


# Reading while files come, go and change


@pytest.mark.parametrize("change", ["written in place", "replaced", "cut"])
def test_a_shard_that_is_written_again_while_it_is_read_ends_the_reading_with_its_name(tmp_path, change):
    shard = write_tar(tmp_path / "0.tar", numbered(0, 1))
    source = open_source(shard)
    assert change == "replaced" or source[0].captions == ("image 0",)  # a file that is open stays as it was
    if change == "replaced":
        write_tar(tmp_path / "other", numbered(3, 1)).replace(shard)
    elif change == "cut":
        os.truncate(shard, 700)
    else:
        write_tar(shard, numbered(3, 1))
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


def test_more_shards_than_the_system_allows_open_files_are_read(tmp_path):
    source = open_source(",".join(str(write_shards(tmp_path / name, [1] * 50)) for name in "abcd"))
    ids = list(range(200)) * 2
    random.Random(0).shuffle(ids)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0) for _ in range(150)]  # the smallest free numbers: fewer than there are shards
    for file in spare:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, hard))
    try:
        assert [source[id].captions for id in ids] == [(f"image {id % 50}",) for id in ids]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Packed shards


@pytest.mark.parametrize("name", ["A.TAR.GZ", "C.TGZ", "d.tar.gz"])
def test_a_packed_shard_is_unpacked_once_whatever_the_case_of_its_suffix(tmp_path, name, cache):
    tar = tar_bytes(numbered(0, 1))
    pieces = gzip.compress(tar[:700]) + gzip.compress(b"") + gzip.compress(tar[700:])  # as if it were one
    shard = write_files(tmp_path / "shards", {name: pieces}) / name
    assert texts(shard) == ["image 0", "image 1"] and open_source(shard).where(1) == f"{shard}: 00001.jpg"
    copies = {path: path.stat().st_ino for path in cache.rglob("*.tar")}
    assert texts(shard) == ["image 0", "image 1"] and len(copies) == 1
    assert {path: path.stat().st_ino for path in cache.rglob("*.tar")} == copies
    source = open_source(write_tar(shard, pair(2)))
    for path in cache.rglob("*.tar"):
        path.unlink()
    message = failure(lambda: source[0])  # in mid run: no image is another's
    assert name in message and "--resume" in message
    assert texts(shard) == ["image 2"]


PACKED = gzip.compress(tar_bytes(numbered(*range(9))))


@pytest.mark.parametrize(
    "data",
    [PACKED[: len(PACKED) // 2], PACKED[:-6] + b"\xaa" + PACKED[-5:], b"<html>" * 100, bytes(5000), b"\x1f\x8b\x08"],
    ids=["cut", "checksum", "page", "zeros", "header"],
)
def test_a_damaged_packed_shard_is_refused_and_to_be_fetched_again(tmp_path, data, cache):
    (tmp_path / "0.tar.gz").write_bytes(data)
    for _ in range(2):
        message = refusal(tmp_path / "0.tar.gz")
        assert message.startswith(f"{tmp_path / '0.tar.gz'}: is damaged") and "fetch it again" in message
    assert not list(cache.rglob("*.tar"))
