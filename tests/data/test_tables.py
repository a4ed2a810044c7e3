"""Tables of pairs: CSV, TSV, JSON lines, Parquet, saved data sets, COCO and Karpathy's splits; which rows are bad, what
is the machine's fault, and what is no table at all."""

from __future__ import annotations

import base64
import csv
import json
import multiprocessing
import os
import resource
import sys
from pathlib import Path

import pytest

from tests.builders.data import (
    image_bytes,
    karpathy_entries,
    samples,
    several,
    table,
    write,
    write_files,
    write_images,
    write_parquet,
)
from tests.builders.images import photo
from tests.builders.reading import (
    captions,
    content,
    failure,
    fault_of,
    faults,
    open_source,
    outcomes,
    refusal,
    retrieval,
    texts,
    training_data,
    travelled,
)

# CSV and TSV


@pytest.mark.parametrize("separator", ["\t", ";", ",", "|"])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_is_split_at_what_its_header_holds(tmp_path, separator, ending):
    rows = [("", "filepath", "title"), ("0", "a.jpg", "one and more"), ("1", "b.jpg", "two")]  # as pandas writes
    text = "\ufeff" + "".join(f"{separator.join(row)}\n" for row in rows)
    path = table(tmp_path, text, f"pairs.{ending}")
    assert texts(path) == ["one and more", "two"] and open_source(path)[1].image == photo(0)


def test_guessed_columns_are_printed_once_and_chosen_ones_are_not(tmp_path, capsys):
    path = table(tmp_path, "path;text\na.jpg;x\n")
    for _ in range(2):
        open_source(path)
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "pairs.csv: split at semicolons" in printed
    assert "'path'" in printed and "'text'" in printed and "--data.caption_column" in printed
    open_source(path, image_column="path", caption_column="text")
    assert capsys.readouterr().err == ""
    assert "did you mean 'text'" in refusal(path, caption_column="txt")


def test_bad_rows_of_a_csv_are_bad_alone(tmp_path):
    rows = (
        b"image,caption\na.jpg,good\n1.png,no such file\na.jpg,caf\xe9\na.jpg\n,no path\n\nb.jpg,cut, off\na.jpg,x,, \n"
    )
    source = open_source(table(tmp_path, rows + b"b.jpg,last"))
    assert outcomes(source) == [
        "good", "image file cannot be read", "caption is not UTF-8", "caption is empty", "no image",
        "row has more than the 2 fields of its header", "x", "last",
    ]  # fmt: skip
    assert "row 6" in fault_of(source, 5).where and "row 2" in fault_of(source, 1).where


ROWS = 300


def written(path: Path, special: dict[int, str], separator: str, image_first: bool = True) -> Path:
    lines = [(f"{number}.jpg", special.get(number, f"plain {number}")) for number in range(ROWS)]
    rows = [row if image_first else row[::-1] for row in [("image", "caption"), *lines]]
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "later", [{}, {200: 'closed by chance 5"'}, {4: '"in the next row"'}, {200: 'a "word" within'}]
)
@pytest.mark.parametrize("image_first", [True, False])
def test_a_quote_that_is_not_closed_stops_a_csv_at_its_line(tmp_path, later, image_first):
    message = refusal(written(tmp_path / "pairs.csv", {3: '"never closed', **later}, ",", image_first))
    assert "pairs.csv: line 5:" in message and "quote" in message and "; " in message


@pytest.mark.parametrize("file", ["pairs.tsv", "pairs.csv"])
def test_quotes_of_a_table_of_tabs_are_letters(tmp_path, file):
    special = {3: '"never closed', 4: '"Quoted" said nobody', 7: 'a 5" nail', 9: 'the "word"', 200: 'by chance 5"'}
    write_files(tmp_path, {f"{number}.jpg": b"x" for number in range(ROWS)})
    found = texts(written(tmp_path / file, special, "\t"))
    assert found == [special.get(number, f"plain {number}") for number in range(ROWS)]


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_what_a_csv_writer_quotes_comes_back_and_a_json_list_is_several_captions(tmp_path, separator, quoting):
    expected = ['a "word"', '"all of it"', '"begins', "comma, and ; and |", "plain", "[brackets] of a text"]
    if separator == ",":
        lines = ["two\nlines, and\r\nthree", "tab\tand", "one, line of many\n" * 60 + "end", "of a.jpg, of b.jpg\nx"]
        expected += lines
    path = table(tmp_path, "", "pairs.tsv" if separator == "\t" else "pairs.csv")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=quoting)
        rows = [("a.jpg", text) for text in (*expected, json.dumps(["one, more", "two"]))]
        writer.writerows([("image", "caption"), *rows])
    assert captions(open_source(path)) == [*((text,) for text in expected), ("one, more", "two")]


