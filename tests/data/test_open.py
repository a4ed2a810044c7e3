"""Addresses become sources; the same pairs are the same pairs in whatever files they lie."""

from __future__ import annotations

import csv
import json
import os
import pickle

import numpy as np
import pytest
from neuclip.data.captions import strip_blanks, texts_in
from neuclip.data.fingerprint import fingerprint

from neuclip.data.convert import convert
from neuclip.data.decoding import decode
from neuclip.data.open import open_source, open_training_data
from neuclip.errors import UserError
from neuclip.settings.sections import DataSettings, Settings
from tests.data.small_shards import contents, image_bytes, pair, write_shards, write_tar
from tests.data.small_tables import (
    COUNT,
    KINDS,
    NUMBERS,
    caption,
    fault_of,
    refusal,
    table,
    write_csv,
    write_images,
    write_parquet,
    write_tars,
)
from tests.images import photo
from tests.images import write_shards as write_image_shards

MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_the_same_ids_captions_and_pixels(tmp_path, kind):
    source = open_source(str(KINDS[kind](tmp_path / "data")))
    assert [sample.captions for sample in (source[id] for id in range(COUNT))] == [(caption(n),) for n in NUMBERS]
    assert len(source) == COUNT and source.faults == ()
    assert source.captions() == [caption(number) for number in NUMBERS]
    assert fingerprint(source) == fingerprint(open_source(str(write_tars(tmp_path / "reference"))))
    for id, number in enumerate(NUMBERS):
        assert np.array_equal(np.asarray(decode(source[id].image)), np.asarray(decode(photo(number))))
    assert contents(pickle.loads(pickle.dumps(source))) == contents(source)
    assert str(tmp_path) in source.where(3)


def test_a_mark_in_front_of_utf_8_is_no_part_of_a_caption_in_any_kind_of_file(tmp_path):
    folder = write_images(tmp_path / "folder", 2, txt=MARK + b"cap {}\r\n")
    rows = [[f"folder/{number}.png", f"\ufeffcap {number}"] for number in range(2)]
    with (tmp_path / "pairs.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["image", "caption"], *rows])
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(dict(zip(("image", "caption"), row, strict=True))) + "\n" for row in rows), "utf-8-sig"
    )
    texts = [(f"{number}.{ending}", content) for number in range(2) for ending, content in (
        ("png", image_bytes(number)), ("txt", MARK + f"cap {number}".encode()))]  # fmt: skip
    write_tar(tmp_path / "txt.tar", texts)
    objects = [(name.replace("txt", "json"), MARK + json.dumps({"caption": content[3:].decode()}).encode())
               if name.endswith("txt") else (name, content) for name, content in texts]  # fmt: skip
    write_tar(tmp_path / "json.tar", objects)
    sources = [open_source(str(folder)), *(open_source(str(tmp_path / name)) for name in (
        "pairs.csv", "pairs.jsonl", "txt.tar", "json.tar"))]  # fmt: skip
    assert [source.captions() for source in sources] == [["cap 0", "cap 1"]] * 5
    assert [source[1].captions for source in sources] == [("cap 1",)] * 5
    assert len({json.dumps(fingerprint(source)) for source in sources}) == 1
    assert strip_blanks("\ufeff \0a\ufeff") == "a"


def test_numbers_are_the_same_captions_in_every_kind_of_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_images(tmp_path, 2)
    rows = [{"image": "0.png", "caption": 1984}, {"image": "1.png", "caption": 7}]
    (tmp_path / "pairs.csv").write_text("image,caption\n0.png,1984\n1.png,7\n")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    members = [member for number, row in enumerate(rows) for member in (
        (f"{number}.png", image_bytes(number)), (f"{number}.json", json.dumps(row).encode()))]  # fmt: skip
    write_tar(tmp_path / "pairs.tar", members)
    sources = [open_source(str(tmp_path / f"pairs.{kind}")) for kind in ("csv", "jsonl", "parquet", "tar")]
    assert [contents(source) for source in sources] == [[(image_bytes(0), ("1984",)), (image_bytes(1), ("7",))]] * 4
    assert len({json.dumps(fingerprint(source)) for source in sources}) == 1
    assert texts_in([float("nan"), float("inf"), None, True, 0.5, 10**400]) == ("0.5", str(10**400))


def test_guessed_columns_are_printed_once_and_chosen_ones_are_not(tmp_path, capsys):
    path = write_csv(tmp_path, ";")
    open_source(str(path))
    open_source(str(path))
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "pairs.csv: split at semicolons" in printed
    assert "'path'" in printed and "'text'" in printed and "--data.caption_column" in printed
    open_source(str(path), image_column="path", caption_column="text")
    assert capsys.readouterr().err == ""


