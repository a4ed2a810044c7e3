"""Image-text pairs listed in a CSV or TSV file: a header, then one row per pair."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from neuclip.data.decoding import IMAGE_SUFFIXES
from neuclip.data.sample import shorten
from neuclip.data.tables.columns import (
    ColumnChoice,
    Columns,
    choose_columns,
    first_line,
    images_are_urls,
    is_url,
    print_once,
    refuse_no_text,
    refuse_unreadable,
)
from neuclip.data.tables.listed import Row, Rows
from neuclip.errors import UserError

LARGEST_FIELD = 1 << 24
LONGEST_ROW = 1000  # lines; captions have paragraphs, not chapters
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
SEPARATOR_LINE = re.compile(r"sep=.", re.IGNORECASE)
ENCODING_BYTES = 1 << 20  # looked at to tell the encoding
FEW_LINES, OTHER_ENCODING = 10, 0.1  # of so many lines on, this share that is not UTF-8 means another encoding
NEW_LINE = re.compile(r"\r\n|\r|\n")


class MisreadQuote(Exception):
    """The quotes of a table do not mean what they were taken for: `MisreadQuote(line, reason)`."""

    def __init__(self, line: int, reason: str):
        super().__init__(line, reason)
        self.line = line  # where the row begins
        self.reason = reason


def read_csv(path: Path, choice: ColumnChoice) -> Rows:
    """The separator is found in the header.

    Tables of tabs are often written without any quoting, so that a quote is a letter there (CC3M's), and often by
    programs that quote (pandas): their quotes count if the header or every field with a quote in front is quoted.
    """
    csv.field_size_limit(LARGEST_FIELD)
    try:
        with refuse_unreadable(path):
            header = _header(path)
            separator = _separator(path, header)
            if separator != "\t" or '"' in header:
                return _read(path, choice, separator)
            try:
                return _read(path, choice, separator, strict=True)
            except MisreadQuote as misread:
                print_once(
                    f"{path}: line {misread.line}: a field begins with a quote that is not closed; quotes are letters"
                )
                return _read(path, choice, separator, quoting=csv.QUOTE_NONE)
    except MisreadQuote as misread:
        raise UserError(
            f"{path}: line {misread.line}: {misread.reason}; close the quote, or if it is a letter of the caption "
            'write it twice and quote the field: """Hello"'
        ) from misread


def _header(path: Path) -> str:
    """The first line as it is; refuses files without one."""
    first = first_line(path)
    if not first:
        raise UserError(f"{path}: is empty; write a header such as image,caption and one row per pair")
    refuse_no_text(path, first)
    header = NEW_LINE.split(first.decode(errors="surrogateescape"))[0]
    if match := SEPARATOR_LINE.match(header):
        raise UserError(f"{path}: begins with the line {match[0]!r}, for spreadsheets alone; delete it")
    _refuse_other_encoding(path)
    if not header.strip(" \"'" + "".join(SEPARATORS)):
        raise UserError(f"{path}: its first line names no column; begin with a header such as image,caption")
    return header


def _refuse_other_encoding(path: Path) -> None:
    """Single rows may be damaged; of a file in another encoding every caption with an accent would be missing."""
    with path.open("rb") as file:
        lines = file.readlines(ENCODING_BYTES)
    wrong = [number for number, line in enumerate(lines, start=1) if not _is_utf_8(line)]
    if len(lines) >= FEW_LINES and len(wrong) > OTHER_ENCODING * len(lines):
        raise UserError(
            f"{path}: is not UTF-8 (line {wrong[0]} and {len(wrong) - 1} others of the first {len(lines)}); save it as "
            f"'CSV UTF-8', or: iconv -f cp1252 -t utf-8 {path}"
        )


def _is_utf_8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _separator(path: Path, header: str) -> str:
    """A tab for .tsv with one in its header; else what cuts the header into most fields (open_clip's default for .csv
    is a tab)."""
    counts = {separator: header.count(separator) for separator in SEPARATORS}
    if path.suffix.lower() == ".tsv" and (counts["\t"] or not any(counts.values())):
        return "\t"
    return max(SEPARATORS, key=counts.__getitem__)