def test_a_text_file_with_a_header_is_a_table_as_kaggle_writes_it(tmp_path):
    rows = "image,caption\n1.jpg,A child .\n1.jpg,A girl .\n2.jpg,A dog\n"
    write_files(tmp_path, {"Images/1.jpg": "", "Images/2.jpg": "", "captions.txt": rows})
    assert texts(tmp_path / "captions.txt") == ["A child .", "A girl .", "A dog"]
    write_files(tmp_path, {"named.txt": "photo;words\n1.jpg;A child .\n"})
    assert texts(tmp_path / "named.txt", image_column="photo", caption_column="words") == ["A child ."]


# What all tables share: columns, JSON lines, paths of images


@pytest.mark.parametrize(
    ("text", "choice", "expected"),
    [
        ("image,caption_2,caption_1\na.jpg,two,one\na.jpg,only,\n", {}, [("one", "two"), ("only",)]),
        ("image,b,c\na.jpg,one,two\n", {"caption_column": "c,b"}, [("two", "one")]),
        ("caption,de,image,photo\nred,rot,none.png,a.jpg\n", {"image_column": "photo", "caption_column": "de"},
         [("rot",)]),
    ],
)  # fmt: skip
def test_captions_come_from_the_named_columns_or_from_usual_ones_that_may_be_several(tmp_path, text, choice, expected):
    assert captions(open_source(table(tmp_path, text), **choice)) == expected


def test_bad_lines_of_a_json_lines_file_are_bad_alone(tmp_path):
    rows = [
        b'{"image": "a.jpg", "text": "good"}', b'{"image": "a.jpg", "text"', b"[1]", b'{"text": "x"}', b"",
        b'{"image": "a.jpg"}', b'{"image": "1.jpg", "text": "x"}', b'{"image": "a.jpg", "text": "caf\xe9"}',
        b'{"image": "a\\ud800", "text": "x"}', b'{"image": {"path": "b.jpg"}, "text": ["", "last"]}',
    ]  # fmt: skip
    source = open_source(table(tmp_path, b"\n".join(rows), "pairs.jsonl"))
    assert outcomes(source) == [
        "good", "line is not a JSON object", "line is not a JSON object", "no image", "caption is missing",
        "image file cannot be read", "line is not a JSON object", "image file cannot be read", "last",
    ]  # fmt: skip
    assert "row 9" in source.where(8)


