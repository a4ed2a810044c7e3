"""Every file that the data reads, damaged in every way: one line that names it, or made again if it is a cache; never a
traceback, never a hang."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from neuclip.data.features import Block, FeatureStore
from neuclip.errors import RunFailed, UserError
from tests.builders.data import (
    BadSample,
    convert,
    fingerprint,
    image_bytes,
    open_source,
    puzzles,
    retrieval,
    samples,
    write,
    write_images,
    write_puzzle_images,
    write_shards,
    write_tar,
    write_task,
    zero_shot_task,
)

SECONDS = 60  # no test waits for them: they end one that hangs


class Case(NamedTuple):
    """A file, and what reads it: all that is in the data then."""

    file: Path
    read: Callable[[], Any]
    cache: bool = False  # it is made again


def everything(source: Any) -> list[Any]:
    found: list[Any] = [fingerprint(source)]
    for id in range(len(source)):
        try:
            found.append((source[id].image, source[id].captions))
        except BadSample as bad:
            found.append(bad.reason)
    return found


def address_of(kind: str) -> Callable[[Path], Case]:
    def case(folder: Path) -> Case:
        file = Path(write(kind, folder, samples(5)))
        return Case(file, lambda: everything(open_source(file)))

    return case


def beside(kind: str, name: str) -> Callable[[Path], Case]:
    """A file in the folder that is opened."""

    def case(folder: Path) -> Case:
        data = Path(write(kind, folder, samples(5)))
        (file,) = [path for path in data.rglob(name) if not path.is_dir()][:1]
        return Case(file, lambda: everything(open_source(data)))

    return case


def cached(kind: str, pattern: str) -> Callable[[Path], Case]:
    """A file that opening leaves in the cache, or beside the shard."""

    def case(folder: Path) -> Case:
        data = write(kind, folder / "data", samples(5))
        open_source(data)
        if "joined" not in pattern:  # else it is not looked at
            for joined in folder.rglob("*joined/*"):
                joined.unlink()
        return Case(next(folder.rglob(pattern)), lambda: everything(open_source(data)), cache=True)

    return case


def list_of_shards(folder: Path) -> Case:
    write_shards(folder / "shards", [2, 2])
    (folder / "list.txt").write_text("shards/00000.tar\nshards/00001.tar\n")
    return Case(folder / "list.txt", lambda: everything(open_source(folder / "list.txt")))


def dataset_dict(folder: Path) -> Case:
    data = Path(write("saved data set", folder, samples(3)))
    (data / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return Case(data / "dataset_dict.json", lambda: open_source(data))


def conversion(folder: Path) -> Case:
    convert(open_source(write_shards(folder / "shards", [4])), folder / "converted", 2)
    return Case(folder / "converted" / "convert.json", lambda: everything(open_source(folder / "converted")))


def list_of_skipped(folder: Path) -> Case:
    source = open_source(write_shards(folder / "shards", [4]))
    convert(source, folder / "converted", 2)
    (folder / "converted" / "00001.tar").unlink()
    (folder / "converted" / "skipped.jsonl").write_text('{"id": 0, "reason": "x", "where": "y", "times": 1}\n' * 9)
    return Case(folder / "converted" / "skipped.jsonl", lambda: convert(source, folder / "converted", 2))


def task(name: str) -> Callable[[Path], Case]:
    def case(folder: Path) -> Case:
        write_task(folder / "task", sizes=[3])
        return Case(folder / "task" / name, lambda: zero_shot_task(folder / "task").labels)

    return case


def mark_of_a_retrieval_set(folder: Path) -> Case:
    write_shards(folder / "set" / "test", [3])
    (folder / "set" / "dataset_type.txt").write_text("retrieval\n")
    (folder / "set" / "test" / "nshards.txt").write_text("1")
    return Case(folder / "set" / "dataset_type.txt", lambda: everything(retrieval(folder / "set")))


def puzzle(name: str) -> Callable[[Path], Case]:
    def case(folder: Path) -> Case:
        write_puzzle_images(folder / "images")
        rows = [{"cue": "cold", "candidates": ["snow", "sun"], "associations": ["snow"]}] * 3
        (folder / "puzzles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Case(folder / name, lambda: puzzles(folder)[0])

    return case


def caption_file(folder: Path) -> Case:
    data = Path(write("folder", folder, samples(3)))
    file = min(data.rglob("*.txt"))
    return Case(file, lambda: everything(open_source(data)))


FILES: dict[str, Callable[[Path], Case]] = {
    "tar": address_of("tar"),
    "tar.gz": address_of("packed tar"),
    "csv": address_of("csv"),
    "tsv": address_of("tsv"),
    "jsonl": address_of("jsonl"),
    "coco": address_of("coco"),
    "karpathy": address_of("karpathy"),
    "parquet": address_of("parquet"),
    "state.json": beside("saved data set", "state.json"),
    "arrow": beside("saved data set", "*.arrow"),
    "dataset_dict.json": dataset_dict,
    "captions file of a folder": beside("folder with a captions file", "captions.tsv"),
    "caption file": caption_file,
    "list of shards": list_of_shards,
    "index beside a shard": cached("tar", "*.index.npz"),
    "rows of all shards": cached("tar", "joined/*.rows"),
    "facts of all shards": cached("tar", "joined/*.json"),
    "unpacked shard": cached("packed tar", "unpacked/*/*.tar"),
    "captions of a folder": cached("folder", "folders/*.npz"),
    "convert.json": conversion,
    "skipped.jsonl": list_of_skipped,
    "classnames.txt": task("classnames.txt"),
    "templates": task("zeroshot_classification_templates.txt"),
    "nshards.txt": task("test/nshards.txt"),
    "shard of a task": task("test/0.tar"),
    "dataset_type.txt": mark_of_a_retrieval_set,
    "puzzles": puzzle("puzzles.jsonl"),
}


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]


def put(place: Path, content: bytes) -> None:
    place.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda place, content: put(place, b""),
    "cut": lambda place, content: put(place, content[: len(content) // 2]),
    "flipped": lambda place, content: put(place, flip(content)),
    "zeros": lambda place, content: put(place, bytes(len(content))),
    "nested deeply": lambda place, content: put(place, b"[" * 100_000),
    "a large number": lambda place, content: put(place, b"99999999"),
    "pipe": lambda place, content: os.mkfifo(place),
    "device": lambda place, content: place.symlink_to("/dev/zero"),
    "folder": lambda place, content: place.mkdir(),
}


@pytest.fixture
def no_hang() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_one_line_that_names_it_or_made_again(tmp_path, monkeypatch, no_hang, file, damage):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    place, read, cache = FILES[file](tmp_path)
    content = place.read_bytes()
    whole = read() if cache else None
    if cache and not place.exists():
        pytest.fail("it is no file that a second opening reads")
    status = place.stat()
    place.unlink()
    DAMAGES[damage](place, content)
    if damage not in ("pipe", "device", "folder"):
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    try:
        found = read()
    except (UserError, RunFailed) as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        made_again = cache and file != "unpacked shard" and damage != "folder"  # which may hold somebody's files
        assert not made_again, f"a cache is made again: {error}"
        named = (place.name, str(place.parent), *(["0.tar.gz"] if file == "unpacked shard" else []))
        assert any(name in str(error) for name in named)
    else:
        assert not cache or found == whole


def test_a_retrieval_set_that_claims_a_hundred_million_shards_is_one_line(tmp_path, no_hang):
    write_task(tmp_path / "task", sizes=[3])
    (tmp_path / "task" / "test" / "nshards.txt").write_text("99999999")
    with pytest.raises(UserError, match=r"1\.tar: missing, though .*nshards\.txt says 99999999 shards"):
        zero_shot_task(tmp_path / "task")


def array_that_claims(count: int) -> bytes:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}".encode()
    return b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n" + bytes(8)


def test_numbers_beside_an_image_that_claim_to_be_a_trillion_are_one_line(tmp_path, no_hang):
    write_task(tmp_path / "task", sizes=[1])
    members = [("0.cls", b"0"), ("0.png", image_bytes(0)), ("0.npy", array_that_claims(10**12))]
    write_tar(tmp_path / "task" / "test" / "0.tar", members)
    with pytest.raises(UserError, match=r"0\.npy: .*each image needs one vector of whole numbers"):
        zero_shot_task(tmp_path / "task")


def test_a_puzzle_of_a_hundred_thousand_candidates_is_one_line(tmp_path, no_hang):
    write_puzzle_images(tmp_path / "images")
    row = {"cue": "cold", "associations": ["snow"], "candidates": ["snow"] * 100_000}
    (tmp_path / "puzzles.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"puzzles\.jsonl line 1: has 100,000 candidates"):
        puzzles(tmp_path)


@pytest.mark.parametrize("state", ['{"_data_files": [{"x": 1}]}', '{"_data_files": 7}', "[]", "null"])
def test_a_saved_set_whose_state_says_something_else_is_one_line(tmp_path, state):
    data = Path(write("saved data set", tmp_path, samples(3)))
    (data / "state.json").write_text(state)
    with pytest.raises(UserError, match=r"state\.json: is damaged.*save the set again"):
        open_source(data)


@pytest.mark.parametrize("state", ['{"count": 6, "shard_size": 0}', '{"count": 6}', "[]", "7"])
def test_a_conversion_whose_notes_say_something_else_is_one_line_or_whole(tmp_path, state):
    convert(open_source(write_shards(tmp_path / "shards", [6])), tmp_path / "converted", 1)
    (tmp_path / "converted" / "convert.json").write_text(state)
    try:
        assert len(open_source(tmp_path / "converted")) == 6
    except UserError as error:
        assert "convert.json: is damaged" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["features.4", "counts", "checksums", "about.json"])
def test_damaged_files_of_stored_features_are_missing_blocks_and_can_be_written_again(
    tmp_path, monkeypatch, name, damage
):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path))
    store = FeatureStore({"side": "image"}, samples=6, block=2)
    store.describe()
    blocks = [Block(first, np.ones(2, "<i4"), {"features": np.full((2, 4), first, "<f4")}) for first in (0, 2, 4)]
    for block in blocks:
        store.write(block)
    assert store.missing(range(3)) == []
    place = store.folder / name
    content = place.read_bytes()
    place.unlink()
    DAMAGES[damage](place, content)
    missing = store.missing(range(3))
    assert missing or name == "about.json"
    if damage in ("pipe", "device", "folder"):
        if name != "about.json":
            with pytest.raises(OSError):
                store.write(blocks[0])
        return
    for number in missing:
        store.write(blocks[number])
    assert store.missing(range(3)) == [] and store.rows("features")[:6, 0].tolist() == [0, 0, 2, 2, 4, 4]


def test_captions_of_a_folder_that_have_not_changed_are_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    data = write_images(tmp_path / "data", samples(3))
    for image in data.rglob("*.jpg"):
        image.with_suffix(".txt").write_text("one")
    assert {one.captions for one in map(open_source(data).__getitem__, range(3))} == {("one",)}
    text = min(data.rglob("*.txt"))
    status = text.stat()
    text.write_text("two")
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_source(data)[0].captions == ("one",)
    text.write_text("three")
    assert open_source(data)[0].captions == ("three",)