def _read(
    path: Path, choice: ColumnChoice, separator: str, strict: bool = False, quoting: int = csv.QUOTE_MINIMAL
) -> Rows:
    # surrogateescape keeps bytes that are not UTF-8, so that only their own row is bad.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        table = Table(file, separator, strict, quoting)
        names = [name.strip() for name in next(table, [])]
        columns = _columns(path, names, choice, separator)
        table.columns, table.image = len(names), names.index(columns.image)
        captions = [names.index(column) for column in columns.captions]
        too_long = f"row has more than the {len(names)} fields of its header"
        return Rows(_row(fields, table, captions, too_long) for fields in table if fields)  # [] is a blank line


def _row(fields: list[str], table: Table, captions: list[int], too_long: str) -> Row:
    image = _field(fields, table.image)
    if any(field.strip() for field in fields[table.columns :]):
        return Row(image, (), too_long)  # a caption with a separator and no quotes would be cut there
    return Row(image, tuple(_field(fields, caption) for caption in captions))


def _field(fields: list[str], number: int) -> bytes:
    """A row too short for a column is empty there."""
    return fields[number].strip().encode(errors="surrogateescape") if number < len(fields) else b""


def _columns(path: Path, names: list[str], choice: ColumnChoice, separator: str) -> Columns:
    try:
        return choose_columns(path, names, choice, f"split at {SEPARATORS[separator]}")
    except UserError:
        if any(is_url(name) for name in names):
            raise UserError(images_are_urls(path)) from None
        if data := next((name for name in names if name.lower().endswith(IMAGE_SUFFIXES)), ""):
            header = separator.join(("image", "caption")).replace("\t", "<tab>")
            raise UserError(
                f"{path}: its first line is taken as the header and looks like data ({shorten(data)!r}); "
                f"put a header above it, such as {header}"
            ) from None
        raise


class Table:
    """The rows of an open file. Raises MisreadQuote where a quote that is not closed has swallowed other rows."""

    def __init__(self, file: TextIO, separator: str, strict: bool, quoting: int):
        self.separator = separator
        self.columns, self.image = 0, 0  # 0 columns: the header is still to come
        self.lines: list[str] = []  # of the row that is being read
        self.ended = False
        self.reader = csv.reader(self._lines(file), delimiter=separator, strict=strict, quoting=quoting)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        line = self.reader.line_num + 1
        self.lines.clear()
        try:
            row = next(self.reader)
            if len(self.lines) > 1:
                self._check(row, line)
        except csv.Error as error:
            raise MisreadQuote(line, f"is not a readable row ({error})") from error
        if self.ended:  # the reader asks for more lines within a row only while a quote is open
            raise MisreadQuote(line, "a quote opens a field and is not closed before the file ends")
        return row

    def _lines(self, file: TextIO) -> Iterator[str]:
        for line in file:
            self.lines.append(line)
            yield line
        self.ended = True

    def _check(self, row: list[str], line: int) -> None:
        """A quote that is not closed ends at the next one, which is somewhere in another row, seldom before a separator
        or the end of a line; if it is, the lines between give it away."""
        if not self.ended:
            list(csv.reader(self.lines, delimiter=self.separator, strict=True))
        if len(self.lines) > LONGEST_ROW or self._holds_rows(row):
            below = f"{len(self.lines) - 1:,} lines below" if len(self.lines) > 2 else "on the next"
            raise MisreadQuote(line, f"a quote opens a field and is not closed on this line but {below}")

    def _holds_rows(self, row: list[str]) -> bool:
        """Whether the lines of a field are rows: have all columns, and an image's name in its place."""
        for number, field in enumerate(row):
            first, *others = NEW_LINE.split(field)
            lines = [line.split(self.separator) for line in others if line]
            if self.image > number and others:  # the field stops before the last line's image, not before the first's
                lines = [row[:number] + first.split(self.separator), *lines[:-1]]
            if lines and all(map(self._is_row, lines)):
                return True
        return False

    def _is_row(self, fields: list[str]) -> bool:
        return len(fields) >= self.columns > 1 and fields[self.image].strip().lower().endswith(IMAGE_SUFFIXES)
