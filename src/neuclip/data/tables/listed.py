"""Pairs listed in a table: each image is a file, and the rows are kept in memory as bytes."""

from __future__ import annotations

import difflib
import errno
import hashlib
import io
import itertools
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuclip.data.order import mix
from neuclip.data.source import (
    FACTS,
    BadSample,
    Fault,
    Sample,
    Source,
    caption_facts,
    check_id,
    print_once,
    shorten,
    usable_captions,
)
from neuclip.errors import RunFailed, UserError
from neuclip.files import read_regular

IMAGE_COLUMNS = (
    "image", "image_path", "filepath", "file_path", "filename", "file_name", "path", "file", "img", "picture",
    "image_bytes", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
URL_COLUMNS = frozenset({"url", "image_url", "img_url", "picture_url", "urls"})
CAPTION_COLUMNS = ("caption", "title", "text", "description", "sentence", "alt_text", "captions", "sentences", "txt")
FIRST_IMAGES = 20  # number of images whose files are looked for when a table is opened
LARGEST_IMAGE = 256 << 20  # bytes as encoded
BASE64 = re.compile(r"data:image/|(?:/9j/|iVBOR|R0lGOD|UklGR)[A-Za-z0-9+/=\s]{28}")  # how JPEG, PNG, GIF and WebP begin
# Errors of the machine, not of the file: such samples must not be dropped as bad.
MACHINE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EIO})


class Row(NamedTuple):
    """One pair as the table lists it. Bytes that are not UTF-8 are kept, so that they spoil only their own row."""

    image: str  # path; bytes that are not UTF-8 are surrogates
    captions: tuple[str | bytes, ...]
    reason: str = ""  # the reason why the row cannot be used, or ""


@dataclass
class Rows:
    """Rows as consecutive bytes, which `parse` reads one by one: millions of Row objects would not fit into memory."""

    content: bytes
    ends: np.ndarray  # (n + 1,) int64
    facts: np.ndarray  # (n,) of FACTS
    images: np.ndarray  # (n,) uint64, equal for equal paths
    parse: Callable[[bytes], Row]

    @classmethod
    def of(cls, content: bytes, start: int, rows: Iterable[tuple[int, Row]], parse: Callable[[bytes], Row]) -> Rows:
        """Make Rows from `content` and, for each row, its end in `content` and the parsed row."""
        ends, counts, hashes, images = array("q", [start]), array("H"), array("Q"), array("Q")
        for end, row in rows:
            ends.append(end)
            count, hash = (0, 0) if row.reason else caption_facts(row.captions)
            counts.append(count)
            hashes.append(hash)
            name = os.path.normpath(row.image.replace("\\", "/")) if row.image else f"row {len(ends)} without image"
            raw = name.encode(errors="surrogatepass")
            images.append(int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little"))
        facts = np.zeros(len(counts), FACTS)
        facts["captions"], facts["hash"] = counts, hashes
        return cls(content, np.array(ends), facts, np.array(images, dtype=np.uint64), parse)

    @classmethod
    def listed(cls, rows: Iterable[Row]) -> Rows:
        """Make Rows from parsed rows, for files that cannot be parsed row by row. Each is stored as a line of JSON."""
        stream = io.BytesIO()

        def write_rows() -> Iterator[tuple[int, Row]]:
            for row in rows:
                captions = [text if isinstance(text, str) else text.decode(errors="surrogateescape") for text in row[1]]
                stream.write(json.dumps([row.image, captions, row.reason]).encode())
                yield stream.tell(), row

        listed = cls.of(b"", 0, write_rows(), parse_listed)
        listed.content = stream.getvalue()
        return listed

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, number: int) -> Row:
        return self.parse(self.content[self.ends[number] : self.ends[number + 1]])

    def first_images(self) -> list[str]:
        rows = (self[number] for number in range(len(self)))
        return [
            row.image for row in itertools.islice((row for row in rows if row.image and not row.reason), FIRST_IMAGES)
        ]


def parse_listed(raw: bytes) -> Row:
    image, captions, reason = json.loads(raw)
    return Row(image, tuple(text.encode(errors="surrogateescape") for text in captions), reason)


