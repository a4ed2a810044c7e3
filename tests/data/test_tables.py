"""Tables and folders: separators, columns and quotes; which rows are bad, and what is the machine's fault."""

from __future__ import annotations

import base64
import csv
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from tests.builders.data import (
    captions,
    content,
    failure,
    fault_of,
    faults,
    image_bytes,
    open_source,
    outcomes,
    refusal,
    retrieval,
    samples,
    several,
    table,
    training_data,
    travelled,
    write,
    write_images,
    write_parquet,
)
from tests.builders.data import karpathy_entries as entries
from tests.builders.images import photo


def texts(path: object, **columns: str) -> list[str]:
    return [one[0] for one in captions(open_source(path, **columns))]


# CSV and TSV


@pytest.mark.parametrize("separator", ["\t", ";", ",", "|"])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_table_is_split_at_what_its_header_holds(tmp_path, separator, ending):
    rows = [("filepath", "title"), ("a.jpg", "one and more"), ("b.jpg", "two")]
    text = "".join(f"{separator.join(row)}\n" for row in rows)
    path = table(tmp_path, b"\xef\xbb\xbf" + text.encode(), f"pairs.{ending}")
    assert texts(path) == ["one and more", "two"] and open_source(path)[1].image == photo(0)


def test_a_column_without_a_name_is_ignored(tmp_path):
    assert texts(table(tmp_path, ",image,caption\n0,a.jpg,one\n")) == ["one"]  # as pandas writes its index


def test_bad_rows_of_a_csv_are_bad_alone(tmp_path):
    rows = (
        b"image,caption\na.jpg,good\n1.png,no such file\na.jpg,caf\xe9\na.jpg\n,no path\n\nb.jpg,cut, off\na.jpg,x,, \n"
    )
    source = open_source(table(tmp_path, rows + b"b.jpg,last"))
    assert outcomes(source) == [
        "good",
        "image file cannot be read",
        "caption is not UTF-8",
        "caption is empty",
        "no image",
        "row has more than the 2 fields of its header",
        "x",
        "last",
    ]
    assert "row 6" in fault_of(source, 5).where and "row 2" in fault_of(source, 1).where


@pytest.mark.parametrize(
    ("name", "content_", "words"),
    [
        ("pairs.csv", b"", ""),
        ("pairs.csv", "image,caption\na.jpg,one\n".encode("utf-16"), "UTF-8"),
        ("pairs.csv", "image,caption\na.jpg,one\n".encode("utf-16-le"), "NUL bytes"),
        ("pairs.csv", b"\x00\x01,\x02\n\xff", "NUL bytes"),
        ("pairs.csv", b" , ,\na.jpg,one,\n", ""),
        ("pairs.csv", b"sep=;\nimage;caption\n0.png;red\n", "sep="),
        ("pairs.csv", b"image,caption\n" + b"a.jpg,gr\xfcn\nb.jpg,rot\n" * 15, "is not UTF-8"),
        ("pairs.csv", b"a.jpg,one\nb.jpg,two\n", "looks like data"),
        ("pairs.csv", b"a.jpg,one\nb.jpg,two\n", "image,caption"),
        ("pairs.csv", b"url,caption\nhttps://x.org/a.jpg,one\n", "img2dataset"),
        ("pairs.csv", b"image,caption\nhttp://x.org/a.jpg,one\nHTTPS://x.org/b.jpg,two\n", "img2dataset"),
        ("pairs.jsonl", '{"image": "0.png", "caption": "one"}\n'.encode("utf-16"), "UTF-8"),
        ("pairs.jsonl", b"[1]\n", "one object per line"),
    ],
)
def test_what_is_no_table_of_pairs_is_refused_as_such(tmp_path, name, content_, words):
    message = refusal(table(tmp_path, content_, name))
    assert f"{name}: " in message and words in message


ROWS = 300


