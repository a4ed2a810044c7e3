"""Image-text pairs listed in a CSV or TSV file: one row per pair, pictures in files of their own."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator
from pathlib import Path

from neuclip.data.index import Texts
from neuclip.data.sample import BadSample, Fault, Sample
from neuclip.errors import AskedWrongly

IMAGE_COLUMNS = ("image", "image_path", "filepath", "file_path", "filename", "file_name", "path", "file", "img")
CAPTION_COLUMNS = ("caption", "title", "text", "description", "sentence", "alt_text", "captions")
LARGEST_FIELD = 1 << 24


class CsvSource:
    """Pairs of a CSV or TSV file; ids are row numbers from 0. Relative picture paths start at the file's own folder."""

    def __init__(self, name: str, path: Path, image_column: str = "", caption_column: str = ""):
        self.name = name
        self.path = path
        self.faults: tuple[Fault, ...] = ()
        csv.field_size_limit(LARGEST_FIELD)
        try:
            # surrogateescape keeps bytes that are not UTF-8, so that only their own row is bad.
            with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                rows = csv.reader(file, delimiter=separator_of(path))
                header = next(rows, [])
                image = column_number(path, header, image_column, IMAGE_COLUMNS, "image")
                caption = column_number(path, header, caption_column, CAPTION_COLUMNS, "caption")
                self._images, self._captions = _two_columns(rows, image, caption)
        except OSError as error:
            raise AskedWrongly(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
        except csv.Error as error:
            raise AskedWrongly(f"{path}: is not a readable table ({error}); check its quotes") from error
        self.folder = self._picture_folder()

    def __len__(self) -> int:
        return len(self._captions)

    def __getitem__(self, id: int) -> Sample:
        if not 0 <= id < len(self):
            raise IndexError(f"sample {id} of {len(self)}")
        try:
            caption = self._captions[id].decode().strip()
        except UnicodeDecodeError:
            raise BadSample("caption is not UTF-8", self.where(id)) from None
        if not caption:
            raise BadSample("caption is empty", self.where(id))
        name = self._images[id]
        if not name:
            raise BadSample("no picture", self.where(id))
        picture = self.folder / name.decode(errors="surrogateescape")
        try:
            return Sample(picture.read_bytes(), (caption,))
        except (OSError, ValueError):  # ValueError: a NUL byte in the path
            raise BadSample("picture file cannot be read", f"{self.where(id)}: {picture}") from None

    def where(self, id: int) -> str:
        """File and row, the first row after the header being row 1."""
        return f"{self.path} row {id + 1}"

    def captions(self) -> list[str]:
        """The caption of every id; "" where there is none."""
        return self._captions.strings()

    def _picture_folder(self) -> Path:
        """The table's own folder; the working folder where only that one leads to the first picture."""
        first = self._images[0].decode(errors="surrogateescape").replace("\0", "") if len(self) else ""
        beside = self.path.parent
        return Path() if first and not (beside / first).exists() and Path(first).exists() else beside


def _two_columns(rows: Iterator[list[str]], image: int, caption: int) -> tuple[Texts, Texts]:
    """Both columns without one Python string per row; a row too short for a column is empty there."""
    images, captions = [], []
    for row in rows:
        if row:  # the reader gives an empty list for a blank line
            images.append(_field(row, image))
            captions.append(_field(row, caption))
    return Texts.of(images), Texts.of(captions)


def _field(row: list[str], number: int) -> bytes:
    return row[number].strip().encode(errors="surrogateescape") if number < len(row) else b""


def separator_of(path: Path) -> str:
    """A tab for .tsv; for .csv what cuts the first line into most fields (open_clip's default there is a tab)."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        first = file.readline(1 << 16)
    return max(",\t;|", key=first.count)


def column_number(path: Path, header: list[str], asked: str, known: tuple[str, ...], what: str) -> int:
    """Where the column is: the one asked for, or the first with a usual name."""
    names = [name.strip() for name in header]
    if asked:
        if asked in names:
            return names.index(asked)
        near = difflib.get_close_matches(asked, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"give one of these with --data.{what}_column"
        raise AskedWrongly(f"{path}: has no column {asked!r}; its columns are {', '.join(names) or 'none'}; {hint}")
    lower = [name.lower() for name in names]
    for candidate in known:
        if candidate in lower:
            return lower.index(candidate)
    raise AskedWrongly(
        f"{path}: no column looks like the {what}; its columns are {', '.join(names) or 'none'}; "
        f"name it with --data.{what}_column"
    )
