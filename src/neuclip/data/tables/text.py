"""Pairs listed in text files: CSV and TSV with a header, JSON lines with one object per line."""

from __future__ import annotations

import ast
import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip.data.decoding import IMAGE_SUFFIXES
from neuclip.data.source import json_object, shorten, texts_in
from neuclip.data.tables.listed import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    ColumnChoice,
    Columns,
    Row,
    Rows,
    choose_columns,
    images_are_urls,
    is_url,
)
from neuclip.errors import UserError
from neuclip.files import open_regular, read_regular, reading

SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
LARGEST_FIELD = 1 << 24
LONGEST_ROW = 1000  # lines; captions have paragraphs, not chapters
FIRST_LINE_BYTES = 1 << 16
FEW_LINES, OTHER_ENCODING = 10, 0.1  # from this many lines on, a larger share of lines not in UTF-8 is another encoding
REMEDY = "save it as text in UTF-8"


@dataclass(frozen=True)
class ParseCsv:
    """Parses the bytes of a row to a Row."""

    separator: str
    columns: int
    image: int
    captions: tuple[int, ...]

    def reader(self, lines: Any) -> Any:
        # Tables of tabs are often written without quoting: a quote at the start of a caption is then just a letter.
        quoting = csv.QUOTE_NONE if self.separator == "\t" else csv.QUOTE_MINIMAL
        return csv.reader(lines, delimiter=self.separator, quoting=quoting)  # type: ignore[arg-type]

    def __call__(self, raw: bytes) -> Row:
        reader = self.reader(io.StringIO(raw.decode(errors="surrogateescape"), newline=""))
        return self.row(next(fields for fields in reader if fields))  # skips [], a blank line before the row

    def row(self, fields: list[str]) -> Row:
        image = self._field(fields, self.image)
        if any(field.strip() for field in fields[self.columns :]):  # a caption with a separator and no quotes
            return Row(image, (), f"row has more than the {self.columns} fields of its header")
        captions = [text for number in self.captions for text in _listed(self._field(fields, number))]
        return Row(image, tuple(text.encode(errors="surrogateescape") for text in captions))

    def _field(self, fields: list[str], number: int) -> str:
        """The text of a field; "" if the row is too short. In tables of tabs, quotes around the field are removed."""
        text = fields[number].strip() if number < len(fields) else ""
        if self.separator == "\t" and len(text) > 1 and text[0] == text[-1] == '"':
            inner = text[1:-1]
            return text if '"' in inner.replace('""', "") else inner.replace('""', '"')
        return text


def _listed(text: str) -> list[str]:
    """The captions in a cell: several if it is a JSON list of texts, else the cell itself."""
    if text.startswith("[") and text.endswith("]"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return [text]
        if values and all(isinstance(value, str) for value in values):
            return list(texts_in(values))
    return [text]


def read_csv(path: Path, choice: ColumnChoice) -> Rows:
    """Read a CSV or TSV file. The separator is detected in the header."""
    csv.field_size_limit(LARGEST_FIELD)
    with reading(path, REMEDY):
        content = read_regular(path)
    start = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    header = _header(path, content[start : start + FIRST_LINE_BYTES])
    _refuse_other_encoding(path, content)
    separator = max(SEPARATORS, key=header.count)
    if path.suffix.lower() == ".tsv" and ("\t" in header or not header.count(separator)):
        separator = "\t"
    stream = io.BytesIO(content)
    stream.seek(start)
    lines = (line.decode(errors="surrogateescape") for line in iter(stream.readline, b""))
    reader = ParseCsv(separator, 0, 0, ()).reader(lines)
    try:
        names = [name.strip().strip('"') for name in next(reader, [])]
    except csv.Error as error:
        raise UserError(f"{path}: line 1 is not a readable header ({error}); {REMEDY}") from error
    columns = _columns(path, names, choice, separator)
    captions = tuple(names.index(column) for column in columns.captions)
    parse = ParseCsv(separator, len(names), names.index(columns.image), captions)
    return Rows.of(content, stream.tell(), _csv_rows(path, stream, reader, parse), parse)


def _header(path: Path, first: bytes) -> str:
    """The first line. Raises UserError if it cannot be a header."""
    if not first:
        raise UserError(f"{path}: is empty; write a header such as image,caption and one row per pair")
    refuse_no_text(path, first)
    header = re.split(r"\r\n|\r|\n", first.decode(errors="surrogateescape"), maxsplit=1)[0]
    if re.fullmatch("sep=.", header, re.IGNORECASE):
        raise UserError(f"{path}: begins with the line {header!r}, which is only for spreadsheets; delete it")
    if not header.strip(" \"'" + "".join(SEPARATORS)):
        raise UserError(f"{path}: its first line names no column; begin with a header such as image,caption")
    return header


def refuse_no_text(path: Path, content: bytes) -> None:
    """Raise UserError if a file is not text in UTF-8. NUL bytes are searched in the first line only: further down, they
    spoil only their own row."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}: is UTF-16; save it as UTF-8")
    if b"\0" in content.partition(b"\n")[0]:
        raise UserError(f"{path}: its first line has NUL bytes, so it is not a text file; {REMEDY}")


def _refuse_other_encoding(path: Path, content: bytes) -> None:
    """Raise UserError if too many lines are not UTF-8. A few damaged rows are accepted, but in a file with another
    encoding every caption with an accent would be lost."""
    lines = content[: 1 << 20].split(b"\n")[:-1]
    wrong = [number for number, line in enumerate(lines, start=1) if "\ufffd" in line.decode(errors="replace")]
    if len(lines) >= FEW_LINES and len(wrong) > OTHER_ENCODING * len(lines):
        raise UserError(
            f"{path}: is not UTF-8 (line {wrong[0]} and {len(wrong) - 1} others of the first {len(lines)}); save it as "
            f"'CSV UTF-8', or: iconv -f cp1252 -t utf-8 {path}"
        )


def _columns(path: Path, names: list[str], choice: ColumnChoice, separator: str) -> Columns:
    try:
        return choose_columns(path, names, choice, f"split at {SEPARATORS[separator]}, ")
    except UserError:
        if any(map(is_url, names)):
            raise UserError(images_are_urls(path)) from None
        if data := next((name for name in names if any(ending in name.lower() for ending in IMAGE_SUFFIXES)), ""):
            header = separator.join(("image", "caption")).replace("\t", "<tab>")
            raise UserError(
                f"{path}: the first line must be a header that names the columns, such as {header}; it looks like data "
                f"({shorten(data)!r}); put such a line above it"
            ) from None
        raise


def _csv_rows(path: Path, stream: io.BytesIO, reader: Any, parse: ParseCsv) -> Iterator[tuple[int, Row]]:
    """The end of each row, and the row. Raises UserError if a quote that is not closed has swallowed other rows."""
    line = reader.line_num
    try:
        for fields in reader:
            lines = reader.line_num - line
            if lines > 1 and (lines > LONGEST_ROW or _holds_rows(fields, parse)):
                raise csv.Error("a quote opens a field and is not closed on this line")
            if fields:
                yield stream.tell(), parse.row(fields)
            line = reader.line_num
    except csv.Error as error:
        raise UserError(
            f"{path}: line {line + 1}: {error}; close the quote, or if it belongs to the caption, double it "
            'and quote the field: """Hello"'
        ) from error