def written(path: Path, special: dict[int, str], separator: str, image_first: bool = True) -> Path:
    rows = [
        ("image", "caption"),
        *((f"{number}.jpg", special.get(number, f"plain {number}")) for number in range(ROWS)),
    ]
    path.write_text("".join(separator.join(row if image_first else row[::-1]) + "\n" for row in rows))
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
    for number in range(ROWS):
        (tmp_path / f"{number}.jpg").write_bytes(b"x")
    path = written(tmp_path / file, special, "\t")
    assert texts(path) == [special.get(number, f"plain {number}") for number in range(ROWS)]


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_what_a_csv_writer_quotes_comes_back(tmp_path, separator, quoting):
    expected = ['a "word"', '"all of it"', '"begins', "comma, and ; and |", "plain"]
    if separator == ",":
        expected += [
            "two\nlines, and\r\nthree",
            "tab\tand",
            "one, line of many\n" * 60 + "end",
            "of a.jpg, of b.jpg\nx",
        ]
    path = table(tmp_path, "", "pairs.tsv" if separator == "\t" else "pairs.csv")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=quoting)
        writer.writerows([("image", "caption"), *(("a.jpg", text) for text in expected)])
    assert texts(path) == expected


@pytest.mark.parametrize("separator", [",", "\t"])
def test_a_cell_that_is_a_json_list_is_several_captions(tmp_path, separator):
    path = table(tmp_path, "", "pairs.csv")
    with path.open("w", newline="") as file:
        rows = [("image", "caption"), ("a.jpg", json.dumps(["one, more", "two"])), ("b.jpg", "[brackets] of a text")]
        csv.writer(file, delimiter=separator).writerows(rows)
    assert captions(open_source(path)) == [("one, more", "two"), ("[brackets] of a text",)]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_a_column_of_base64_is_refused_with_what_to_do(tmp_path, kind):
    image = base64.b64encode(image_bytes(0)).decode()
    lines = {
        "csv": f"image,caption\n{image},one\n",
        "tsv": f"image\tcaption\n{image}\tone\n",
        "jsonl": json.dumps({"image": image, "caption": "one"}),
    }
    message = refusal(lambda: training_data("--data.train", str(table(tmp_path, lines[kind], f"pairs.{kind}"))))
    assert "base64" in message and "; " in message and len(message) < 500


# Columns, JSON lines, paths of images


def test_named_columns_win_over_usual_names(tmp_path):
    path = table(tmp_path, "caption\tdeutsch\timage\tphoto\nred\trot\tnone.png\ta.jpg\n")
    assert texts(path, image_column="photo", caption_column="deutsch") == ["rot"]
    assert outcomes(open_source(path)) == ["image file cannot be read"]


@pytest.mark.parametrize("choice", ["", "caption_1,caption_2"])
def test_several_caption_columns_are_several_captions(tmp_path, choice):
    path = table(tmp_path, "image,caption_2,caption_1\na.jpg,two,one\na.jpg,only,\n")
    assert captions(open_source(path, caption_column=choice)) == [("one", "two"), ("only",)]


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
    assert "row 9" in source.where(8) or "line 10" in source.where(8)


def listing(folder: Path, *names: str) -> Path:
    return table(folder, "image,caption\n" + "".join(f"{name},a caption\n" for name in names))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_fault_gives_the_reason_that_an_image_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(1 << 40)  # a hole: no disk is used
    source = open_source(listing(tmp_path, "missing.jpg", ".", "pipe.jpg", "/dev/zero", "huge.jpg", "a.jpg"))
    for id, words in enumerate(("No such file", "", "not a file", "not a file")):
        assert fault_of(source, id).reason == "image file cannot be read" and words in fault_of(source, id).where
    assert outcomes(source)[4:] == ["image file is too large", "a caption"]


