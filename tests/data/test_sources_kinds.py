"""Tables, folders and saved data sets: what each kind of source gives, and what it says when it cannot."""

from __future__ import annotations

import csv
import gzip
import io
import json
import multiprocessing
import os
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from neuclip.data.captions import captions_from_json
from neuclip.data.decoding import decode
from neuclip.data.fingerprint import fingerprint
from neuclip.data.open import open_source
from neuclip.data.sample import BadSample
from neuclip.errors import UserError
from tests.images import photo

COUNT = 11


def caption(number: int) -> str:
    return f'photo {number}, with a comma; «été» "quoted"'


def name(number: int) -> str:
    return f"{'ab'[number % 2]}/{number:03d}.jpg"


NUMBERS = sorted(range(COUNT), key=name)  # ids follow names


def add(tar: tarfile.TarFile, member: str, content: bytes) -> None:
    information = tarfile.TarInfo(member)
    information.size = len(content)
    tar.addfile(information, io.BytesIO(content))


def write_photos(folder: Path) -> None:
    for number in NUMBERS:
        (folder / name(number)).parent.mkdir(parents=True, exist_ok=True)
        (folder / name(number)).write_bytes(photo(number))


def write_tar(folder: Path, packed: bool = False) -> Path:
    folder.mkdir(parents=True)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for number in NUMBERS:
            add(tar, name(number), photo(number))
            add(tar, name(number).replace(".jpg", ".txt"), caption(number).encode())
    path = folder / ("0.tar.gz" if packed else "0.tar")
    path.write_bytes(gzip.compress(plain.getvalue()) if packed else plain.getvalue())
    return path


def write_csv(folder: Path, separator: str = ",", ending: str = "csv") -> Path:
    write_photos(folder)
    with (folder / f"pairs.{ending}").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([["path", "text"], *([name(number), caption(number)] for number in NUMBERS)])
    return folder / f"pairs.{ending}"


def write_jsonl(folder: Path) -> Path:
    write_photos(folder)
    rows = [json.dumps({"file_name": name(number), "caption": caption(number)}) for number in NUMBERS]
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    return folder / "pairs.jsonl"


def write_folder(folder: Path) -> Path:
    write_photos(folder)
    for number in NUMBERS:
        (folder / name(number)).with_suffix(".txt").write_text(caption(number) + "\n", encoding="utf-8")
    (folder / ".hidden.jpg").write_bytes(b"x")
    return folder


def write_listed_folder(folder: Path) -> Path:
    write_csv(folder, "\t", "tsv").rename(folder / "captions.tsv")
    return folder


def write_table(path: Path, columns: dict[str, list], **options: int) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra neuclip[parquet] is not installed")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, **options)


def write_parquet(folder: Path, images: str = "bytes", groups: int = 4) -> Path:
    write_photos(folder)
    values: list[object] = [photo(number) for number in NUMBERS]
    if images == "paths":
        values = [name(number) for number in NUMBERS]
    elif images == "struct":
        values = [{"bytes": photo(number) if number % 2 else None, "path": name(number)} for number in NUMBERS]
    columns = {"image": values, "caption": [caption(number) for number in NUMBERS]}
    write_table(folder / "pairs.parquet", columns, row_group_size=groups)
    return folder / "pairs.parquet"


