"""Pairs that a table lists: images in files of their own or as base64 text, captions in memory."""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import itertools
import os
import stat
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuclip.data.captions import PIECE, Captions, Texts, usable_captions
from neuclip.data.sample import BadSample, Fault, Sample, shorten
from neuclip.data.source import Source, file_version
from neuclip.data.tables.columns import images_are_urls, is_url, print_once
from neuclip.errors import RunFailed, UserError

FIRST_IMAGES = 20  # looked for when a table is opened
LARGEST_IMAGE = 256 << 20  # bytes as encoded
BASE64_SIGNATURES = (b"/9j/", b"iVBOR", b"R0lGOD", b"UklGR")  # of JPEG, PNG, GIF and WebP
SHORTEST_BASE64 = 32  # letters; the smallest GIF there is has 35 bytes
# What the machine lacks, whatever lies in the file: such samples must not be dropped as bad.
MACHINE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EIO})


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

    def first_images(self) -> list[bytes]:
        numbers = (number for number in range(len(self)) if self.images[number] and number not in self.reasons)
        return [self.images[number] for number in itertools.islice(numbers, FIRST_IMAGES)]


class ListedPairs(Source):
    """Pairs of a table; ids are row numbers from 0. Relative image paths start at `folder`."""

    def __init__(self, name: str, path: Path, rows: Rows, folder: Path | None = None, faults: tuple[Fault, ...] = ()):
        self.name = name
        self.kind = path.suffix.lower().removeprefix(".")
        self.path = path
        self.files = (path,)
        self.rows = rows
        self.faults = faults
        self.folder = find_image_folder(path, rows.first_images()) if folder is None else folder

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        if id in self.rows.reasons:
            raise BadSample(self.rows.reasons[id], self.where(id))
        captions = usable_captions(self.rows.captions(id), self.where(id))
        return Sample(read_image(self.folder, self.rows.images[id], self.where(id)), captions)

    def where(self, id: int) -> str:
        """File and row, the first row after the header being row 1."""
        return f"{self.path} row {id + 1}"

    def caption_pieces(self) -> Iterator[Captions]:
        return self.rows.caption_pieces()

    def image_keys(self) -> np.ndarray:
        """By the path of the image, or by its base64 text; a row without an image stands for itself."""
        keys = array("Q")
        folder = os.fsencode(self.folder.resolve())
        for number in range(len(self)):
            name = self.rows.images[number]
            if name and not is_base64(name):
                name = os.path.normpath(os.path.join(folder, name.replace(b"\\", b"/")))  # noqa: PTH118 (bytes)
            digest = hashlib.blake2b(name or b"row %d" % number, digest_size=8).digest()
            keys.append(int.from_bytes(digest, "little"))
        return np.frombuffer(keys, dtype=np.uint64)

    def file_versions(self) -> Iterator[str]:
        yield file_version(self.path)
        for name in (self.rows.images[number] for number in range(len(self))):
            if not is_base64(name):
                yield file_version(image_path(self.folder, name))

    def image_folder(self) -> Path | None:
        """The innermost folder that has all images; None if the table itself holds some."""
        names = [self.rows.images[number] for number in range(len(self)) if number not in self.rows.reasons]
        if any(map(is_base64, names)):
            return None
        folders = {os.path.dirname(name.replace(b"\\", b"/")) for name in names if name}  # noqa: PTH120 (bytes)
        paths = [image_path(self.folder, name or b".").absolute() for name in folders]
        return Path(os.path.commonpath(paths)) if paths else None

    def check_images(self) -> None:
        """Refuses a table if no row can be used or none of the first images exists."""
        first = self.rows.first_images()
        if not first:
            reason = self.rows.reasons.get(0, "no image")
            raise UserError(f"{self.path}: none of its {len(self):,} rows can be used; of the first: {reason}")
        if any(is_base64(name) or not is_missing(image_path(self.folder, name)) for name in first):
            return
        name = shorten(first[0].decode(errors="backslashreplace"))
        beside, working = self.path.absolute().parent, Path.cwd()
        places = f"not in {beside}" if beside == working else f"neither in {beside} nor in {working}"
        tried = "" if Path(name).is_absolute() or name.startswith("~/") else f", {places}"
        raise UserError(
            f"{self.path}: none of its first images exists ({len(first)} looked for), the first is {name}{tried}; "
            "correct the paths, or put the images there"
        )