def test_running_out_of_open_files_stops_the_run_and_is_not_bad_data(tmp_path):
    resource = pytest.importorskip("resource")
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
    for name, number in (("home/c.jpg", 3), ("a/0.png", 4), ("b\\0.png", 5)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(image_bytes(number))
    source = open_source(listing(tmp_path, "~/c.jpg", "a\\0.png", "b\\0.png"))
    assert [source[id].image for id in range(3)] == [image_bytes(number) for number in (3, 4, 5)]


def test_a_text_file_with_a_header_is_a_table_as_kaggle_writes_it(tmp_path):
    (tmp_path / "Images").mkdir()
    for name in ("1.jpg", "2.jpg"):
        (tmp_path / "Images" / name).write_bytes(image_bytes(0))
    (tmp_path / "captions.txt").write_text("image,caption\n1.jpg,A child .\n1.jpg,A girl .\n2.jpg,A dog\n")
    assert texts(tmp_path / "captions.txt") == ["A child .", "A girl .", "A dog"]
    (tmp_path / "named.txt").write_text("photo;words\n1.jpg;A child .\n")
    assert texts(tmp_path / "named.txt", image_column="photo", caption_column="words") == ["A child ."]
    (tmp_path / "tokens.txt").write_text("1.jpg#0\tA child .\n")
    assert "a table of captions begins with a header" in refusal(tmp_path / "tokens.txt")


# Parquet and saved data sets


def test_bad_rows_of_a_parquet_file_are_bad_alone(tmp_path):
    images, words = [photo(0), None, b"", photo(3), photo(4)], ["good", "x", "empty image", None, " "]
    path = write_parquet(tmp_path / "a.parquet", {"image": images, "caption": words})
    assert outcomes(open_source(path)) == ["good", "no image", "empty image", "caption is missing", "caption is empty"]


def test_row_groups_are_read_on_demand_and_kept_for_the_next_sample(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    source = open_source(write("parquet", tmp_path, samples()))  # groups of four
    read = []
    whole = parquet.ParquetFile.read_row_group
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


def types_of_columns(pyarrow):
    images, words = [image_bytes(0), image_bytes(1), None], ["one", "two", "two"]
    views = hasattr(pyarrow, "binary_view")
    for kind in (pyarrow.large_binary(), *([pyarrow.binary_view()] if views else [])):
        yield pyarrow.array(images, kind), pyarrow.array(words, pyarrow.large_string())
    yield pyarrow.array(images).dictionary_encode(), pyarrow.array(words).dictionary_encode()
    paths = ["000.png", "001.png", None]
    for kind in (pyarrow.large_string(), *([pyarrow.string_view()] if views else [])):
        yield pyarrow.array(paths, kind), pyarrow.array(words, kind)
    yield pyarrow.array(paths).dictionary_encode(), pyarrow.array(words).dictionary_encode()


def test_parquet_columns_of_all_types_that_programs_write_are_read(tmp_path):
    write_images(tmp_path, several([["x"]] * 2))
    for images, words in types_of_columns(pytest.importorskip("pyarrow")):
        source = open_source(write_parquet(tmp_path / "pairs.parquet", {"image": images, "caption": words}))
        assert outcomes(source) == ["one", "two", "no image"], images.type
        assert [source[id].image for id in range(2)] == [image_bytes(0), image_bytes(1)], images.type


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
    (tmp_path / "set" / "test" / "state.json").write_text('{"_data_files": [{"filename": "../train/x.arrow"}]}')
    assert "outside of its folder" in refusal(tmp_path / "set" / "test")
    for text in ("{}", "["):
        (tmp_path / "set" / "test" / "state.json").write_text(text)
        assert "state.json: " in refusal(tmp_path / "set" / "test")


def test_messages_of_parquet_files_say_what_to_do(tmp_path):
    write_parquet(tmp_path / "number.parquet", {"image": [1], "caption": ["x"]})
    write_parquet(tmp_path / "words.parquet", {"url": ["a"], "words": ["x"]})
    whole = Path(write("parquet", tmp_path / "other", samples(3)))
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-20])
    (tmp_path / "other" / "z.parquet").write_bytes((tmp_path / "words.parquet").read_bytes())
    assert "number.parquet" in refusal(tmp_path / "number.parquet")
    assert "url, words" in refusal(tmp_path / "words.parquet")
    assert "again" in refusal(tmp_path / "cut.parquet")
    assert "z.parquet: has no column 'image'" in refusal(tmp_path / "other")


# COCO and Karpathy's splits


def write_coco(folder: Path, *, images: str = "train2017", annotations: str = "annotations") -> Path:
    """Images in a folder, captions in a file of another one, two per image; image 3 has none, and two have no image."""
    write_images(folder / images, [one._replace(name=f"{n}.jpg") for n, one in enumerate(several([["x"]] * 4))])
    (folder / annotations).mkdir(parents=True, exist_ok=True)
    listed = {
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
    assert f"put the images into {tmp_path / 'train2017'}" in refusal(path)
    path.write_text(whole.replace('"caption"', '"bbox"'))
    assert "no captions in its annotations" in refusal(path)
    for text in ('[{"image": "a.jpg", "caption": "x"}]', "{}", '{"images": 1, "annotations": []}'):
        path.write_text(text)
        assert ".jsonl" in refusal(path)
    path.write_text(whole[:-20])
    assert f"{path}: is " in refusal(path)
    path.write_text('{"images": [], "annotations": [{"caption": "x", "image_id": [1]}]}')
    assert "has no images" in refusal(path)


SPLITS = ["test", "train", "restval", "val", "test", "train"]
SPLIT_PAIRS = several([[f'caption {k}, "quoted" of {number}' for k in range(5 + number % 2)] for number in range(6)])


def write_split(path: Path) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps({"images": entries(SPLIT_PAIRS, SPLITS), "dataset": "x"}))
        return path
    numbered = enumerate(zip(SPLIT_PAIRS, SPLITS, strict=True))
    rows = [[json.dumps(one.captions), "[0]", split, one.name, number] for number, (one, split) in numbered]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["raw", "sentids", "split", "filename", "img_id"], *rows])
    return path