def write_parquet_folder(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    for part in range(3):
        numbers = NUMBERS[part * 4 : part * 4 + 4]
        columns = {"image": [photo(number) for number in numbers], "caption": [caption(number) for number in numbers]}
        write_table(folder / "data" / f"train-{part:05d}-of-00003.parquet", columns)
    return folder / "data"


KINDS = {
    "tar": write_tar,
    "tar.gz": lambda folder: write_tar(folder, packed=True),
    "csv": write_csv,
    "semicolons": lambda folder: write_csv(folder, ";"),
    "tsv": lambda folder: write_csv(folder, "\t", "tsv"),
    "jsonl": write_jsonl,
    "folder": write_folder,
    "folder with a captions file": write_listed_folder,
    "parquet with bytes": write_parquet,
    "parquet with paths": lambda folder: write_parquet(folder, "paths"),
    "parquet with structs": lambda folder: write_parquet(folder, "struct"),
    "folder of parquet": write_parquet_folder,
}


def contents(source) -> list[tuple[bytes, tuple[str, ...]]]:
    return [(sample.image, sample.captions) for sample in (source[id] for id in range(len(source)))]


def reasons(source) -> list[str]:
    found = []
    for id in range(len(source)):
        try:
            found.append(source[id].captions[0])
        except BadSample as bad:
            found.append(bad.reason)
    return found


def refusal(address: object, **columns: str) -> str:
    with pytest.raises(UserError) as caught:
        open_source(str(address), **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_the_same_ids_captions_and_pixels(tmp_path, kind):
    source = open_source(str(KINDS[kind](tmp_path / "data")))
    assert [sample.captions for sample in (source[id] for id in range(COUNT))] == [(caption(n),) for n in NUMBERS]
    assert len(source) == COUNT and source.faults == ()
    assert source.captions() == [caption(number) for number in NUMBERS]
    assert fingerprint(source) == fingerprint(open_source(str(write_tar(tmp_path / "reference"))))
    for id, number in enumerate(NUMBERS):
        assert np.array_equal(np.asarray(decode(source[id].image)), np.asarray(decode(photo(number))))
    assert contents(pickle.loads(pickle.dumps(source))) == contents(source)
    assert str(tmp_path) in source.where(3)


def test_what_was_found_out_is_said_once_and_what_was_asked_is_not(tmp_path, capsys):
    path = write_csv(tmp_path, ";")
    open_source(str(path))
    open_source(str(path))
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pairs.csv: split at semicolons" in said
    assert "'path'" in said and "'text'" in said and "--data.caption_column" in said
    open_source(str(path), image_column="path", caption_column="text")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("asked", ["", "caption_1,caption_2"])
def test_several_caption_columns_are_several_captions(tmp_path, asked):
    (tmp_path / "0.jpg").write_bytes(photo(0))
    (tmp_path / "pairs.csv").write_text("image,caption_2,caption_1\n0.jpg,two,one\n0.jpg,only,\n")
    source = open_source(str(tmp_path / "pairs.csv"), caption_column=asked)
    assert source[0].captions == ("one", "two") and source[1].captions == ("only",)
    assert source.captions() == ["one", "only"]


def test_a_list_is_several_captions_in_json_lines_and_parquet(tmp_path):
    (tmp_path / "0.jpg").write_bytes(photo(0))
    captions = [["one", " ", "two"], ["three"], []]
    lines = [json.dumps({"image": {"path": "0.jpg"}, "captions": texts}) for texts in captions]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    write_table(tmp_path / "a.parquet", {"jpg": [photo(0)] * 3, "captions": captions})
    for ending in ("jsonl", "parquet"):
        source = open_source(str(tmp_path / f"a.{ending}"))
        assert source[0].captions == ("one", "two") and source.captions() == ["one", "three", ""]
        assert reasons(source)[2] == "caption is missing"


def test_captions_come_from_any_json_key():
    raw = b'{"caption": "a", "alt": ["b", null, "c"], "odd,name": "d"}'
    assert captions_from_json(raw) == ("a",)
    assert captions_from_json(raw, "alt") == ("b", "c")
    assert captions_from_json(raw, "alt,caption") == ("b", "c", "a")
    assert captions_from_json(raw, "odd,name") == ("d",)
    assert captions_from_json(raw, "none") == captions_from_json(b"[1]") == captions_from_json(b"{") == ()


def test_bad_lines_of_a_json_lines_file_are_bad_alone(tmp_path):
    (tmp_path / "0.jpg").write_bytes(photo(0))
    rows = [
        b'{"image": "0.jpg", "text": "good"}', b'{"image": "0.jpg", "text"', b"[1]", b'{"text": "x"}',
        b'{"image": "0.jpg"}', b'{"image": "1.jpg", "text": "x"}', b'{"image": "0.jpg", "text": "caf\xe9"}',
        b'{"image": "a\\ud800", "text": "x"}', b'{"image": "0.jpg", "text": "last"}',
    ]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_bytes(b"\n".join(rows))
    assert reasons(open_source(str(tmp_path / "pairs.jsonl"))) == [
        "good", "line is not a JSON object", "line is not a JSON object", "no image", "caption is missing",
        "image file cannot be read", "line is not a JSON object", "image file cannot be read", "last",
    ]  # fmt: skip


def test_bad_rows_of_a_parquet_file_are_bad_alone(tmp_path):
    images = [photo(0), None, b"", photo(3), photo(4)]
    captions = ["good", "x", "empty image", None, " "]
    write_table(tmp_path / "a.parquet", {"image": images, "caption": captions})
    assert reasons(open_source(str(tmp_path / "a.parquet"))) == [
        "good", "no image", "empty image", "caption is missing", "caption is empty",
    ]  # fmt: skip


def test_row_groups_are_read_on_demand_and_forgotten(tmp_path, monkeypatch):
    path = write_parquet(tmp_path, groups=2)
    source = open_source(str(path))
    read = []
    whole = type(source).read_block
    monkeypatch.setattr(type(source), "read_block", lambda self, n, c: read.append(n) or whole(self, n, c))
    monkeypatch.setattr(type(source), "cache_bytes", 1)
    for id in (0, 1, 4, 0):
        assert source[id].image == photo(NUMBERS[id])
    assert read == [0, 2, 0] and len(source._blocks) == 1


def test_a_forked_worker_reads_parquet_that_its_parent_has_open(tmp_path):
    source = open_source(str(write_parquet(tmp_path)))
    before = contents(source)
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.apply(contents, (source,)) == before
    assert contents(source) == before


def test_files_without_the_extra_name_it(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'neuclip[parquet]'" in refusal(tmp_path / "a.parquet")


def test_splits_of_parquet_files_are_not_mixed(tmp_path):
    path = write_parquet(tmp_path / "x")
    for split in ("test", "train"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}-00000-of-00001.parquet").write_bytes(path.read_bytes())
    message = refusal(tmp_path / "data")
    assert "test, train" in message
    address = message.rpartition("such as ")[2].strip("'")
    assert "/train-" in address and len(open_source(address)) == COUNT


def test_a_saved_hugging_face_data_set_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    rows = {
        "image": [{"bytes": photo(number), "path": None} for number in range(5)],
        "caption": [["a", f"b {number}"] for number in range(5)],
    }
    whole = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    datasets.DatasetDict(train=whole, test=whole.select([3, 1])).save_to_disk(str(tmp_path / "set"))
    assert str(tmp_path / "set" / "train") in refusal(tmp_path / "set")
    source = open_source(str(tmp_path / "set" / "test"))
    assert contents(source) == [(photo(number), ("a", f"b {number}")) for number in (3, 1)]
    assert contents(pickle.loads(pickle.dumps(source))) == contents(source)
    assert source.captions() == ["a", "a"]
    (tmp_path / "set" / "test" / "state.json").write_text('{"_data_files": [{"filename": "../train/x.arrow"}]}')
    assert "outside of its folder" in refusal(tmp_path / "set" / "test")


def test_a_image_without_a_caption_keeps_its_id_and_a_caption_without_a_image_is_listed(tmp_path):
    write_folder(tmp_path)
    (tmp_path / name(NUMBERS[2])).with_suffix(".txt").unlink()
    for number in range(14):
        (tmp_path / f"lonely{number:02d}.txt").write_text("x")
    (tmp_path / "scan.heic").write_bytes(b"x")
    source = open_source(str(tmp_path))
    assert len(source) == COUNT and source.captions()[2] == "" and reasons(source)[2] == "caption is missing"
    assert source.where(2).endswith(name(NUMBERS[2]))
    assert {(fault.id, fault.reason, Path(fault.where).name, fault.times) for fault in source.faults} == {
        (-1, "kind of image is not read", "scan.heic", 1),
        *((-1, "no image", f"lonely{number:02d}.txt", 1) for number in range(9)),
        (-1, "no image", "lonely09.txt and 4 more", 5),
    }


def test_a_text_beside_a_image_is_one_caption_whatever_its_lines(tmp_path):
    (tmp_path / "a.png").write_bytes(photo(0))
    (tmp_path / "a.txt").write_text("first line\nsecond line\n")
    assert open_source(str(tmp_path))[0].captions == ("first line\nsecond line",)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("captions.txt", "image,caption\n{0},one\n{0},two\n{1},three\nno.jpg,four\n"),
        ("captions.txt", "{0}#0\tone\n{0}#1\ttwo\n{1}#0\tthree\nno.jpg#0\tfour\n"),
        ("captions.txt", "{0} one\n{0} two\n{1} three\nno.jpg four\n"),
        ("captions.csv", "file_name,text\n{0},one\n{0},two\n{1},three\nno.jpg,four\n"),
        ("metadata.jsonl", '{{"file_name": "{0}", "text": ["one", "two"]}}\n{{"file_name": "{1}", "text": "three"}}\n'
         '{{"file_name": "../no.jpg", "text": "four"}}\n'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("names", [("a.jpg", "b.jpg"), ("deep/er/a.jpg", "b.jpg")])
def test_one_captions_file_serves_a_folder(tmp_path, file, text, names):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for number, path in enumerate(("deep/er/a.jpg", "b.jpg", "c.jpg")):
        (tmp_path / path).write_bytes(photo(number))
    (tmp_path / file).write_text(text.format(*names))
    source = open_source(str(tmp_path))
    assert [source.where(id).removeprefix(f"{tmp_path}/") for id in range(3)] == ["b.jpg", "c.jpg", "deep/er/a.jpg"]
    assert reasons(source) == ["three", "caption is missing", "one"] and source[2].captions == ("one", "two")
    assert [(fault.id, fault.reason) for fault in source.faults] == [(-1, "no image")]


def test_a_file_name_that_two_images_share_is_not_guessed(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.jpg").write_bytes(photo(0))
    (tmp_path / "captions.csv").write_text("image,caption\nx.jpg,which?\na/x.jpg,this\n")
    source = open_source(str(tmp_path))
    assert reasons(source) == ["this", "caption is missing"] and "row 1: x.jpg" in source.faults[0].where


def write_coco(folder: Path, *, images: str = "train2017", annotations: str = "annotations") -> Path:
    """COCO's layout: images in a folder, captions in a file of another one, two per image."""
    (folder / images).mkdir(parents=True, exist_ok=True)
    (folder / annotations).mkdir(parents=True, exist_ok=True)
    for number in range(4):
        (folder / images / f"{number}.jpg").write_bytes(photo(number))
    listed = {
        "info": {"year": 2017},
        "images": [{"id": 100 - number, "file_name": f"{number}.jpg", "height": 1} for number in (2, 0, 3, 1)],
        "annotations": [
            {"id": 10 * turn + number, "image_id": 100 - number, "caption": f"{'ab'[turn]} {number}\n"}
            for turn in (0, 1)
            for number in (0, 1, 2, 9)
        ],
    }
    (folder / annotations / "captions_train2017.json").write_text(json.dumps(listed))
    return folder / annotations / "captions_train2017.json"


@pytest.mark.parametrize(
    "places", [{}, {"annotations": "."}, {"images": "images/train2017"}, {"images": ".", "annotations": "."}]
)
def test_coco_captions_are_read_with_all_captions_of_a_image(tmp_path, places):
    source = open_source(str(write_coco(tmp_path, **places)))
    assert len(source) == 4 and source.captions() == ["a 2", "a 0", "", "a 1"]
    assert source[0].captions == ("a 2", "b 2") and source[1].image == photo(0)
    assert reasons(source)[2] == "caption is missing" and source.where(2).endswith("captions_train2017.json: 3.jpg")
    assert [(fault.id, fault.reason, fault.times) for fault in source.faults] == [(-1, "no image", 1)] * 2
    copy = pickle.loads(pickle.dumps(source))
    assert (copy[3].image, copy[3].captions) == (photo(1), ("a 1", "b 1"))


def test_messages_of_coco_files_say_what_to_do(tmp_path):
    path = write_coco(tmp_path)
    whole = path.read_text()
    assert f"did you mean {path}" in refusal(path.parent)
    (tmp_path / "train2017").rename(tmp_path / "elsewhere")
    assert f"put the images into {tmp_path / 'train2017'}" in refusal(path)
    path.write_text(whole.replace('"caption"', '"bbox"'))
    assert "no captions in its annotations" in refusal(path)
    for content in ('[{"image": "a.jpg", "caption": "x"}]', "{}", '{"images": 1, "annotations": []}'):
        path.write_text(content)
        assert ".jsonl" in refusal(path)
    path.write_text(whole[:-20])
    assert "is not a JSON file" in refusal(path)
    path.write_text('{"images": [], "annotations": [{"caption": "x", "image_id": [1]}]}')
    assert "has no images" in refusal(path)


def test_messages_of_tables_and_folders_say_what_to_do(tmp_path):
    for folder in ("bare", "two", "strange", "table", "empty"):
        (tmp_path / folder).mkdir()
        if folder not in ("table", "empty"):
            (tmp_path / folder / "a.jpg").write_bytes(photo(0))
    for file in ("captions.csv", "captions.txt"):
        (tmp_path / "two" / file).write_text("image,caption\na.jpg,x\n")
    (tmp_path / "strange" / "captions.csv").write_text("image,caption\nother.jpg,x\n")
    (tmp_path / "table" / "pairs.csv").write_text("image,caption\nother.jpg,x\n")
    (tmp_path / "a.jsonl").write_text("image,caption\n")
    (tmp_path / "b.jsonl").write_text('{"url": 1, "words": 2}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "a.txt beside a.jpg" in refusal(tmp_path / "bare")
    assert "keep one of them" in refusal(tmp_path / "two")
    assert "names none of the 1 images" in refusal(tmp_path / "strange")
    assert "did you mean" in refusal(tmp_path / "table") and "pairs.csv" in refusal(tmp_path / "table")
    assert "no tar shards" in refusal(tmp_path / "empty") and "no images" in refusal(tmp_path / "empty")
    assert "one object per line" in refusal(tmp_path / "a.jsonl")
    assert "url, words" in refusal(tmp_path / "b.jsonl")
    assert "holds no samples" in refusal(tmp_path / "empty.jsonl")
    assert "no file matches" in refusal(tmp_path / "*.tar")
    assert "another kind" in refusal(tmp_path / "{a.jsonl,a.parquet}")
    assert "between commas" in refusal(tmp_path / "*.jsonl")


def test_messages_of_parquet_files_say_what_to_do(tmp_path):
    write_table(tmp_path / "number.parquet", {"image": [1], "caption": ["x"]})
    write_table(tmp_path / "words.parquet", {"url": ["a"], "words": ["x"]})
    whole = write_parquet(tmp_path / "whole")
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-20])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.parquet").write_bytes(whole.read_bytes())
    (tmp_path / "other" / "b.parquet").write_bytes((tmp_path / "words.parquet").read_bytes())
    assert "int64" in refusal(tmp_path / "number.parquet")
    assert "url, words" in refusal(tmp_path / "words.parquet")
    assert "fetch or write it again" in refusal(tmp_path / "cut.parquet")
    assert "b.parquet: has no column 'image'" in refusal(tmp_path / "other")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_table_that_may_not_be_read_is_refused(tmp_path):
    path = write_csv(tmp_path)
    path.chmod(0)
    assert "permissions" in refusal(path)
