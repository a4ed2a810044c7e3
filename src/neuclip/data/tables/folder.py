"""A folder of images with captions beside them: `a.jpg` and `a.txt`, or one captions file for all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from neuclip.data.decoding import DECODED, NOT_DECODED, NOT_DECODED_REASON
from neuclip.data.faults import list_faults
from neuclip.data.source import FACTS, captions_from_json, shorten
from neuclip.data.tables.listed import ColumnChoice, ListedPairs, Row, Rows, parse_listed
from neuclip.data.tables.text import read_csv, read_jsonl
from neuclip.errors import UserError
from neuclip.files import cache_folder, new_file, open_regular, read_regular, remove_unused
from neuclip.formatting import plural
from neuclip.progress import SILENT_SECONDS, StatusLine, track

FORMAT = 1  # of the stored captions; raise it when their meaning changes
LARGEST_TEXT = 1 << 24  # bytes
CAPTIONS_FILES = ("captions.csv", "captions.tsv", "captions.jsonl", "captions.txt", "metadata.csv", "metadata.jsonl")


def open_folder(name: str, folder: Path, choice: ColumnChoice, *, lines: bool) -> ListedPairs | None:
    """Images in the folder and all below, ids in order of their paths; None if there are no images. A whole text file
    is one caption, as a `txt` member of a shard is, or with `lines` each of its lines."""
    images, texts, others = list_images(folder)
    if not images:
        return None
    unused = [(NOT_DECODED_REASON, str(folder / other)) for other in others]
    if captions_file := find_captions_file(folder):
        captions, unmatched = _captions_by_image(captions_file, images, choice)
        rows = Rows.listed(Row(image, tuple(captions.get(image, ()))) for image in images)
        unused += unmatched
    elif any(_stem(image) in texts for image in images):
        rows = _read_texts(folder, images, texts, lines)
    else:
        raise UserError(_no_captions(folder, images))
    return ListedPairs(name, folder, rows, folder=folder, kind="folder", faults=list_faults(unused))


def _no_captions(folder: Path, images: list[str]) -> str:
    near = coco_captions(folder.absolute().parent) or sorted(folder.glob("*.[ct]sv"))
    remedy = f"did you mean {near[0]}?" if near else (
        f"put {Path(images[0]).stem}.txt beside {images[0]} and so on, or one captions.csv with the columns image and "
        "caption into the folder"
    )  # fmt: skip
    return f"{folder}: {plural(len(images), 'image')} but no captions; {remedy}"


def coco_captions(folder: Path) -> list[Path]:
    """Where COCO keeps them: beside the folders of its images."""
    return sorted(folder.glob("annotations/captions_*.json"))


def find_captions_file(folder: Path) -> Path | None:
    """The one captions file of a folder. Two are refused: nothing says which of them counts."""
    files = [folder / name for name in CAPTIONS_FILES if (folder / name).exists()]
    if len(files) > 1:
        raise UserError(f"{folder}: has {files[0].name} and {files[1].name}; keep one of them in the folder")
    return files[0] if files else None


def _read_texts(folder: Path, images: list[str], texts: dict[str, str], lines: bool) -> Rows:
    """Each image with its text. They are kept in the cache folder: a start reads only what has changed since."""
    own = [texts.get(_stem(image), "") for image in images]
    facts = [[image, text, *_size_and_time(folder / text)] for image, text in zip(images, own, strict=True)]
    identity = json.dumps([FORMAT, str(folder.resolve()), lines, facts]).encode()
    place = cache_folder() / "folders" / f"{hashlib.sha256(identity).hexdigest()[:32]}.npz"
    with contextlib.suppress(Exception):  # not there, or damaged: it is made again
        with open_regular(place) as file, np.load(file, allow_pickle=False) as stored:
            rows = Rows(stored["content"].tobytes(), stored["ends"], stored["facts"], stored["images"], parse_listed)
        if len(rows.images) == len(rows.facts) == len(rows.ends) - 1 == len(images) and rows.facts.dtype == FACTS:
            os.utime(place)
            return rows
    pairs = track(zip(images, own, strict=True), "reading captions", len(images), "files")
    rows = Rows.listed(_row(folder, image, text, lines) for image, text in pairs)
    with contextlib.suppress(OSError):  # a cache that cannot be written: they are read again next time
        with new_file(place) as unfinished:
            content = np.frombuffer(rows.content, np.uint8)
            np.savez(unfinished, content=content, ends=rows.ends, facts=rows.facts, images=rows.images)
        remove_unused(place.parent.glob("*"))
    return rows


def _size_and_time(text: Path) -> tuple[int, int]:
    try:
        status = text.stat()
    except OSError:
        return -1, -1
    return (-1, -1) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)


def _row(folder: Path, image: str, text: str, lines: bool) -> Row:
    if not text:
        return Row(image, ())
    try:
        content = read_regular(folder / text, LARGEST_TEXT)
    except OSError:
        return Row(image, (), "caption file cannot be read")
    if text.lower().endswith(".json"):
        return Row(image, captions_from_json(content))
    return Row(image, tuple(content.split(b"\n")) if lines else (content,))


def _captions_by_image(
    path: Path, images: list[str], choice: ColumnChoice
) -> tuple[dict[str, list[str | bytes]], list[tuple[str, str]]]:
    """Captions of each image, those of several rows together; and the rows of no use, reason and place. A row names its
    image by its path from the folder, or by its file name where only one image is called so."""
    rows = read_jsonl(path, choice) if path.suffix == ".jsonl" else read_csv(path, choice)
    known, by_name = set(images), dict[str, str]()
    for image in images:
        name = image.rpartition("/")[2]
        by_name[name] = "" if name in by_name else image
    captions: dict[str, list[str | bytes]] = {}
    unused = []
    for number in range(len(rows)):
        row = rows[number]
        name = row.image.replace("\\", "/").removeprefix("./")
        image = name if name in known else by_name.get(name, "")
        own = captions.setdefault(image, []) if image else []
        if row.reason or not image:
            reason = row.reason if image else "no image"
            unused.append((reason, f"{path} row {number + 1}: {shorten(name) or row.reason}"))
        else:
            own.extend(row.captions)
    if not captions:
        first = shorten(rows[0].image) if len(rows) else "nothing"
        raise UserError(
            f"{path}: names none of the {len(images):,} images beside it; its first row leads to {first}, "
            f"the first image is {images[0]}; give paths from the folder"
        )
    return captions, unused


def _stem(path: str) -> str:
    return path.rpartition(".")[0]


def list_images(folder: Path) -> tuple[list[str], dict[str, str], list[str]]:
    """Images (paths from the folder, sorted), the text file of each stem, and images of kinds that are not decoded.
    Text goes before JSON: img2dataset writes both."""
    images: list[str] = []
    others: list[str] = []
    texts: dict[str, str] = {}
    jsons: dict[str, str] = {}
    status = StatusLine(silent_seconds=SILENT_SECONDS)
    for count, path in enumerate(_walk(folder)):
        if status.due():
            status.show(f"listing {folder}  {count:,} files")
        stem, _, ending = path.rpartition(".")
        kind = ending.lower() if stem else ""
        if kind in DECODED:
            images.append(path)
        elif kind in ("txt", "json"):  # of a.txt and a.TXT always the same one, in whatever order they come
            same = texts if kind == "txt" else jsons
            same[stem] = max(path, same.get(stem, ""))
        elif kind in NOT_DECODED:
            others.append(path)
    status.close()
    return sorted(images), jsons | texts, sorted(others)


def _walk(folder: Path) -> Iterator[str]:
    """All files below, as paths from the folder with forward slashes; hidden ones are left out.

    Links to folders are followed, but no folder is read twice: under its own path if that lies below, else under the
    first link's. So links in a circle end, and no image becomes two samples.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be listed ({error.strerror}); check its permissions") from error

    seen: set[tuple[int, int]] = set()
    starts = [folder]
    while starts:
        links: list[Path] = []
        for place, folders, files in (entry for start in starts for entry in os.walk(start, onerror=refuse)):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
            status = Path(place).stat()
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            links += [link for link in (Path(place, name) for name in folders) if link.is_symlink()]
            inside = Path(place).relative_to(folder).as_posix()
            for name in files:
                if not name.startswith("."):
                    yield name if inside == "." else f"{inside}/{name}"
        starts = sorted(link for link in links if not _leads_up(link))


def _leads_up(link: Path) -> bool:
    """To a folder that the link lies in, even above the folder that was given: nobody means all that is there."""
    return link.parent.resolve().is_relative_to(link.resolve())