@pytest.mark.parametrize("name", ["dataset_flickr30k.json", "flickr_annotations_30k.csv"])
def test_retrieval_reads_the_test_split_of_karpathy_and_training_the_others(tmp_path, name, capsys):
    write_images(tmp_path / "flickr30k-images", SPLIT_PAIRS)
    path = write_split(tmp_path / name)
    # Columns that other tables of a run have do not hold here.
    source = retrieval(path, "--data.caption_column", "words")
    assert content(source) == [(SPLIT_PAIRS[k].image, SPLIT_PAIRS[k].captions) for k in (0, 4)]
    assert source.where(1) == f"{path}: 004.png"
    assert captions(open_source(path)) == [SPLIT_PAIRS[k].captions for k in (1, 2, 5)]
    printed = capsys.readouterr().err
    assert "2 images from" in printed and "only test (2) for retrieval" in printed
    assert "17 captions; of its splits only train (2), restval (1) for training" in printed


@pytest.mark.parametrize("as_named", [True, False])
def test_images_of_coco_lie_in_the_folders_that_karpathys_file_names_or_all_in_one(tmp_path, as_named):
    place = {"train": "train2014"}
    for one, split in zip(SPLIT_PAIRS, SPLITS, strict=True):
        write_images(tmp_path / "images" / (place.get(split, "val2014") if as_named else ""), [one])
    listed = [entry | {"filepath": place.get(entry["split"], "val2014")} for entry in entries(SPLIT_PAIRS, SPLITS)]
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": listed}))
    source = open_source(tmp_path / "dataset_coco.json")
    assert [source[id].image for id in range(3)] == [SPLIT_PAIRS[k].image for k in (1, 2, 5)]


def test_split_files_of_no_use_are_refused_in_one_line(tmp_path):
    path = write_split(tmp_path / "x.csv")
    message = refusal(lambda: retrieval(path))
    assert "x.csv: its first image '000.png' is neither beside it nor in a folder there; put them there" in message
    (tmp_path / "a.zip").write_bytes(b"")
    assert "a.zip there" in refusal(lambda: retrieval(path))
    write_images(tmp_path, SPLIT_PAIRS)
    assert len(retrieval(path)) == 2
    path.write_text(path.read_text().replace("test", "nil"))
    assert "no image of the split test" in refusal(lambda: retrieval(path))
    path.write_text("raw,split,filename\nno list,test,000.png\n")
    assert "x.csv row 1" in refusal(lambda: retrieval(path))


def test_an_image_of_a_split_without_captions_and_a_missing_one_are_bad_samples(tmp_path):
    write_images(tmp_path, SPLIT_PAIRS)
    named = [("000.png", [{"raw": "a"}]), ("001.png", []), ("gone.png", [{"raw": "b"}]), ("", [{"raw": "c"}])]
    listed = [{"filename": name, "sentences": texts, "split": "test"} for name, texts in named]
    (tmp_path / "dataset.json").write_text(json.dumps({"images": listed}))
    source = retrieval(tmp_path / "dataset.json")
    assert outcomes(source) == ["a", "caption is missing", "image file cannot be read", "no image"]


# Folders


def write_files(folder: Path, **files: str | bytes) -> Path:
    """Files by name, in which __ is a dot; images need no content."""
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(0) if path.suffix.lower() in (".jpg", ".png") else text.encode())
    return folder


@pytest.mark.parametrize("ending", ["TXT", "Txt", "txt"])
def test_a_text_file_is_found_whatever_the_case_of_its_suffix(tmp_path, ending):
    source = open_source(write_files(tmp_path, IMG_0__JPG="", **{f"IMG_0__{ending}": "first line\nsecond line\n"}))
    assert captions(travelled(source)) == [("first line\nsecond line",)]  # one caption, whatever its lines