def test_ids_follow_sorted_shard_paths_one_level_deep(tmp_path):
    write_tar(tmp_path / "b.tar", pair(2))
    write_tar(tmp_path / "a" / "0.tar", pair(0))
    write_tar(tmp_path / "a" / "1.tar", pair(1))
    assert open_source(str(tmp_path)).captions() == ["image 0", "image 1", "image 2"]


def test_a_brace_pattern_opens_its_shards_and_no_others(tmp_path):
    write_shards(tmp_path, [1, 1, 1, 1])
    assert open_source(str(tmp_path / "{00001..00002}.tar")).captions() == ["image 1", "image 2"]


def test_an_address_longer_than_a_file_name_is_read_part_by_part(tmp_path):
    path = table(tmp_path, "image,caption\na.jpg,a caption\n")
    assert len(open_source(",".join([str(path)] * 300))) == 300
    shard = convert(open_source(str(path)), tmp_path / "shards") and tmp_path / "shards" / "00000.tar"
    braces = tmp_path / "shards" / f"{{{','.join(['00000'] * 60)}}}.tar"
    assert shard.exists() and len(open_source(str(braces))) == 1
    for address in ("x" * 5000, "x" * 300 + ".csv", "x" * 300 + ":2", "{" + "x" * 300 + ",y}.tar"):
        with pytest.raises(UserError) as caught:
            open_source(address)
        assert "\n" not in str(caught.value)


def test_images_left_out_beside_shards_are_announced_once(tmp_path, capsys):
    folder = write_image_shards(tmp_path / "photos", 4, shards=1)
    open_source(str(folder))
    assert capsys.readouterr().err == ""
    for number in range(3):
        (folder / f"{number}.JPG").write_bytes(b"")
    for _ in range(2):
        open_source(str(folder))
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and "photos: read as tar shards; 3 images beside them are left out" in printed[0]


def test_messages_of_addresses_and_shards_say_what_to_do(tmp_path):
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


def test_splits_of_parquet_files_are_not_mixed(tmp_path):
    path = write_parquet(tmp_path / "x")
    for split in ("test", "train"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}-00000-of-00001.parquet").write_bytes(path.read_bytes())
    message = refusal(tmp_path / "data")
    assert "test, train" in message
    address = message.rpartition("such as ")[2].strip("'")
    assert "/train-" in address and len(open_source(address)) == COUNT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_table_without_read_permission_is_refused(tmp_path):
    path = write_csv(tmp_path)
    path.chmod(0)
    assert "permissions" in refusal(path)


def test_a_name_as_long_as_a_page_is_shortened_in_messages(tmp_path):
    page = "x" * 5000
    (tmp_path / "pairs.csv").write_text(f"image,caption\n{page},a caption\n")
    source = open_source(str(tmp_path / "pairs.csv"))
    assert len(fault_of(source, 0).where) < 500
    for attempt in (
        lambda: open_training_data(Settings(data=DataSettings(train=str(tmp_path / "pairs.csv")))),
        lambda: open_source(str(tmp_path / "odd.csv")),
    ):
        (tmp_path / "odd.csv").write_text(f"{page},{page}y\n")
        with pytest.raises(UserError) as caught:
            attempt()
        assert len(str(caught.value)) < 900


def test_a_text_file_with_a_header_is_a_table_as_kaggle_writes_it_and_others_are_lists(tmp_path, capsys):
    (tmp_path / "Images").mkdir()
    for name in ("1.jpg", "2.jpg"):
        (tmp_path / "Images" / name).write_bytes(image_bytes(0))
    (tmp_path / "captions.txt").write_text("image,caption\n1.jpg,A child .\n1.jpg,A girl .\n2.jpg,A dog\n")
    source = open_source(str(tmp_path / "captions.txt"))
    assert [source[id].captions for id in range(3)] == [("A child .",), ("A girl .",), ("A dog",)]
    (tmp_path / "named.txt").write_text("photo;words\n1.jpg;A child .\n")
    named = open_source(str(tmp_path / "named.txt"), image_column="photo", caption_column="words")
    assert named[0].captions == ("A child .",)
    (tmp_path / "tokens.txt").write_text("1.jpg#0\tA child .\n")
    with pytest.raises(UserError, match=r"line 1 \(a list of shards.*a table of captions begins with a header"):
        open_source(str(tmp_path / "tokens.txt"))