class ListedPairs(Source):
    """Pairs of a table, or of a folder (`kind` "folder"); ids are row numbers from 0. Relative paths of images start at
    `folder`. With `by_image`, messages name a sample by its image and not by its row. `captions` False means that
    images need no captions."""

    def __init__(
        self,
        name: str,
        path: Path,
        rows: Rows,
        *,
        folder: Path | None = None,
        kind: str = "",
        faults: tuple[Fault, ...] = (),
        by_image: bool = False,
        captions: bool = True,
    ):
        self.name, self.path, self.rows, self.faults = name, path, rows, faults
        self.kind = kind or path.suffix.lower().removeprefix(".")
        self.by_image, self.captions = by_image, captions
        first = rows.first_images()
        self.base = find_image_folder(path, first) if folder is None else folder
        self._names_are_absolute = bool(first) and all(Path(image).is_absolute() for image in first)
        folders = [Path(image).parent for image in first] if self._names_are_absolute else [self.base]
        self.folder = Path(os.path.commonpath(folders))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, id: int) -> Sample:
        check_id(id, len(self))
        row = self.rows[id]
        if row.reason:
            raise BadSample(row.reason, self.where(id))
        captions = usable_captions(row.captions, self.where(id)) if self.captions else ()
        return Sample(read_listed_image(self.base, row.image, self.where(id)), captions)

    def where(self, id: int) -> str:
        """File and row (the first row after the header is row 1), or the file of the image."""
        if self.kind == "folder":
            return str(self.base / self.rows[id].image)
        return f"{self.path}: {shorten(self.rows[id].image)}" if self.by_image else f"{self.path} row {id + 1}"

    def caption_facts(self) -> Iterator[np.ndarray]:
        yield self.rows.facts

    def image_keys(self, ids: np.ndarray | None = None, *, read_images: bool = False) -> np.ndarray:
        """Keys from the paths of the images. A row without an image gets a key of its own."""
        keys = self.rows.images if ids is None else self.rows.images[ids]
        if self._names_are_absolute:
            return keys
        digest = hashlib.blake2b(os.fsencode(self.base.resolve()), digest_size=8).digest()
        return mix(keys ^ np.uint64(int.from_bytes(digest, "little")))

    def images_version(self) -> str:
        """A hash of the relative path, size and time of each file. It stays the same if the folder is moved."""
        digest = hashlib.sha256()
        for number in range(len(self)):
            name = self.rows[number].image
            try:
                status = image_path(self.base, name).stat()
                line = f"{name} {status.st_size} {status.st_mtime_ns}\n"
            except (OSError, ValueError):
                line = f"{name} is not there\n"  # hashed: other words would invalidate stored features
            digest.update(line.encode(errors="surrogatepass"))
        return digest.hexdigest()

    def check_images(self) -> None:
        """Raise UserError if no row can be used or none of the first images exists: then the table is wrong, not its
        samples."""
        first = self.rows.first_images()
        if not first:
            reason = self.rows[0].reason or "no image"
            raise UserError(
                f"{self.path}: none of its {len(self):,} rows can be used; the first: {reason}; check the columns"
            )
        if not all(is_missing(image_path(self.base, name)) for name in first):
            return
        name = shorten(first[0])
        beside, working = self.path.absolute().parent, Path.cwd()
        places = f"not in {beside}" if beside == working else f"neither in {beside} nor in {working}"
        tried = "" if Path(name).is_absolute() or name.startswith("~/") else f", {places}"
        raise UserError(
            f"{self.path}: none of its first images exists ({len(first)} looked for), the first is {name}{tried}; "
            "correct the paths, or put the images there"
        )


def find_image_folder(path: Path, first_images: Sequence[str]) -> Path:
    """The folder at which relative paths of a table start: the first of the table's folder, the working folder, and the
    folders beside the table (Kaggle's captions.txt is beside Images) where one of the first images exists."""
    if first_images and all(map(is_url, first_images)):
        raise UserError(images_are_urls(path))
    if any(map(BASE64.match, first_images)):
        raise UserError(
            f"{path}: its images are base64 text, which is not supported; write each to a file of its own, or all to a "
            "Parquet file as bytes"
        )
    folders = [path.parent, Path(), *(folder for folder in sorted(path.parent.glob("[!.]*/")) if folder.is_dir())]
    candidates = ((folder, name) for name in first_images for folder in folders)
    return next((folder for folder, name in candidates if not is_missing(image_path(folder, name))), path.parent)


def read_listed_image(folder: Path, name: str, where: str) -> bytes:
    """The bytes of an image that a row names. A missing file raises BadSample. A missing folder raises RunFailed,
    because its disk is probably gone."""
    if not name:
        raise BadSample("no image", where)
    image = image_path(folder, name)
    try:
        return read_image_file(image, f"{where}: {shorten(str(image))}" if str(image) != where else where)
    except BadSample:
        if folder.exists():
            raise
    raise RunFailed(f"{folder}: has disappeared since the run began; put it back and continue with --resume")


