"""A folder of images with captions beside them: `a.jpg` and `a.txt`, or one captions file for all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from neuclip.data.captions import Captions, Texts, captions_from_json, usable_captions
from neuclip.data.clip_benchmark_layout import DATASET_TYPE, is_retrieval_set, split_lines
from neuclip.data.decoding import DECODED, NOT_DECODED, NOT_DECODED_REASON
from neuclip.data.locations import refuse_gone
from neuclip.data.sample import BadSample, Fault, Sample, UnindexedFaults, shorten
from neuclip.data.source import Source, SourceFiles, file_version
from neuclip.data.tables.columns import CAPTION_COLUMNS, IMAGE_COLUMNS, ColumnChoice, first_line, print_once
from neuclip.data.tables.csv import SEPARATORS, read_csv
from neuclip.data.tables.jsonl import read_jsonl
from neuclip.data.tables.listed import ListedPairs, Row, Rows, read_file, read_image
from neuclip.errors import UserError
from neuclip.formatting import plural
from neuclip.progress import SILENT_SECONDS, StatusLine, track

LARGEST_TEXT = 1 << 24  # bytes
PLAIN_TEXTS = ("txt", "caption")  # endings of files that are one caption
TextFiles = dict[str, dict[str, str]]  # by kind: of each stem its ending as it is written
CAPTIONS_FILES = ("captions.csv", "captions.tsv", "captions.jsonl", "captions.txt", "metadata.csv", "metadata.jsonl")
NUMBERED = re.compile(r"#\d+$")  # Flickr's lists name the captions of an image a.jpg#0, a.jpg#1


class ImageFolder(Source):
    """Images with a text file of the same name. The whole file is one caption, as a `txt` member of a shard is, or with
    `lines` each of its lines; of a JSON file its key "caption" is."""

    kind = "folder"
    captions_are_files = True

    def __init__(
        self,
        name: str,
        folder: Path,
        images: list[str],
        endings: list[str],
        faults: tuple[Fault, ...],
        lines: bool = False,
    ):
        self.name = name
        self.folder = folder
        self.texts_are_captions = not lines
        self.files = (folder,)
        self.faults = faults
        self._images = Texts.of(os.fsencode(image) for image in images)
        self._endings = np.array(endings, dtype="S")

    def image_folder(self) -> Path:
        return self.folder

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        captions = usable_captions(self._captions(id), self.where(id))
        return Sample(read_image(self.folder, self._images[id], self.where(id)), captions)

    def where(self, id: int) -> str:
        return str(self.folder / os.fsdecode(self._images[id]))

    def caption_pieces(self) -> Iterator[Captions]:
        yield Captions.of(map(self._captions_if_any, track(range(len(self)), "reading captions", len(self), "files")))

    def describe_files(self) -> SourceFiles:
        return SourceFiles(len(self), None)

    def file_versions(self) -> Iterator[str]:
        return (file_version(self.folder / os.fsdecode(self._images[id])) for id in range(len(self)))

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
        content = read_file(self.folder, path, str(path), "caption file", LARGEST_TEXT)
        if ending.lower() == "json":
            return captions_from_json(content)
        return (content,) if self.texts_are_captions else split_lines(content)


class ListedInFolder(ListedPairs):
    """Images of a folder whose captions one file lists; a sample's place is its image's."""

    def __init__(self, name: str, path: Path, rows: Rows, faults: tuple[Fault, ...]):
        super().__init__(name, path, rows, path.parent, faults)
        self.kind = "folder"

    def where(self, id: int) -> str:
        return str(self.folder / os.fsdecode(self.rows.images[id]))

    def describe_files(self) -> SourceFiles:
        return SourceFiles(len(self), None)


def open_folder(name: str, folder: Path, choice: ColumnChoice) -> ImageFolder | ListedInFolder | None:
    """Images in the folder and all below, ids in order of their paths; None if there are no images."""
    images, texts, others = list_files(folder)
    if not images:
        return None
    faults = _faults(NOT_DECODED_REASON, folder, others)
    captions_file = find_captions_file(folder)
    if captions_file is not None:
        captions, unmatched = captions_by_image(captions_file, images, choice)
        rows = Rows(Row(os.fsencode(image), tuple(captions.get(image, ()))) for image in images)
        return ListedInFolder(name, captions_file, rows, (*faults, *unmatched))
    endings = [caption_ending(image, texts) for image in images]
    if not any(endings):
        if elsewhere := coco_captions(folder.absolute().parent) or sorted(folder.glob("*.[ct]sv")):
            raise UserError(f"{folder}: {plural(len(images), 'image')} but no captions; did you mean {elsewhere[0]}?")
        raise UserError(
            f"{folder}: {plural(len(images), 'image')} but no captions; put {Path(images[0]).stem}.txt beside "
            f"{images[0]} and so on, or one captions.csv with the columns image and caption into the folder"
        )
    retrieval = is_retrieval_set(folder)
    if retrieval:
        texts["txt"].pop(Path(DATASET_TYPE).stem, None)  # is no caption
    unmatched = _faults("no image", folder, _texts_without_image(texts, images, others))
    return ImageFolder(name, folder, images, endings, (*faults, *unmatched), lines=retrieval)


def coco_captions(folder: Path) -> list[Path]:
    """Where COCO keeps them: beside the folders of its images."""
    return sorted(folder.glob("annotations/captions_*.json"))


def caption_ending(image: str, texts: TextFiles) -> str:
    """What follows the stem in the name of an image's text file: for `a.jpg` txt, jpg.txt, and so on; "" if it has
    none. Text goes before JSON: img2dataset writes both."""
    stem, _, own = image.rpartition(".")
    for kind, files in texts.items():
        if stem in files:
            return files[stem]
        if image in files and kind in PLAIN_TEXTS:
            return f"{own}.{files[image]}"
    return ""


def _texts_without_image(texts: TextFiles, images: list[str], others: list[str]) -> list[str]:
    stems = {image.rpartition(".")[0] for image in (*images, *others)} | set(images)
    folders = {stem.rpartition("/")[0] for stem in stems}  # a text in a folder without images is no caption
    return sorted(
        f"{stem}.{texts[kind][stem]}"
        for kind in PLAIN_TEXTS
        for stem in texts[kind].keys() - stems
        if stem.rpartition("/")[0] in folders
    )


def _faults(reason: str, folder: Path, names: Iterable[str]) -> tuple[Fault, ...]:
    faults = UnindexedFaults()
    for name in names:
        faults.note(reason, str(folder / name))
    return faults.faults()


def find_captions_file(folder: Path) -> Path | None:
    """The one captions file of a folder. Two are refused: nothing says which of them counts."""
    files = [folder / name for name in CAPTIONS_FILES if (folder / name).is_file()]
    if len(files) > 1:
        raise UserError(f"{folder}: has {files[0].name} and {files[1].name}; keep one of them in the folder")
    return files[0] if files else None


def captions_by_image(
    path: Path, images: list[str], choice: ColumnChoice
) -> tuple[dict[str, list[bytes]], tuple[Fault, ...]]:
    """Captions of each image (paths from the folder), those of several rows together; and the rows of no use.

    A row names its image by its path from the folder, or by its file name where only one image is called so.
    """
    by_name: dict[str, str] = {}
    for image in images:
        name = image.rpartition("/")[2]
        by_name[name] = "" if name in by_name else image
    known = set(images)
    captions: dict[str, list[bytes]] = {}
    unmatched = UnindexedFaults()
    for number, row in enumerate(_read_captions_file(path, known | by_name.keys(), choice), start=1):
        name = row.image.decode(errors="surrogateescape").replace("\\", "/").removeprefix("./")
        image = name if name in known else by_name.get(name, "")
        if image and row.reason:
            captions.setdefault(image, [])
            unmatched.note(row.reason, f"{path} row {number}: {name}")
        elif image:
            captions.setdefault(image, []).extend(row.captions)
        else:
            unmatched.note("no image", f"{path} row {number}: {shorten(name) or row.reason}")
    faults = unmatched.faults()
    if not captions:
        first = faults[0].where.removeprefix(f"{path} row 1: ") if faults else "nothing"
        raise UserError(
            f"{path}: names none of the {len(images):,} images beside it; its first row leads to {first}, "
            f"the first image is {images[0]}; give paths from the folder"
        )
    return captions, faults


def _read_captions_file(path: Path, known: set[str], choice: ColumnChoice) -> Iterable[Row]:
    if path.suffix == ".jsonl":
        return read_jsonl(path, choice)
    if path.suffix != ".txt" or has_header(path, choice):
        return read_csv(path, choice)
    return _read_lines(path, known)


def has_header(path: Path, choice: ColumnChoice) -> bool:
    """Whether a text file begins with the names of columns of images and captions."""
    first = first_line(path).decode(errors="surrogateescape").strip().lower()
    fields = [{field.strip().strip('"') for field in first.split(separator)} for separator in SEPARATORS]
    images = {choice.image.lower(), *IMAGE_COLUMNS} - {""}
    captions = {choice.caption.lower(), *choice.caption.lower().split(","), *CAPTION_COLUMNS} - {""}
    return any(names & images and names & captions for names in fields)


def _read_lines(path: Path, known: set[str]) -> Iterator[Row]:
    """`name, separator, caption` without a header: the separator is what ends an image's name in the first line."""
    separator = _separator(path, first_line(path), known)
    with path.open("rb") as file:
        for line in file:
            name, _, caption = line.removeprefix(b"\xef\xbb\xbf").strip().partition(separator)
            if name or caption:
                yield Row(_image_name(name).encode(errors="surrogateescape"), (caption.strip(),))