BASE64 = base64.b64encode(image_bytes(0)).decode()
UTF16 = "image,caption\na.jpg,one\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("pairs.csv", b"", "is empty"),
        ("pairs.csv", UTF16.encode("utf-16"), "UTF-8"),
        ("pairs.csv", UTF16.encode("utf-16-le"), "NUL bytes"),
        ("pairs.csv", b" , ,\na.jpg,one,\n", "names no column"),
        ("pairs.csv", b"sep=;\nimage;caption\n0.png;red\n", "sep="),
        ("pairs.csv", b"image,caption\n" + b"a.jpg,gr\xfcn\nb.jpg,rot\n" * 15, "is not UTF-8"),
        ("pairs.csv", b"a.jpg,one\nb.jpg,two\n", "must be a header that names the columns, such as image,caption"),
        ("pairs.csv", b"url,caption\nhttps://x.org/a.jpg,one\n", "img2dataset"),
        ("pairs.csv", b"image,caption\nhttp://x.org/a.jpg,one\nHTTPS://x.org/b.jpg,two\n", "img2dataset"),
        ("pairs.csv", b"link,words\nx,y\n", "link, words; name it with --data.image_column"),
        ("pairs.csv", b"image,words\nx,y\n", "--data.caption_column"),
        ("pairs.csv", b"image,caption\n", "has no samples"),
        ("pairs.csv", b"image,caption\n1,a.jpg,x\n2,b.jpg,y\n", "none of its 2 rows can be used"),  # R's row names
        ("pairs.csv", f"image,caption\n{BASE64},one\n".encode(), "base64"),
        ("pairs.tsv", f"image\tcaption\n{BASE64}\tone\n".encode(), "base64"),
        ("pairs.jsonl", json.dumps({"image": BASE64, "caption": "one"}).encode(), "base64"),
        ("pairs.jsonl", '{"image": "0.png", "caption": "one"}\n'.encode("utf-16"), "UTF-8"),
        ("pairs.jsonl", b"image,caption\n", "one object per line"),
        ("pairs.jsonl", b"[1]\n", "one object per line"),
        ("pairs.jsonl", b'{"url": 1, "words": 2}\n', "url, words"),
        ("pairs.jsonl", b"", "has no samples"),
        ("pairs.parquet", b"PAR1", "fetch or write it again"),
        ("pairs.csv", b"image,caption\n" + b"x" * 5000 + b",a caption\n", "none of its first images exists"),
        ("pairs.csv", b"x" * 5000 + b"," + b"y" * 5000 + b"\n", "pairs.csv"),  # names as long as a page are shortened
    ],
)
def test_what_is_no_table_of_pairs_is_refused_in_a_line_that_says_what_to_do(tmp_path, name, text, words):
    message = refusal(lambda: training_data(table(tmp_path, text, name)))
    assert f"{name}: " in message and words in message and len(message) < 900


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet of paths"])
def test_a_table_that_leads_to_no_image_is_refused_with_the_folders_that_were_tried(tmp_path, monkeypatch, kind):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    address = write(kind, tmp_path / "data", samples(30))
    for one in samples(30)[1:]:
        (tmp_path / "data" / one.name).unlink()
    assert len(training_data(address)) == 30  # one image that is there is enough
    (tmp_path / "data" / samples(30)[0].name).unlink()
    message = refusal(lambda: training_data(address))
    assert "a/000.jpg" in message and f"neither in {tmp_path / 'data'} nor in {tmp_path / 'work'}" in message


@pytest.mark.parametrize(("start", "found"), [("", "tables"), ("{}/tables/", "tables/photos")])
def test_the_folder_of_the_images_is_where_relative_paths_start_or_what_absolute_ones_share(start, found, tmp_path):
    names = [f"photos/{place}/x.png" for place in "ab"]
    rows = "".join(f"{start.format(tmp_path)}{name},a shape\n" for name in names)
    write_files(tmp_path / "tables", {"pairs.csv": f"image,caption\n{rows}", **dict.fromkeys(names, "")})
    assert open_source(tmp_path / "tables" / "pairs.csv").folder == tmp_path / found


def listing(folder: Path, *names: str) -> Path:
    return table(folder, "image,caption\n" + "".join(f"{name},a caption\n" for name in names))


def test_a_fault_gives_the_reason_that_an_image_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no disk is used
    names = ("missing.jpg", ".", "pipe.jpg", "/dev/zero", "x" * 5000, "huge.jpg", "a.jpg")
    source = open_source(listing(tmp_path, *names))
    for id, words in enumerate(("No such file", "", "not a file", "not a file", "too long")):
        bad = fault_of(source, id)
        assert bad.reason == "image file cannot be read" and words in bad.where and len(bad.where) < 500
    assert outcomes(source)[5:] == ["image file is too large", "a caption"]