def read_image_file(path: Path, where: str) -> bytes:
    """The bytes of an image file. Raises BadSample if the file is at fault, RunFailed if the machine is."""
    try:
        return read_regular(path, LARGEST_IMAGE)
    except OSError as error:
        if error.errno in MACHINE_ERRORS:
            raise RunFailed(
                f"{path}: cannot be read ({error.strerror}), which is not the file's fault; check the disk, memory and "
                "the limit of open files (ulimit -n), then continue with --resume"
            ) from error
        reason = "image file is too large" if error.errno == errno.EFBIG else "image file cannot be read"
        raise BadSample(reason, f"{where} ({error.strerror})") from None
    except ValueError as error:  # a NUL byte in the path
        raise BadSample("image file cannot be read", f"{where} ({error})") from None


def image_path(folder: Path, name: str) -> Path:
    """The path of a row's image. `~/` means the home folder and `\\` a slash, unless a file has exactly this name."""
    image = folder / name
    if name.startswith("~/") and is_missing(image):
        return Path(os.path.expanduser(name))  # noqa: PTH111 (keeps a missing home)
    if "\\" in name and is_missing(image):  # as Windows writes paths
        return folder / name.replace("\\", "/")
    return image


def is_missing(image: Path) -> bool:
    """Whether a file does not exist. False if it exists but must not be read: reading its sample gives that reason."""
    try:
        image.stat()
    except ValueError:  # a NUL byte in the path
        return True
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
    return False


class ColumnChoice(NamedTuple):
    """The columns that the user chose; "" means none."""

    image: str = ""
    caption: str = ""  # several columns, separated by commas, are several captions per image
    section: str = "data"  # the section of the settings with this choice, for messages


class Columns(NamedTuple):
    image: str
    captions: tuple[str, ...]


def choose_columns(path: Path, names: Sequence[str], choice: ColumnChoice, how: str = "") -> Columns:
    """The columns that the user chose, else those with usual names, which are then printed.

    `how` is printed with them, such as "split at commas, ".
    """
    image = _find_columns(path, names, choice.image, IMAGE_COLUMNS, "image")
    captions = _find_columns(path, names, choice.caption, CAPTION_COLUMNS, "caption")
    if choice.image and len(image) > 1:
        raise UserError(f"{path}: --data.image_column names {len(image)} columns; give one, captions may be several")
    if not (choice.image and choice.caption):
        print_once(
            f"{path}: {how}images from column {image[0]!r}, captions from {', '.join(map(repr, captions))}; name "
            f"others with --{choice.section}.image_column and --{choice.section}.caption_column"
        )
    return Columns(image[0], tuple(captions))


def _find_columns(path: Path, names: Sequence[str], choice: str, usual: tuple[str, ...], what: str) -> list[str]:
    # pandas writes its index as a column with an empty name, which an empty choice must not match.
    parts = [name for name in (part.strip() for part in choice.split(",")) if name]
    chosen = [choice] if choice and choice in names else parts
    for name in chosen:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"give one of these with --data.{what}_column"
            raise UserError(f"{path}: has no column {name!r}; its columns are {_join(names)}; {hint}")
    return chosen or _find_usual(path, names, usual, what)


def _find_usual(path: Path, names: Sequence[str], usual: tuple[str, ...], what: str) -> list[str]:
    """The first column with a usual name, or all numbered columns of such a name: caption_1, caption_2."""
    lower = [name.lower() for name in names]
    for candidate in usual:
        if candidate in lower:
            return [names[lower.index(candidate)]]
    for candidate in usual:
        family = [name for name in names if re.fullmatch(rf"{candidate}[_ ]?\d+", name.lower())]
        if family:
            return sorted(family, key=lambda name: int(re.search(r"\d+$", name)[0]))  # type: ignore[index]
    if what == "image" and URL_COLUMNS & set(lower):
        message = images_are_urls(path, f" (its columns are {_join(names)})")
        raise UserError(f"{message}, or name a column of paths with --data.image_column")
    raise UserError(
        f"{path}: no column looks like the {what}; its columns are {_join(names)}; name it with --data.{what}_column"
    )


def _join(names: Sequence[str]) -> str:
    return shorten(", ".join(shorten(name, 60) for name in names), 400) or "none"


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def images_are_urls(path: Path, evidence: str = "") -> str:
    return f"{path}: its images are URLs{evidence}; fetch them first with img2dataset (docs/data.md)"
