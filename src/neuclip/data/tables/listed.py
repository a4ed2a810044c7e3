"""Pairs that a table lists: images in files of their own, captions in memory."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuclip.data.captions import usable_captions
from neuclip.data.sample import BadSample, Fault, Sample, shortened
from neuclip.data.source import Source
from neuclip.data.tables.columns import images_are_urls, is_url, say
from neuclip.data.tables.inline import inline_image, is_inline
from neuclip.data.texts import PIECE, Captions, Texts
from neuclip.errors import RunFailed, UserError

FIRST_PICTURES = 20  # looked for when a table is opened
LARGEST_PICTURE = 256 << 20  # bytes as encoded
# What the machine lacks, whatever lies in the file: such samples must not be dropped as bad.
OF_THE_MACHINE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EIO})


class Row(NamedTuple):
    """One pair as a table gives it. What is not UTF-8 stays as it is, so that only its own row is bad."""

    image: bytes  # path, or base64
    captions: tuple[bytes, ...]
    reason: str = ""  # why the row cannot be used at all


class Rows:
    """Many rows in a few arrays; millions of Python objects would not fit into memory."""

    def __init__(self, rows: Iterable[Row]):
        images, captions = bytearray(), bytearray()
        image_ends, caption_ends, row_ends = array("q"), array("q"), array("q")
        self.reasons: dict[int, str] = {}
        for number, row in enumerate(rows):
            images += row.image
            image_ends.append(len(images))
            for caption in row.captions:
                captions += caption
                caption_ends.append(len(captions))
            row_ends.append(len(caption_ends))
            if row.reason:
                self.reasons[number] = row.reason
        self.images = Texts.joined(images, image_ends)
        self._captions = Texts.joined(captions, caption_ends)
        self._ends = np.frombuffer(row_ends, dtype=np.int64)  # of each row's captions

    def __len__(self) -> int:
        return len(self.images)

    def captions(self, number: int) -> list[bytes]:
        start = int(self._ends[number - 1]) if number else 0
        return self._captions.between(start, int(self._ends[number]))

    def caption_pieces(self) -> Iterator[Captions]:
        """Those of all rows."""
        start = 0
        for first in range(0, len(self), PIECE):
            ends = self._ends[first : first + PIECE].tolist()
            texts = self._captions.between(start, ends[-1])
            yield Captions.of(texts[a - start : b - start] for a, b in itertools.pairwise([start, *ends]))
            start = ends[-1]

    def __iter__(self) -> Iterator[Row]:
        for number in range(len(self)):
            yield Row(self.images[number], tuple(self.captions(number)), self.reasons.get(number, ""))


class ListedPairs(Source):
    """Pairs of a table; ids are row numbers from 0. Relative image paths start at `folder`."""

    def __init__(self, name: str, path: Path, rows: Rows, folder: Path | None = None, faults: tuple[Fault, ...] = ()):
        self.name = name
        self.path = path
        self.rows = rows
        self.faults = faults
        self.folder = image_folder(path, rows) if folder is None else folder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, id: int) -> Sample:
        if not 0 <= id < len(self):
            raise IndexError(f"sample {id} of {len(self)}")
        if id in self.rows.reasons:
            raise BadSample(self.rows.reasons[id], self.where(id))
        captions = usable_captions(self.rows.captions(id), self.where(id))
        return Sample(image_file(self.folder, self.rows.images[id], self.where(id)), captions)

    def where(self, id: int) -> str:
        """File and row, the first row after the header being row 1."""
        return f"{self.path} row {id + 1}"

    def captions(self) -> list[str]:
        """The first caption of every id; "" where there is none."""
        return [text for captions in self.caption_pieces() for text in captions.first.strings()]

    def caption_pieces(self) -> Iterator[Captions]:
        """The captions of every id, some at a time."""
        return self.rows.caption_pieces()


def image_file(folder: Path, name: bytes, where: str) -> bytes:
    """The bytes of an image that a row names, or holds as text. Raises BadSample."""
    if not name:
        raise BadSample("no image", where)
    if is_inline(name):
        return inline_image(name, where)
    image = image_path(folder, name)
    return file_of(folder, image, f"{where}: {shortened(str(image))}", "image file", LARGEST_PICTURE)


def file_of(folder: Path, path: Path, where: str, what: str, largest: int) -> bytes:
    """As `file_bytes`. One missing file is a bad sample; a missing folder is a disk that was taken away."""
    try:
        return file_bytes(path, where, what, largest)
    except BadSample:
        if folder.exists():
            raise
    raise RunFailed(f"{folder}: has gone while it was read; bring it back and continue with --resume")


def image_path(folder: Path, name: bytes) -> Path:
    """Where a row's image is; `~/` is the home folder and `\\` a slash unless a file is really called so."""
    text = name.decode(errors="surrogateescape")
    image = folder / text
    if name.startswith(b"~/") and is_missing(image):
        return Path(os.path.expanduser(text))  # noqa: PTH111 (keeps a missing home)
    if b"\\" in name and is_missing(image):  # as Windows writes paths
        return folder / text.replace("\\", "/")
    return image