def test_running_out_of_open_files_stops_the_run_and_is_not_bad_data(tmp_path):
    source = open_source(listing(tmp_path, "a.jpg"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert "Too many open files" in failure(lambda: source[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert source[0].captions == ("a caption",)


def test_paths_begin_at_home_or_have_backslashes_unless_a_file_is_called_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_files(tmp_path, {"home/c.jpg": b"3", "a/0.png": b"4", "b\\0.png": b"5"})
    source = open_source(listing(tmp_path, "~/c.jpg", "a\\0.png", "b\\0.png"))
    assert [source[id].image for id in range(3)] == [b"3", b"4", b"5"]


# Parquet and saved data sets


def test_bad_rows_of_a_parquet_file_are_bad_alone(tmp_path):
    images, words = [photo(0), None, b"", photo(3), photo(4)], ["good", "x", "empty image", None, " "]
    path = write_parquet(tmp_path / "a.parquet", {"image": images, "caption": words})
    assert outcomes(open_source(path)) == ["good", "no image", "empty image", "caption is missing", "caption is empty"]


def test_row_groups_are_read_on_demand_and_kept_for_the_next_sample(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    source = open_source(write("parquet", tmp_path, samples()))  # groups of four
    read, whole = [], parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        parquet.ParquetFile, "read_row_group", lambda self, i, *a, **k: read.append(i) or whole(self, i, *a, **k)
    )
    assert [source[id].image for id in (0, 1, 3, 8, 10, 9)] == [samples()[id].image for id in (0, 1, 3, 8, 10, 9)]
    assert read == [0, 2] and "pairs.parquet row" in source.where(9)


def test_a_forked_worker_reads_parquet_that_its_parent_has_open(tmp_path):
    source = open_source(write("parquet", tmp_path, samples()))
    before = content(source)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(content, (source,)) == before
    assert content(source) == before


def test_parquet_columns_of_all_types_that_programs_write_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    write_images(tmp_path, several([["x"]] * 2))
    images, paths, words = [image_bytes(0), image_bytes(1), None], ["000.png", "001.png", None], ["one", "two", "two"]
    kinds = [(images, pyarrow.large_binary()), (paths, pyarrow.large_string())]
    if hasattr(pyarrow, "binary_view"):
        kinds += [(images, pyarrow.binary_view()), (paths, pyarrow.string_view())]
    columns = [(pyarrow.array(values, kind), pyarrow.array(words, pyarrow.large_string())) for values, kind in kinds]
    columns += [
        (pyarrow.array(one).dictionary_encode(), pyarrow.array(words).dictionary_encode()) for one in (images, paths)
    ]
    for column, text in columns:
        source = open_source(write_parquet(tmp_path / "pairs.parquet", {"image": column, "caption": text}))
        assert outcomes(source) == ["one", "two", "no image"], column.type
        assert [source[id].image for id in range(2)] == images[:2], column.type


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
    source = travelled(open_source(tmp_path / "set" / "test"))
    assert content(source) == [(photo(number), ("a", f"b {number}")) for number in (3, 1)]


def test_messages_of_parquet_files_say_what_to_do(tmp_path, monkeypatch):
    write_parquet(tmp_path / "number.parquet", {"image": [1], "caption": ["x"]})
    write_parquet(tmp_path / "words.parquet", {"url": ["a"], "words": ["x"]})
    write("parquet", tmp_path / "other", samples(3))
    (tmp_path / "other" / "z.parquet").write_bytes((tmp_path / "words.parquet").read_bytes())
    assert "number.parquet" in refusal(tmp_path / "number.parquet")
    assert "url, words" in refusal(tmp_path / "words.parquet")
    assert "z.parquet: has no column 'image'" in refusal(tmp_path / "other")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "[parquet]" in refusal(tmp_path / "words.parquet")


# COCO and Karpathy's splits


def write_coco(folder: Path, *, images: str = "train2017", annotations: str = "annotations") -> Path:
    """Images in a folder, captions in a file of another one, two per image; image 3 has none, and two have no image."""
    write_files(folder / images, {f"{number}.jpg": image_bytes(number) for number in range(4)})
    listed = {
        "images": [{"id": 100 - number, "file_name": f"{number}.jpg", "height": 1} for number in (2, 0, 3, 1)],
        "annotations": [
            {"id": 10 * turn + number, "image_id": 100 - number, "caption": f"{'ab'[turn]} {number}\n"}
            for turn in (0, 1)
            for number in (0, 1, 2, 9)
        ],
    }
    path = folder / annotations / "captions_train2017.json"
    write_files(path.parent, {path.name: json.dumps(listed)})
    return path


@pytest.mark.parametrize(
    "places", [{}, {"annotations": "."}, {"images": "images/train2017"}, {"images": ".", "annotations": "."}]
)
def test_coco_captions_are_read_with_all_captions_of_an_image(tmp_path, places):
    source = travelled(open_source(write_coco(tmp_path, **places)))
    assert outcomes(source) == ["a 2", "a 0", "caption is missing", "a 1"]
    assert source[0].captions == ("a 2", "b 2") and source[1].image == image_bytes(0)
    assert source.where(2).endswith("captions_train2017.json: 3.jpg")
    assert [reason for reason, _, times in faults(source) for _ in range(times)] == ["no image"] * 2


def test_messages_of_coco_files_say_what_to_do(tmp_path):
    path = write_coco(tmp_path)
    whole = path.read_text()
    assert f"did you mean {path}" in refusal(path.parent)
    (tmp_path / "train2017").rename(tmp_path / "elsewhere")
    for text, words in (
        (whole, f"put the images into {tmp_path / 'train2017'}"),
        (whole.replace('"caption"', '"bbox"'), "no captions in its annotations"),
        ('[{"image": "a.jpg", "caption": "x"}]', ".jsonl"),
        ('{"images": 1, "annotations": []}', ".jsonl"),
        (whole[:-20], f"{path}: is "),
        ('{"images": [], "annotations": [{"caption": "x", "image_id": [1]}]}', "has no images"),
    ):
        path.write_text(text)
        assert words in refusal(path)


SPLITS = ["test", "train", "restval", "val", "test", "train"]
SPLIT_PAIRS = several([[f'caption {k}, "quoted" of {number}' for k in range(5 + number % 2)] for number in range(6)])


def write_split(path: Path) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps({"images": karpathy_entries(SPLIT_PAIRS, SPLITS), "dataset": "x"}))
        return path
    both = enumerate(zip(SPLIT_PAIRS, SPLITS, strict=True))
    rows = [[json.dumps(one.captions), "[0]", split, one.name, number] for number, (one, split) in both]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["raw", "sentids", "split", "filename", "img_id"], *rows])
    return path


@pytest.mark.parametrize("name", ["dataset_flickr30k.json", "flickr_annotations_30k.csv"])
def test_retrieval_reads_the_test_split_of_karpathy_and_training_the_others(tmp_path, name, capsys):
    write_images(tmp_path / "flickr30k-images", SPLIT_PAIRS)
    path = write_split(tmp_path / name)
    source = retrieval(path, "--data.caption_column", "words")  # a column of the run's other tables does not hold here
    assert content(source) == [(SPLIT_PAIRS[k].image, SPLIT_PAIRS[k].captions) for k in (0, 4)]
    assert source.where(1) == f"{path}: 004.png"
    assert captions(open_source(path)) == [SPLIT_PAIRS[k].captions for k in (1, 2, 5)]
    printed = capsys.readouterr().err
    assert "2 images from" in printed and "only test (2) for retrieval" in printed
    assert "17 captions; of its splits only train (2), restval (1) for training" in printed


@pytest.mark.parametrize("as_named", [True, False])
def test_images_of_coco_lie_in_the_folders_that_karpathys_file_names_or_all_in_one(tmp_path, as_named):
    listed = karpathy_entries(SPLIT_PAIRS, SPLITS)
    for one, entry in zip(SPLIT_PAIRS, listed, strict=True):
        entry["filepath"] = "train2014" if entry["split"] == "train" else "val2014"
        write_images(tmp_path / "images" / (entry["filepath"] if as_named else ""), [one])
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": listed}))
    source = open_source(tmp_path / "dataset_coco.json")
    assert [source[id].image for id in range(3)] == [SPLIT_PAIRS[k].image for k in (1, 2, 5)]


def test_split_files_of_no_use_are_refused_and_bad_entries_are_bad_samples(tmp_path):
    path = write_split(tmp_path / "x.csv")
    message = refusal(lambda: retrieval(path))
    assert "x.csv: its first image '000.png' is neither beside it nor in a folder there; put them there" in message
    (tmp_path / "a.zip").write_bytes(b"")
    assert "a.zip there" in refusal(lambda: retrieval(path))
    write_images(tmp_path, SPLIT_PAIRS)
    path.write_text(path.read_text().replace("test", "nil"))
    assert "no image of the split test" in refusal(lambda: retrieval(path))
    path.write_text("raw,split,filename\nno list,test,000.png\n")
    assert "x.csv row 1" in refusal(lambda: retrieval(path))
    named = [("000.png", [{"raw": "a"}]), ("001.png", []), ("gone.png", [{"raw": "b"}]), ("", [{"raw": "c"}])]
    listed = [{"filename": name, "sentences": texts, "split": "test"} for name, texts in named]
    (tmp_path / "dataset.json").write_text(json.dumps({"images": listed}))
    source = retrieval(tmp_path / "dataset.json")
    assert outcomes(source) == ["a", "caption is missing", "image file cannot be read", "no image"]