def _separator(path: Path, first: bytes, known: set[str]) -> bytes:
    for separator in ("\t", ",", ";", "|", " "):
        name, cut, _ = first.partition(separator.encode())
        if cut and _image_name(name) in known:
            print_once(f"{path}: no header, split at the first {SEPARATORS.get(separator, 'blanks')[:-1]} of each line")
            return separator.encode()
    raise UserError(
        f"{path}: its first line does not begin with the name of an image beside it; "
        "give lines of name, tab, caption, or a table with the columns image and caption"
    )


def _image_name(name: bytes) -> str:
    return NUMBERED.sub("", name.decode(errors="surrogateescape").strip())


def list_files(folder: Path) -> tuple[list[str], TextFiles, list[str]]:
    """Images (relative paths, sorted), text files, and images of kinds that are not decoded."""
    images: list[str] = []
    texts: TextFiles = {kind: {} for kind in (*PLAIN_TEXTS, "json")}
    others: list[str] = []
    status = StatusLine(silent_seconds=SILENT_SECONDS)
    for count, path in enumerate(_walk(folder)):
        if status.due():
            status.show(f"listing {folder}  {count:,} files")
        stem, _, ending = path.rpartition(".")
        kind = ending.lower() if stem else ""
        if kind in DECODED:
            images.append(path)
        elif kind in texts:  # of a.txt and a.TXT always the same one, in whatever order they come
            texts[kind][stem] = max(ending, texts[kind].get(stem, ""))
        elif kind in NOT_DECODED:
            others.append(path)
        elif (link := folder / path).is_symlink():
            refuse_gone(link)  # it may have been a folder of images
    status.close()
    return sorted(images), texts, sorted(others)


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