def is_missing(image: Path) -> bool:
    """Whether nothing is there. Of an image that may not be read its own sample tells the reason."""
    try:
        image.stat()
    except ValueError:  # a NUL byte in the path
        return True
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
    return False


def file_bytes(path: Path, where: str, what: str, largest: int) -> bytes:
    """All of a file. Raises BadSample where the file is at fault, RunFailed where the machine is."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for ever, /dev/zero never end
            raise BadSample(f"{what} cannot be read", f"{where} (not a file)")
        if status.st_size > largest:
            raise BadSample(f"{what} is too large", f"{where} ({status.st_size:,} bytes, at most {largest:,})")
        return path.read_bytes()
    except OSError as error:
        if error.errno in OF_THE_MACHINE:
            raise RunFailed(
                f"{path}: {what} cannot be read ({error.strerror}), which is not its content's fault; check the disk, "
                "and the limits of open files (ulimit -n) and memory, then continue with --resume"
            ) from error
        raise BadSample(f"{what} cannot be read", f"{where} ({error.strerror})") from None
    except ValueError as error:  # a NUL byte in the path
        raise BadSample(f"{what} cannot be read", f"{where} ({error})") from None


def image_folder(path: Path, rows: Rows) -> Path:
    """The table's own folder; the working folder where only that one leads to the first image that is there."""
    first = first_images(rows)
    if first and all(is_url(name.decode(errors="replace")) for name in first):
        raise UserError(images_are_urls(path))
    if any(map(is_inline, first)):
        say(f"{path}: its images are base64 text within it, and stay in memory as long as it is open")
        return path.parent
    tried = ((folder, name) for name in first for folder in (path.parent, Path()))
    return next((folder for folder, name in tried if not is_missing(image_path(folder, name))), path.parent)


def first_images(rows: Rows) -> list[bytes]:
    numbers = (number for number in range(len(rows)) if rows.images[number] and number not in rows.reasons)
    return [rows.images[number] for number in itertools.islice(numbers, FIRST_PICTURES)]


def check_images(source: ListedPairs) -> None:
    """Raises UserError if no row can be used or none of the first images exists: a wrong table, no bad samples."""
    first = first_images(source.rows)
    if not first:
        reason = source.rows.reasons.get(0, "no image")
        raise UserError(f"{source.path}: none of its {len(source):,} rows can be used; of the first: {reason}")
    if not all(not is_inline(name) and is_missing(image_path(source.folder, name)) for name in first):
        return
    name = shortened(first[0].decode(errors="backslashreplace"))
    beside, working = source.path.absolute().parent, Path.cwd()
    places = f"not in {beside}" if beside == working else f"neither in {beside} nor in {working}"
    tried = "" if Path(name).is_absolute() or name.startswith("~/") else f", {places}"
    raise UserError(
        f"{source.path}: none of its first images exists ({len(first)} looked for), the first is {name}{tried}; "
        "correct the paths, or put the images there"
    )
