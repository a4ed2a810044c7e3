"""A folder of images: captions in a text beside each image, or in one file for all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.builders.data import write_files, write_parquet
from tests.builders.images import photo
from tests.builders.reading import captions, faults, open_source, outcomes, refusal, texts, travelled


def places(source, folder: Path) -> list[str]:
    return [source.where(id).removeprefix(f"{folder}/") for id in range(len(source))]


@pytest.mark.parametrize("ending", ["TXT", "Txt", "txt"])
def test_a_text_is_one_caption_whatever_its_lines_and_the_case_of_its_suffix(tmp_path, ending):
    source = open_source(write_files(tmp_path, {"IMG_0.JPG": "", f"IMG_0.{ending}": "first line\nsecond line\n"}))
    assert captions(travelled(source)) == [("first line\nsecond line",)]


def test_text_goes_before_json_as_img2dataset_writes_both(tmp_path):
    about = '{"caption": ["from json", "and more"], "url": "http://x"}'
    for shard in ("00000", "00001"):
        files = {"a.png": "", "a.txt": "from text", "a.json": about, "b.png": "", "b.json": about}
        write_files(tmp_path / shard, files)
        write_parquet(tmp_path / f"{shard}.parquet", {"url": ["http://x/1"], "caption": ["a"], "key": ["0"]})
        write_files(tmp_path, {f"{shard}_stats.json": '{"count": 2}'})
    source = open_source(tmp_path)
    assert captions(source) == [("from text",), ("from json", "and more")] * 2 and faults(source) == []
    assert places(source, tmp_path) == ["00000/a.png", "00000/b.png", "00001/a.png", "00001/b.png"]


def test_an_image_without_a_caption_keeps_its_id_and_kinds_that_are_not_read_are_listed(tmp_path):
    files = {f"{name}.jpg": "" for name in "abcd"} | {"a.txt": "one", "c.txt": "three", "d.txt": b"caf\xe9"}
    source = open_source(write_files(tmp_path, files | {"scan.heic": "x"}))
    assert outcomes(source) == ["one", "caption is missing", "three", "caption is not UTF-8"]
    assert faults(source) == [("image format is not supported", str(tmp_path / "scan.heic"), 1)]
    assert source.where(1).endswith("b.jpg")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("captions.txt", "image,caption\n{0},one\n{0},two\n{1},three\nno.jpg,four\n"),
        ("captions.csv", "file_name,text\n{0},one\n./{0},two\n{1},three\nno.jpg,four\n"),
        ("metadata.jsonl", '{{"file_name": "{0}", "text": ["one", "two"]}}\n{{"file_name": "{1}", "text": "three"}}\n'
         '{{"file_name": "../no.jpg", "text": "four"}}\n'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("names", [("a.jpg", "b.jpg"), ("deep/er/a.jpg", "b.jpg")])
def test_one_captions_file_serves_a_folder(tmp_path, file, text, names):
    write_files(tmp_path, {"deep/er/a.jpg": "", "b.jpg": "", "c.jpg": "", file: text.format(*names)})
    source = open_source(tmp_path)
    assert places(source, tmp_path) == ["b.jpg", "c.jpg", "deep/er/a.jpg"]
    assert outcomes(source) == ["three", "caption is missing", "one"] and source[2].captions == ("one", "two")
    assert [reason for reason, _, _ in faults(source)] == ["no image"]


def test_rows_that_fit_no_image_of_the_folder_are_listed_and_a_shared_name_is_not_guessed(tmp_path):
    rows = "image,caption\nx.jpg,which?\na/x.jpg,this\nc.jpg,cut, off\n"
    source = open_source(write_files(tmp_path, {"a/x.jpg": "", "b/x.jpg": "", "c.jpg": "", "captions.csv": rows}))
    assert outcomes(source) == ["this", "caption is missing", "caption is missing"]
    assert [(reason, where.rpartition(": ")[2]) for reason, where, _ in faults(source)] == [
        ("no image", "x.jpg"),
        ("row has more than the 2 fields of its header", "c.jpg"),
    ]


ROWS = "image,caption\nother.jpg,x\n"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ("no tar shards", "no images", "expected files such as 00000.tar, or a.jpg and a.txt")),
        ({"a.jpg": "", "00000_stats.json": "{}"}, ("1 image but no captions", "a.txt beside a.jpg")),
        ({"a.jpg": "", "a.jpg.txt": "x", "a.caption": "x"}, ("no captions", "a.txt beside a.jpg")),
        ({"a.jpg": "", "captions.csv": ROWS, "captions.tsv": ROWS}, ("keep one of them",)),
        ({"a.jpg": "", "captions.csv": ROWS}, ("names none of the 1 images",)),
        ({"a.jpg": "", "captions.txt": "a.jpg#0\tone\n"}, ("captions.txt", "header")),
        ({"a.jpg": "", "captions.txt": "a.jpg one\n"}, ("captions.txt", "header")),
        ({"pairs.csv": ROWS}, ("did you mean", "pairs.csv")),
    ],
)
def test_a_folder_without_captions_is_refused_with_what_to_do(tmp_path, files, words):
    message = refusal(write_files(tmp_path, files))
    assert all(word in message for word in words), message


def test_links_to_folders_are_followed_and_circles_end(tmp_path):
    folder, elsewhere = tmp_path / "photos", tmp_path / "elsewhere"
    for path in (folder / "b" / "1", folder / "z", elsewhere / "2", elsewhere / "deep" / "3", tmp_path / "outside"):
        write_files(path.parent, {f"{path.name}.jpg": "", f"{path.name}.txt": path.name})
    (folder / "a").symlink_to(elsewhere)
    (folder / "c").symlink_to("b")  # beside it: read once, under its own path
    (folder / "b" / "again").symlink_to(folder)  # circles: to a folder above, there and back, out of it all
    (elsewhere / "deep" / "back").symlink_to(folder)
    (folder / ".hidden").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, tmp_path / "link"):
        source = open_source(place)
        assert places(source, place) == ["a/2.jpg", "a/deep/3.jpg", "b/1.jpg", "z.jpg"]
        assert texts(place) == ["2", "3", "1", "z"]


def test_captions_that_have_not_changed_are_not_read_again(tmp_path):
    folder = write_files(tmp_path, {"a.jpg": photo(0), "a.txt": "one"})
    assert texts(folder) == ["one"]
    status = (folder / "a.txt").stat()
    (folder / "a.txt").write_text("two")
    os.utime(folder / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert texts(folder) == ["one"]
    (folder / "a.txt").write_text("three")
    assert texts(folder) == ["three"]
