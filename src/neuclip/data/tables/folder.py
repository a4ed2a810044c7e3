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

FORMAT = 1  # of the stored captions; increase it when their meaning changes
LARGEST_TEXT = 1 << 24  # bytes
CAPTIONS_FILES = ("captions.csv", "captions.tsv", "captions.jsonl", "captions.txt", "metadata.csv", "metadata.jsonl")


def open_folder(name: str, folder: Path, choice: ColumnChoice, *, lines: bool) -> ListedPairs | None:
    """Open the images in the folder and its subfolders, with ids in order of their paths; None if there are no images.
    A text file is one caption, like a `txt` member of a shard; with `lines`, each of its lines is one."""
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
    """The captions files of COCO, if the folder is the root of a COCO copy."""
    return sorted(folder.glob("annotations/captions_*.json"))


def find_captions_file(folder: Path) -> Path | None:
    """The captions file of a folder, if it has one. Raises UserError if there are several."""
    files = [folder / name for name in CAPTIONS_FILES if (folder / name).exists()]
    if len(files) > 1:
        raise UserError(f"{folder}: has {files[0].name} and {files[1].name}; keep one of them in the folder")
    return files[0] if files else None


def _read_texts(folder: Path, images: list[str], texts: dict[str, str], lines: bool) -> Rows:
    """The rows of all images with their texts. They are kept in the cache folder, and read again only if a file has
    changed."""
    text_files = [texts.get(_stem(image), "") for image in images]
    facts = [[image, text, *_size_and_time(folder / text)] for image, text in zip(images, text_files, strict=True)]
    identity = json.dumps([FORMAT, str(folder.resolve()), lines, facts]).encode()
    cached = cache_folder() / "folders" / f"{hashlib.sha256(identity).hexdigest()[:32]}.npz"
    with contextlib.suppress(Exception):  # missing or damaged: it is written again
        with open_regular(cached) as file, np.load(file, allow_pickle=False) as stored:
            rows = Rows(stored["content"].tobytes(), stored["ends"], stored["facts"], stored["images"], parse_listed)
        if len(rows.images) == len(rows.facts) == len(rows.ends) - 1 == len(images) and rows.facts.dtype == FACTS:
            os.utime(cached)
            return rows
    pairs = track(zip(images, text_files, strict=True), "reading captions", len(images), "files")
    rows = Rows.listed(_row(folder, image, text, lines) for image, text in pairs)
    with contextlib.suppress(OSError):  # the cache cannot be written: the texts are read again next time
        with new_file(cached) as unfinished:
            content = np.frombuffer(rows.content, np.uint8)
            np.savez(unfinished, content=content, ends=rows.ends, facts=rows.facts, images=rows.images)
        remove_unused(cached.parent.glob("*"))
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
    """The captions of each image, from all its rows, and the unusable rows as (reason, where). A row names its image by
    its path from the folder, or by its file name if only one image has that name."""
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
        image_captions = captions.setdefault(image, []) if image else []
        if row.reason or not image:
            reason = row.reason if image else "no image"
            unused.append((reason, f"{path} row {number + 1}: {shorten(name) or row.reason}"))
        else:
            image_captions.extend(row.captions)
    if not captions:
        first = shorten(rows[0].image) if len(rows) else "nothing"
        raise UserError(
            f"{path}: names none of the {len(images):,} images beside it; its first row names {first}, "
            f"the first image is {images[0]}; give paths relative to the folder"
        )
    return captions, unused


def _stem(path: str) -> str:
    return path.rpartition(".")[0]


def list_images(folder: Path) -> tuple[list[str], dict[str, str], list[str]]:
    """The images of a folder (paths from the folder, sorted), the text file of each stem, and the images in unsupported
    formats. A txt file is preferred to a json file: img2dataset writes both."""
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
        elif kind in ("txt", "json"):
            by_stem = texts if kind == "txt" else jsons
            by_stem[stem] = max(path, by_stem.get(stem, ""))  # of a.txt and a.TXT always the same, in any order
        elif kind in NOT_DECODED:
            others.append(path)
    status.close()
    return sorted(images), jsons | texts, sorted(others)


def _walk(folder: Path) -> Iterator[str]:
    """All files in the folder and its subfolders, as paths from the folder with forward slashes, without hidden ones.

    Links to folders are followed, but no folder is read twice, so circular links end and no image becomes two samples.
    A folder inside `folder` is read under its own path, another one under its first link.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be listed ({error.strerror}); check its permissions") from error

    seen: set[tuple[int, int]] = set()
    starts = [folder]
    while starts:
        links: list[Path] = []
        for current, folders, files in (entry for start in starts for entry in os.walk(start, onerror=refuse)):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
            status = Path(current).stat()
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            links += [link for link in (Path(current, name) for name in folders) if link.is_symlink()]
            relative = Path(current).relative_to(folder).as_posix()
            for name in files:
                if not name.startswith("."):
                    yield name if relative == "." else f"{relative}/{name}"
        starts = sorted(link for link in links if not _leads_up(link))


def _leads_up(link: Path) -> bool:
    """Whether a link points to one of its own parent folders. Such links are not followed: they would add folders
    outside the given one."""
    return link.parent.resolve().is_relative_to(link.resolve())