class ListedImages(ListedPairs):
    """Ids follow a file's list of images, each with all its captions; a sample's place is its image's name."""

    def where(self, id: int) -> str:
        return f"{self.path}: {shorten(os.fsdecode(self.rows.images[id]))}"


def find_image_folder(path: Path, first_images: list[bytes]) -> Path:
    """The table's own folder; where only one of them leads to the first image that is there, the working folder, or a
    folder beside the table (Kaggle's captions.txt lies beside Images)."""
    if first_images and all(is_url(name.decode(errors="replace")) for name in first_images):
        raise UserError(images_are_urls(path))
    if any(map(is_base64, first_images)):
        print_once(f"{path}: its images are base64 text within it, and stay in memory as long as it is open")
        return path.parent
    folders = [path.parent, Path(), *(folder for folder in sorted(path.parent.glob("[!.]*/")) if folder.is_dir())]
    candidates = ((folder, name) for name in first_images for folder in folders)
    return next((folder for folder, name in candidates if not is_missing(image_path(folder, name))), path.parent)


def read_image(folder: Path, name: bytes, where: str) -> bytes:
    """The bytes of an image that a row names, or holds as base64. Raises BadSample."""
    if not name:
        raise BadSample("no image", where)
    if is_base64(name):
        return decode_base64(name, where)
    image = image_path(folder, name)
    return read_file(folder, image, f"{where}: {shorten(str(image))}", "image file", LARGEST_IMAGE)


def is_base64(field: bytes) -> bool:
    """Whether a field is an image, with or without `data:image/png;base64,` in front, rather than the path of one.
    `/9j/` might begin a path, whose name would end in a dot and its kind; base64 has no dots."""
    if field.startswith(b"data:image/"):
        return b";base64," in field[:100]
    return field.startswith(BASE64_SIGNATURES) and len(field) >= SHORTEST_BASE64 and b"." not in field


def decode_base64(field: bytes, where: str) -> bytes:
    _, _, text = field.rpartition(b",")  # base64 has no commas
    try:
        return base64.b64decode(b"".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise BadSample("image is not whole base64", where) from None


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


def read_file(folder: Path, path: Path, where: str, what: str, largest: int) -> bytes:
    """All of a file below the folder. One missing file is a bad sample; a missing folder is a disk that is gone."""
    try:
        return _read_regular(path, where, what, largest)
    except BadSample:
        if folder.exists():
            raise
    raise RunFailed(f"{folder}: has gone while it was read; bring it back and continue with --resume")


def _read_regular(path: Path, where: str, what: str, largest: int) -> bytes:
    """Raises BadSample where the file is at fault, RunFailed where the machine is."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for ever, /dev/zero never end
            raise BadSample(f"{what} cannot be read", f"{where} (not a file)")
        if status.st_size > largest:
            raise BadSample(f"{what} is too large", f"{where} ({status.st_size:,} bytes, at most {largest:,})")
        return path.read_bytes()
    except OSError as error:
        if error.errno in MACHINE_ERRORS:
            raise RunFailed(
                f"{path}: {what} cannot be read ({error.strerror}), which is not its content's fault; check the disk, "
                "and the limits of open files (ulimit -n) and memory, then continue with --resume"
            ) from error
        raise BadSample(f"{what} cannot be read", f"{where} ({error.strerror})") from None
    except ValueError as error:  # a NUL byte in the path
        raise BadSample(f"{what} cannot be read", f"{where} ({error})") from None
