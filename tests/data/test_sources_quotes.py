"""Quotes in tables: a field that is quoted may hold anything, a quote that nobody closes may not swallow rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from neuclip.data.open import open_source
from neuclip.errors import UserError

ROWS = 1000


def written(path: Path, fields: list[tuple[str, ...]], separator: str = ",") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(separator.join(row) + "\n" for row in fields))
    return path


def with_captions(special: dict[int, str]) -> list[tuple[str, ...]]:
    rows = [(f"{number}.jpg", special.get(number, f"plain {number}")) for number in range(ROWS)]
    return [("image", "caption"), *rows]


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_source(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def test_images_without_an_ending_are_no_way_around_it(tmp_path):
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
