"""A folder of images with captions beside them: `a.jpg` and `a.txt`, or one captions file for all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from neuclip.data.captions import captions_from_json, usable_captions
from neuclip.data.image_kinds import READ, UNREAD, UNREAD_KIND
from neuclip.data.locations import refuse_gone
from neuclip.data.sample import BadSample, Fault, Sample, UnindexedFaults
from neuclip.data.source import Source
from neuclip.data.tables.captions_file import captions_by_image, captions_file_in
from neuclip.data.tables.columns import Asked
from neuclip.data.tables.listed import ListedPairs, Row, Rows, file_of, image_file
from neuclip.data.texts import Captions, Texts
from neuclip.errors import UserError
from neuclip.progress import SILENT_SECONDS, StatusLine, track

LARGEST_TEXT = 1 << 24  # bytes
PLAIN_TEXTS = ("txt", "caption")  # endings of files that are one caption
TextFiles = dict[str, dict[str, str]]  # by kind: of each stem its ending as it is written


def open_folder(name: str, folder: Path, asked: Asked) -> ImageFolder | ListedPairs | None:
    """Images in the folder and all below, ids in order of their paths; None if there are no images."""
    images, texts, others = _walk(folder)
    if not images:
        return None
    faults = _counted(UNREAD_KIND, folder, others)
    captions_file = captions_file_in(folder)
    if captions_file is not None:
        found, unmatched = captions_by_image(captions_file, images, asked)
        rows = Rows(Row(os.fsencode(image), tuple(found.get(image, ()))) for image in images)
        return ListedInFolder(name, captions_file, rows, folder, (*faults, *unmatched))
    endings = [caption_ending(image, texts) for image in images]
    if not any(endings):
        if elsewhere := captions_of_coco(folder.absolute().parent) or sorted(folder.glob("*.[ct]sv")):
            raise UserError(f"{folder}: {len(images):,} images but no captions; did you mean {elsewhere[0]}?")
        raise UserError(
            f"{folder}: {len(images):,} images but no captions; put {Path(images[0]).stem}.txt beside "
            f"{images[0]} and so on, or one captions.csv with the columns image and caption into the folder"
        )
    stems = {image.rpartition(".")[0] for image in (*images, *others)} | set(images)
    folders = {stem.rpartition("/")[0] for stem in stems}  # a text where no image lies is no caption
    alone = sorted(
        f"{stem}.{texts[kind][stem]}"
        for kind in PLAIN_TEXTS
        for stem in texts[kind].keys() - stems
        if stem.rpartition("/")[0] in folders
    )
    return ImageFolder(name, folder, images, endings, (*faults, *_counted("no image", folder, alone)))


def captions_of_coco(folder: Path) -> list[Path]:
    """Where COCO keeps them: beside the folders of its images."""
    return sorted(folder.glob("annotations/captions_*.json"))


def caption_ending(image: str, texts: TextFiles) -> str:
    """What stands after the stem in the name of an image's text file: of `a.jpg` txt, jpg.txt, and so on; "" if it has
    none. Text goes before JSON: img2dataset writes both."""
    stem, _, own = image.rpartition(".")
    for kind, files in texts.items():
        if stem in files:
            return files[stem]
        if image in files and kind in PLAIN_TEXTS:
            return f"{own}.{files[image]}"
    return ""


class ImageFolder(Source):
    """Images with a text file of the same name. The whole file is one caption, as a `txt` member of a shard is; of a
    JSON file its key "caption" is."""

    def __init__(self, name: str, folder: Path, images: list[str], endings: list[str], faults: tuple[Fault, ...]):
        self.name = name
        self.folder = folder
        self.faults = faults
        self._images = Texts.of(os.fsencode(image) for image in images)
        self._endings = np.array(endings, dtype="S")

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, id: int) -> Sample:
        if not 0 <= id < len(self):
            raise IndexError(f"sample {id} of {len(self)}")
        captions = usable_captions(self._captions(id), self.where(id))
        return Sample(image_file(self.folder, self._images[id], self.where(id)), captions)

    def where(self, id: int) -> str:
        return str(self.folder / os.fsdecode(self._images[id]))

    def captions(self) -> list[str]:
        """The first caption of every id; "" where there is none."""
        return [text for captions in self.caption_pieces() for text in captions.first.strings()]

    def caption_pieces(self) -> Iterator[Captions]:
        """The captions of every id."""
        yield Captions.of(map(self._captions_if_any, track(range(len(self)), "reading captions", len(self), "files")))

    def _captions_if_any(self, id: int) -> Sequence[str | bytes]:
        try:
            return self._captions(id)
        except BadSample:
            return ()

    def _captions(self, id: int) -> Sequence[str | bytes]:
        ending = self._endings[id].decode()
        if not ending:
            return ()
        path = self.folder / f"{os.fsdecode(self._images[id]).rpartition('.')[0]}.{ending}"
        content = file_of(self.folder, path, str(path), "caption file", LARGEST_TEXT)
        return captions_from_json(content) if ending.lower() == "json" else (content,)


class ListedInFolder(ListedPairs):
    """Images of a folder whose captions one file lists; a sample's place is its image's."""

    def where(self, id: int) -> str:
        return str(self.folder / os.fsdecode(self.rows.images[id]))


def _walk(folder: Path) -> tuple[list[str], TextFiles, list[str]]:
    """Images (relative paths, sorted), text files, and images of kinds that are not read."""
    images: list[str] = []
    texts: TextFiles = {kind: {} for kind in (*PLAIN_TEXTS, "json")}
    others: list[str] = []
    status = StatusLine(silent_seconds=SILENT_SECONDS)
    for count, path in enumerate(_files(folder)):
        if status.due():
            status.show(f"listing {folder}  {count:,} files")
        stem, _, ending = path.rpartition(".")
        kind = ending.lower() if stem else ""  # what is called jpg may be a link to a folder
        if kind in READ:
            images.append(path)
        elif kind in texts:  # of a.txt and a.TXT the first, in whatever order they come
            texts[kind][stem] = max(ending, texts[kind].get(stem, ""))
        elif kind in UNREAD:
            others.append(path)
        elif (link := folder / path).is_symlink():
            refuse_gone(link)  # it may have been a folder of images
    status.close()
    return sorted(images), texts, sorted(others)


def _files(folder: Path) -> Iterator[str]:
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
        for place, folders, files in (found for start in starts for found in os.walk(start, onerror=refuse)):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
            if _is_among(place, seen):
                folders.clear()
                continue
            links += [link for link in (Path(place, name) for name in folders) if link.is_symlink()]
            inside = Path(place).relative_to(folder).as_posix()
            for name in files:
                if not name.startswith("."):
                    yield name if inside == "." else f"{inside}/{name}"
        starts = sorted(link for link in links if not _leads_up(link))


def _is_among(folder: str, seen: set[tuple[int, int]]) -> bool:
    """Whether a folder was seen before, under whatever path; it is from now on."""
    status = Path(folder).stat()
    known = (status.st_dev, status.st_ino) in seen
    seen.add((status.st_dev, status.st_ino))
    return known


def _leads_up(link: Path) -> bool:
    """To a folder that the link lies in, be it above the folder that was asked for: nobody means all that is there."""
    return link.parent.resolve().is_relative_to(link.resolve())


def _counted(reason: str, folder: Path, names: list[str]) -> tuple[Fault, ...]:
    lost = UnindexedFaults()
    for name in names:
        lost.note(reason, str(folder / name))
    return lost.faults()