def test_text_goes_before_json_as_img2dataset_writes_both(tmp_path):
    about = '{"caption": ["from json", "and more"], "url": "http://x"}'
    for shard in ("00000", "00001"):
        write_files(tmp_path / shard, a__png="", a__txt="from text", a__json=about, b__png="", b__json=about)
        write_parquet(tmp_path / f"{shard}.parquet", {"url": ["http://x/1"], "caption": ["a"], "key": ["0"]})
        write_files(tmp_path, **{f"{shard}_stats__json": '{"count": 2}'})
    source = open_source(tmp_path)
    assert captions(source) == [("from text",), ("from json", "and more")] * 2 and faults(source) == []
    assert [source.where(id).removeprefix(f"{tmp_path}/") for id in (0, 3)] == ["00000/a.png", "00001/b.png"]


def test_an_image_without_a_caption_keeps_its_id_and_kinds_that_are_not_read_are_listed(tmp_path):
    write_files(tmp_path, a__jpg="", a__txt="one", b__jpg="", c__jpg="", c__txt="three", scan__heic="x")
    (tmp_path / "d.jpg").write_bytes(photo(0))
    (tmp_path / "d.txt").write_bytes(b"caf\xe9")
    source = open_source(tmp_path)
    assert outcomes(source) == ["one", "caption is missing", "three", "caption is not UTF-8"]
    assert ("kind of image is not read", str(tmp_path / "scan.heic"), 1) in faults(source)
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
    for path in ("deep/er/a.jpg", "b.jpg", "c.jpg"):
        write_files(tmp_path, **{path.replace(".", "__"): ""})
    (tmp_path / file).write_text(text.format(*names))
    source = open_source(tmp_path)
    assert [source.where(id).removeprefix(f"{tmp_path}/") for id in range(3)] == ["b.jpg", "c.jpg", "deep/er/a.jpg"]
    assert outcomes(source) == ["three", "caption is missing", "one"] and source[2].captions == ("one", "two")
    assert [reason for reason, _, _ in faults(source)] == ["no image"]


@pytest.mark.parametrize("text", ["a.jpg#0\tone\na.jpg#1\ttwo\n", "a.jpg one\n"])
def test_a_captions_file_without_a_header_is_refused_and_a_header_asked_for(tmp_path, text):
    write_files(tmp_path, a__jpg="", captions__txt=text)
    message = refusal(tmp_path)
    assert ("captions.txt" in message and "header" in message) or "first line must name the columns" in message


@pytest.mark.parametrize("name", ["a__jpg__txt", "a__caption"])
def test_texts_of_other_endings_are_no_captions_and_the_usual_one_is_named(tmp_path, name):
    write_files(tmp_path, a__jpg="", **{name: "a caption"})
    assert "no captions" in refusal(tmp_path) and "a.txt beside a.jpg" in refusal(tmp_path)


def test_rows_that_fit_no_image_of_the_folder_are_listed_and_a_shared_name_is_not_guessed(tmp_path):
    write_files(tmp_path, **{"a/x__jpg": "", "b/x__jpg": "", "c__jpg": ""})
    (tmp_path / "captions.csv").write_text("image,caption\nx.jpg,which?\na/x.jpg,this\nc.jpg,cut, off\n")
    source = open_source(tmp_path)
    assert outcomes(source) == ["this", "caption is missing", "caption is missing"]
    assert [(reason, where.rpartition(": ")[2]) for reason, where, _ in faults(source)] == [
        ("no image", "x.jpg"),
        ("row has more than the 2 fields of its header", "c.jpg"),
    ]


def test_links_to_folders_are_followed_and_circles_end(tmp_path):
    folder, elsewhere = tmp_path / "photos", tmp_path / "elsewhere"
    for path in (folder / "b" / "1", folder / "z", elsewhere / "2", elsewhere / "deep" / "3", tmp_path / "outside"):
        write_files(path.parent, **{f"{path.name}__jpg": "", f"{path.name}__txt": path.name})
    (folder / "a").symlink_to(elsewhere)
    (folder / "c").symlink_to("b")  # beside it: read once, under its own path
    (folder / "b" / "again").symlink_to(folder)  # circles: to a folder above, there and back, out of it all
    (elsewhere / "deep" / "back").symlink_to(folder)
    (folder / ".hidden").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    for place in (folder, tmp_path / "link"):
        source = open_source(place)
        paths = [source.where(id).removeprefix(f"{place}/") for id in range(len(source))]
        assert paths == ["a/2.jpg", "a/deep/3.jpg", "b/1.jpg", "z.jpg"] and texts(place) == ["2", "3", "1", "z"]