def _holds_rows(fields: list[str], parse: ParseCsv) -> bool:
    """Whether a line inside a field is a row, with the name of an image where rows have it."""
    for number, field in enumerate(fields):
        first, *others = re.split(r"\r\n|\r|\n", field)
        lines = [line.split(parse.separator) for line in others if line]
        if (
            parse.image > number and others
        ):  # this field comes before the image: its last line has no image, its first line may
            lines = [fields[:number] + first.split(parse.separator), *lines[:-1]]
        if any(_is_row(line, parse) for line in lines):
            return True
    return False


def _is_row(fields: list[str], parse: ParseCsv) -> bool:
    return len(fields) >= parse.columns > 1 and fields[parse.image].strip().lower().endswith(IMAGE_SUFFIXES)


def has_header(path: Path, choice: ColumnChoice) -> bool:
    """Whether the first line of a text file names a column of images and a column of captions."""
    first = first_line(path).decode(errors="surrogateescape").strip().lower()
    fields = [{field.strip().strip('"') for field in first.split(separator)} for separator in SEPARATORS]
    images = {choice.image.lower(), *IMAGE_COLUMNS} - {""}
    captions = {choice.caption.lower(), *choice.caption.lower().split(","), *CAPTION_COLUMNS} - {""}
    return any(names & images and names & captions for names in fields)


def first_line(path: Path) -> bytes:
    """The first line of a file, without a byte order mark."""
    with reading(path, REMEDY), open_regular(path) as file:
        return file.readline(FIRST_LINE_BYTES).removeprefix(codecs.BOM_UTF8)


def read_small_table(path: Path, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The location of each row, and its fields by column name in lower case, of a CSV, TSV or JSON lines file."""
    with reading(path, remedy):
        text = read_regular(path).decode("utf-8-sig")
    if path.suffix.lower() == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{path} line {number}", json_object(line.encode()) or {}
        return
    csv.field_size_limit(LARGEST_FIELD)
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        names = [name.strip().lower() for name in next(reader, [])]
        for number, fields in enumerate(reader, 1):
            if fields:
                yield f"{path} row {number}", dict(zip(names, fields, strict=False))
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num} cannot be read ({error}); {remedy}") from error


def list_in(text: str) -> list[Any] | None:
    """The list in a field, written as in JSON or in Python; None if it is not a list."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, list | tuple):
            return list(value)
    return None


@dataclass(frozen=True)
class ParseJson:
    """Parses a line of JSON to a Row."""

    columns: Columns

    def __call__(self, raw: bytes) -> Row:
        values = json_object(raw)
        if values is None:
            return Row("", (), "line is not a JSON object")
        image = values.get(self.columns.image)
        image = image.get("path") if isinstance(image, dict) else image  # a dict is how Hugging Face writes images
        captions = tuple(text for name in self.columns.captions for text in texts_in(values.get(name)))
        return Row(image.strip() if isinstance(image, str) else "", captions)


def read_jsonl(path: Path, choice: ColumnChoice) -> Rows:
    """Read a file of JSON lines. The keys are chosen from the first line; a list of texts is several captions."""
    with reading(path, REMEDY):
        content = read_regular(path)
    start = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    first = content[start:].lstrip().partition(b"\n")[0]
    refuse_no_text(path, first)
    keys = json_object(first or b"{}")
    if keys is None:
        raise UserError(f"{path}: line 1 is not a JSON object; give one object per line")
    parse = ParseJson(choose_columns(path, [*keys], choice) if keys else Columns("", ()))
    stream = io.BytesIO(content)
    stream.seek(start)
    lines = iter(stream.readline, b"") if keys else iter(())
    return Rows.of(content, start, ((stream.tell(), parse(line)) for line in lines if line.strip()), parse)
