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

from neuclip.data.convert import convert
from neuclip.data.features import Block, FeatureStore
from neuclip.data.source import BadSample
from neuclip.data.task_sets import ZeroShotTask, read_puzzles
from neuclip.errors import RunFailed, UserError
from tests.builders.data import (
    image_bytes,
    samples,
    write,
    write_files,
    write_puzzles,
    write_shards,
    write_tar,
    write_task,
)
from tests.builders.reading import fingerprint, open_source, refusal, retrieval

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


def file_of(kind: str, pattern: str = "") -> Callable[[Path], Case]:
    """What is opened, or the first of these files in the folder that is opened."""

    def case(folder: Path) -> Case:
        data = Path(write(kind, folder / "data", samples(5)))
        return Case(min(data.rglob(pattern)) if pattern else data, lambda: everything(open_source(data)))

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


def in_a_task(name: str) -> Callable[[Path], Case]:
    return lambda folder: Case(write_task(folder, sizes=[3]) / name, lambda: ZeroShotTask.open(folder).labels)


def list_of_shards(folder: Path) -> Case:
    write_shards(folder / "shards", [2, 2])
    list_ = write_files(folder, {"list.txt": "shards/00000.tar\nshards/00001.tar\n"}) / "list.txt"
    return Case(list_, lambda: everything(open_source(list_)))


def dataset_dict(folder: Path) -> Case:
    data = Path(write("saved data set", folder, samples(3)))
    write_files(data, {"dataset_dict.json": json.dumps({"splits": ["train", "test"]})})
    return Case(data / "dataset_dict.json", lambda: open_source(data))


def conversion(folder: Path) -> Case:
    convert(open_source(write_shards(folder / "shards", [4])), folder / "converted", 2)
    return Case(folder / "converted" / "convert.json", lambda: everything(open_source(folder / "converted")))


def list_of_skipped(folder: Path) -> Case:
    source = open_source(write_shards(folder / "shards", [4]))
    convert(source, folder / "converted", 2)
    (folder / "converted" / "00001.tar").unlink()
    lines = '{"id": 0, "reason": "x", "where": "y", "times": 1}\n' * 9
    write_files(folder / "converted", {"skipped.jsonl": lines})
    return Case(folder / "converted" / "skipped.jsonl", lambda: convert(source, folder / "converted", 2))


def mark_of_a_retrieval_set(folder: Path) -> Case:
    write_shards(folder / "set" / "test", [3])
    write_files(folder / "set", {"dataset_type.txt": "retrieval\n", "test/nshards.txt": "1"})
    return Case(folder / "set" / "dataset_type.txt", lambda: everything(retrieval(folder / "set")))


