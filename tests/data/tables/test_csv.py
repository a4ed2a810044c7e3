"""Tables of CSV and TSV: separators, headers, encodings, and quotes that nobody closes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from neuclip.data.open import open_source
from neuclip.errors import UserError
from tests.builders.images import photo
from tests.data.small_shards import image_bytes
from tests.data.small_tables import fault_of, outcomes, refusal, table

ROWS = 1000


def test_a_csv_with_tabs_and_open_clips_columns_is_read(tmp_path):
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    (tmp_path / "pairs.csv").write_text("filepath\ttitle\n0.png\ta title, with a comma\n", encoding="utf-8-sig")
    assert open_source(str(tmp_path / "pairs.csv"))[0].captions == ("a title, with a comma",)


@pytest.mark.parametrize("separator", ["\t", ";", ","])
def test_a_tsv_is_split_at_what_its_header_holds(tmp_path, separator):
    rows = [("filepath", "title"), ("a.jpg", "one"), ("b.jpg", "two")]
    path = table(tmp_path, "".join(f"{separator.join(row)}\n" for row in rows), "pairs.tsv")
    assert open_source(str(path)).captions() == ["one", "two"]


def test_a_column_without_a_name_is_ignored(tmp_path):
    source = open_source(str(table(tmp_path, ",image,caption\n0,a.jpg,one\n")))  # as pandas writes its index
    assert source[0].captions == ("one",) and source[0].image == photo(0)


def test_bad_rows_of_a_csv_are_bad_alone(tmp_path):
    (tmp_path / "0.png").write_bytes(image_bytes(0))
    rows = [
        b"image,caption",
        b"0.png,good",
        b"1.png,no such file",
        b"0.png,caf\xe9",
        b"0.png",
        b",no path",
        b"",
        b"0.png,last",
    ]
    (tmp_path / "pairs.csv").write_bytes(b"\n".join(rows))
    source = open_source(str(tmp_path / "pairs.csv"))
    assert outcomes(source) == [
        "good", "image file cannot be read", "caption is not UTF-8", "caption is empty", "no image", "last",
    ]  # fmt: skip
    assert source.captions()[2] == ""


def test_a_row_longer_than_its_header_is_bad_and_not_cut(tmp_path):
    source = open_source(str(table(tmp_path, "image,caption\na.jpg,cut, off\nb.jpg,whole,, \na.jpg,short\n")))
    fault = fault_of(source, 0)
    assert fault.reason == "row has more than the 2 fields of its header" and "row 1" in fault.where
    assert source.captions() == ["", "whole", "short"]
    assert source[1].captions == ("whole",) and source[2].captions == ("short",)


def test_a_table_in_another_encoding_is_refused_and_one_with_a_bad_row_is_read(tmp_path):
    rows = [f"{number}.png,{'grün' if number % 3 else 'rot'}" for number in range(30)]
    (tmp_path / "all.csv").write_bytes("\n".join(["image,caption", *rows]).encode("cp1252"))
    with pytest.raises(UserError, match=r"all\.csv: is not UTF-8 \(line 3 and 19 others .*CSV UTF-8"):
        open_source(str(tmp_path / "all.csv"))
    (tmp_path / "one.csv").write_bytes("\n".join(["image,caption", *rows]).encode().replace("ü".encode(), b"\xfc", 1))
    assert len(open_source(str(tmp_path / "one.csv"))) == 30
    (tmp_path / "sep.csv").write_text("sep=;\nimage;caption\n0.png;red\n")
    with pytest.raises(UserError, match="'sep=;'"):
        open_source(str(tmp_path / "sep.csv"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pairs.csv", b"", "is empty; "),
        ("pairs.csv", "image,caption\na.jpg,one\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("pairs.csv", "image,caption\na.jpg,one\n".encode("utf-16-le"), "holds NUL bytes"),
        ("pairs.csv", b"\x00\x01,\x02\n\xff", "holds NUL bytes"),
        ("pairs.csv", b" , ,\na.jpg,one,\n", "names no column"),
        ("pairs.jsonl", '{"image": "0.png", "caption": "one"}\n'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("pairs.jsonl", '{"image": "0.png", "caption": "one"}\n'.encode("utf-16-le"), "holds NUL bytes"),
    ],
)
def test_what_is_no_text_is_no_table(tmp_path, name, content, message):
    assert f"{name}: " in refusal(table(tmp_path, content, name)) and message in refusal(tmp_path / name)


def test_a_table_without_a_header_is_refused_as_such(tmp_path):
    message = refusal(table(tmp_path, "a.jpg,one\nb.jpg,two\n"))
    assert "first line is taken as the header and looks like data ('a.jpg')" in message and "image,caption" in message


def written(path: Path, fields: list[tuple[str, ...]], separator: str = ",") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(separator.join(row) + "\n" for row in fields))
    return path


def with_captions(special: dict[int, str]) -> list[tuple[str, ...]]:
    rows = [(f"{number}.jpg", special.get(number, f"plain {number}")) for number in range(ROWS)]
    return [("image", "caption"), *rows]


@pytest.mark.parametrize(
    "special",
    [
        {3: '"never closed'},
        {3: '"never closed', 700: 'closed by chance 5"'},
        {3: '"never closed', 4: '"in the next row"'},
        {3: '"never closed', 700: 'a "word" within'},
    ],
)
@pytest.mark.parametrize("image_first", [True, False])
def test_a_quote_that_is_not_closed_stops_a_csv_at_its_line(tmp_path, special, image_first):
    rows = [row if image_first else row[::-1] for row in with_captions(special)]
    message = refusal(written(tmp_path / "pairs.csv", rows))
    assert "pairs.csv: line 5:" in message and "quote" in message and "; " in message


def test_a_quote_that_is_not_closed_in_the_last_row_or_the_header_stops_a_csv(tmp_path):
    assert "line 1001:" in refusal(written(tmp_path / "last.csv", with_captions({ROWS - 1: '"cut off'})))
    assert "line 1:" in refusal(written(tmp_path / "header.csv", [("image", '"caption'), ("a.jpg", "x")]))


def test_an_open_quote_is_found_where_image_names_have_no_ending(tmp_path):
    rows = [(row[0].removesuffix(".jpg"), row[1]) for row in with_captions({3: '"never closed', 2: "plain"})]
    more = [(f"{number}", "plain") for number in range(200)]
    assert "line 5:" in refusal(written(tmp_path / "pairs.csv", [*rows, *more, ("last", '5"')]))


@pytest.mark.parametrize(
    "special",
    [
        {3: '"never closed'},
        {3: '"never closed', 700: 'closed by chance 5"'},
        {3: '"Quoted" said nobody'},
        {3: 'a 5" nail', 9: 'the "word" within'},
    ],
)
@pytest.mark.parametrize("file", ["pairs.tsv", "pairs.csv"])
def test_quotes_of_a_table_of_tabs_that_quotes_nothing_are_letters(tmp_path, special, file):
    rows = with_captions(special)
    assert open_source(str(written(tmp_path / file, rows, "\t"))).captions() == [row[1] for row in rows[1:]]


def test_a_table_of_tabs_with_an_open_quote_serves_a_folder(tmp_path):
    rows = with_captions({3: '"never closed'})
    written(tmp_path / "captions.tsv", rows, "\t")
    for name, _ in rows[1:]:
        (tmp_path / name).write_bytes(b"")
    source = open_source(str(tmp_path))
    assert len(source) == ROWS and source.faults == () and "" not in source.captions()


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_what_a_csv_writer_quotes_comes_back(tmp_path, separator, quoting):
    captions = [
        'a "word"',
        '"all of it"',
        '"begins',
        "two\nlines, and\r\nthree",
        "tab\tand comma, and ; and |",
        "one, line of many\n" * 60 + "end",
        "a photo\nof a.jpg, of b.jpg\nand of others",
    ]
    with (tmp_path / "pairs.tsv" if separator == "\t" else tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=quoting)
        writer.writerows([("image", "caption"), *((f"{number}.jpg", text) for number, text in enumerate(captions))])
    assert open_source(file.name).captions() == captions


def test_a_table_of_tabs_whose_header_is_quoted_is_quoted_throughout(tmp_path):
    path = written(tmp_path / "pairs.tsv", [('"image"', '"caption"'), ('"a.jpg"', '"x'), ('"b.jpg"', '"y"')], "\t")
    assert "line 2:" in refusal(path)