FILES: dict[str, Callable[[Path], Case]] = {
    "tar": file_of("tar"),
    "tar.gz": file_of("packed tar"),
    "csv": file_of("csv"),
    "tsv": file_of("tsv"),
    "jsonl": file_of("jsonl"),
    "coco": file_of("coco"),
    "karpathy": file_of("karpathy"),
    "parquet": file_of("parquet"),
    "state.json": file_of("saved data set", "state.json"),
    "arrow": file_of("saved data set", "*.arrow"),
    "dataset_dict.json": dataset_dict,
    "captions file of a folder": file_of("folder with a captions file", "captions.tsv"),
    "caption file": file_of("folder", "*.txt"),
    "list of shards": list_of_shards,
    "index beside a shard": cached("tar", "*.index.npz"),
    "rows of all shards": cached("tar", "joined/*.rows"),
    "facts of all shards": cached("tar", "joined/*.json"),
    "unpacked shard": cached("packed tar", "unpacked/*/*.tar"),
    "captions of a folder": cached("folder", "folders/*.npz"),
    "convert.json": conversion,
    "skipped.jsonl": list_of_skipped,
    "classnames.txt": in_a_task("classnames.txt"),
    "templates": in_a_task("zeroshot_classification_templates.txt"),
    "nshards.txt": in_a_task("test/nshards.txt"),
    "shard of a task": in_a_task("test/0.tar"),
    "dataset_type.txt": mark_of_a_retrieval_set,
    "puzzles": lambda folder: Case(write_puzzles(folder, "x.jsonl") / "x.jsonl", lambda: read_puzzles(folder).puzzles),
}


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "empty": lambda place, content: place.write_bytes(b""),
    "cut": lambda place, content: place.write_bytes(content[: len(content) // 2]),
    "flipped": lambda place, content: place.write_bytes(flip(content)),
    "zeros": lambda place, content: place.write_bytes(bytes(len(content))),
    "nested deeply": lambda place, content: place.write_bytes(b"[" * 100_000),
    "a large number": lambda place, content: place.write_bytes(b"99999999"),
    "pipe": lambda place, content: os.mkfifo(place),
    "device": lambda place, content: place.symlink_to("/dev/zero"),
    "folder": lambda place, content: place.mkdir(),
}
NO_FILES = ("pipe", "device", "folder")


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def damage_file(place: Path, damage: str) -> None:
    """With the times it had: what looks at these alone must notice all the same."""
    content, status = place.read_bytes(), place.stat()
    place.unlink()
    DAMAGES[damage](place, content)
    if damage not in NO_FILES:
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_one_line_that_names_it_or_made_again(tmp_path, monkeypatch, file, damage):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))
    place, read, cache = FILES[file](tmp_path)
    whole = read() if cache else None
    assert place.exists(), "it is no file that a second opening reads"
    damage_file(place, damage)
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


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["features.4", "counts", "checksums", "about.json"])
def test_damaged_files_of_stored_features_are_missing_blocks_and_can_be_written_again(name, damage):
    store = FeatureStore({"side": "image"}, samples=6, block=2)
    store.describe()
    blocks = [Block(first, np.ones(2, "<i4"), {"features": np.full((2, 4), first, "<f4")}) for first in (0, 2, 4)]
    for block in blocks:
        store.write(block)
    assert store.missing(range(3)) == []
    damage_file(store.folder / name, damage)
    missing = store.missing(range(3))
    assert missing or name == "about.json"
    if damage in NO_FILES:
        if name != "about.json":
            with pytest.raises(OSError):
                store.write(blocks[0])
        return
    for number in missing:
        store.write(blocks[number])
    assert store.missing(range(3)) == [] and store.rows("features")[:6, 0].tolist() == [0, 0, 2, 2, 4, 4]


# Files that are whole and say what cannot be


def test_a_retrieval_set_that_claims_a_hundred_million_shards_is_one_line(tmp_path):
    write_files(write_task(tmp_path, sizes=[3]), {"test/nshards.txt": "99999999"})
    with pytest.raises(UserError, match=r"1\.tar: missing, though .*nshards\.txt says 99999999 shards"):
        ZeroShotTask.open(tmp_path)


def test_numbers_beside_an_image_that_claim_to_be_a_trillion_are_one_line(tmp_path):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }\n"
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
    write_task(tmp_path, sizes=[1])
    write_tar(tmp_path / "test" / "0.tar", [("0.cls", b"0"), ("0.png", image_bytes(0)), ("0.npy", array)])
    with pytest.raises(UserError, match=r"0\.npy: .*each image needs one vector of whole numbers"):
        ZeroShotTask.open(tmp_path)


def test_a_puzzle_of_a_hundred_thousand_candidates_is_one_line(tmp_path):
    write_puzzles(tmp_path, "x.jsonl", [("cold", ["snow"] * 100_000, ["snow"])])
    assert "x.jsonl line 1: has 100,000 candidates" in refusal(lambda: read_puzzles(tmp_path))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ('{"_data_files": [{"x": 1}]}', "is damaged"),
        ('{"_data_files": 7}', "is damaged"),
        ("[]", "is damaged"),
        ("null", "is damaged"),
        ("{}", "names no data files"),
        ('{"_data_files": [{"filename": "../train/x.arrow"}]}', "outside of its folder"),
    ],
)
def test_a_saved_set_whose_state_says_something_else_is_one_line(tmp_path, state, words):
    data = Path(write("saved data set", tmp_path, samples(3)))
    message = refusal(write_files(data, {"state.json": state}))
    assert f"state.json: {words}" in message.replace("names a file ", "") and "save the set again" in message


@pytest.mark.parametrize("state", ['{"count": 6, "shard_size": 0}', '{"count": 6}', "[]", "7"])
def test_a_conversion_whose_notes_say_something_else_is_one_line_or_whole(tmp_path, state):
    convert(open_source(write_shards(tmp_path / "shards", [6])), tmp_path / "converted", 1)
    write_files(tmp_path / "converted", {"convert.json": state})
    try:
        assert len(open_source(tmp_path / "converted")) == 6
    except UserError as error:
        assert "convert.json: is damaged" in str(error) and "\n" not in str(error)
