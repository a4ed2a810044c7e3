"""Small data of every kind; tests/builders/reading.py opens and reads them.

`samples` are pairs to write, `write` puts them into files of any kind, `write_tar` makes odd shards by hand; then come
sets with answers, and transforms.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import multiprocessing
import random
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from tests.builders.images import photo

EXTENSIONS = ("png", "jpg", "webp")
Member = tuple[str, bytes]


# Images


@cache
def image_bytes(number: int, extension: str = "png", size: tuple[int, int] = (12, 10)) -> bytes:
    """A small gradient with noise, different for every number."""
    draw = np.random.default_rng(number)
    noise = draw.integers(0, 50, (size[1], size[0], 3))
    pixels = np.linspace(0, 200, size[0] * size[1] * 3).reshape(size[1], size[0], 3) + noise
    return encoded(Image.fromarray(pixels.astype(np.uint8)), {"jpg": "JPEG"}.get(extension, extension.upper()))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def png(width: int, height: int, bits: int, kind: int, rows: bytes) -> bytes:
    """A PNG by hand: Pillow reads 16 bits per channel and sizes that no memory holds, but writes neither."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in [*chunks, (b"IEND", b"")]
    )


# Shards by hand


def pair(number: int) -> list[Member]:
    extension = EXTENSIONS[number % 3]
    image = (f"{number:05d}.{extension}", image_bytes(number, extension))
    return [image, (f"{number:05d}.txt", f"image {number}".encode())]


def numbered(*numbers: int) -> list[Member]:
    return [member for number in numbers for member in pair(number)]


def pairs(*stems: str) -> list[Member]:
    """Members of samples that have these names, and them as captions."""
    named = enumerate(stems)
    return [m for n, stem in named for m in ((f"{stem}.png", image_bytes(n)), (f"{stem}.txt", stem.encode()))]


def tar_bytes(members: Sequence[Member], form: int = tarfile.USTAR_FORMAT, time: float = 0) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content in members:
            information = tarfile.TarInfo(name)
            information.size, information.mtime = len(content), time
            tar.addfile(information, io.BytesIO(content))
    return stream.getvalue()


def write_tar(path: Path, members: Sequence[Member], form: int = tarfile.USTAR_FORMAT, time: float = 0) -> Path:
    """Packed if its name ends in gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = tar_bytes(members, form, time)
    path.write_bytes(gzip.compress(content) if path.name.lower().endswith("gz") else content)
    return path


def write_shards(folder: Path, sizes: Sequence[int]) -> Path:
    """Shards of the given numbers of pairs; pair k is named and drawn after k."""
    first = 0
    for shard, size in enumerate(sizes):
        write_tar(folder / f"{shard:05d}.tar", numbered(*range(first, first + size)))
        first += size
    return folder


def header_of(content: bytes, number: int) -> int:
    """Where the header of a member of a tar begins."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return tar.getmembers()[number].offset_data - 512


# The same pairs in every kind of file


class Pair(NamedTuple):
    name: str
    image: bytes
    captions: tuple[str, ...]


def samples(count: int = 11) -> list[Pair]:
    """Sorted by name, as ids are, with captions that are hard to write."""
    numbers = sorted(range(count), key=lambda number: (number % 2, number))
    named = ((number, f"{'ab'[number % 2]}/{number:03d}.jpg") for number in numbers)
    return [Pair(name, photo(n), (f'photo {n}, with a comma; «été» "quoted"',)) for n, name in named]


def several(captions: Sequence[Sequence[str]]) -> list[Pair]:
    return [Pair(f"{number:03d}.png", image_bytes(number), tuple(texts)) for number, texts in enumerate(captions)]


def write(kind: str, folder: Path, pairs: Sequence[Pair], *, spoilt: Sequence[int] = ()) -> str:
    """The address of the pairs as one of KINDS; the images of `spoilt` do not decode."""
    whole = [one._replace(image=b"no image") if number in spoilt else one for number, one in enumerate(pairs)]
    folder.mkdir(parents=True, exist_ok=True)
    return str(_WRITERS[kind](folder, whole))


def write_files(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Files by their paths; "" is some image where the name is one's."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content == "" and path.suffix.lower() in (".jpg", ".png"):
            content = photo(0)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write_images(folder: Path, pairs: Sequence[Pair]) -> Path:
    return write_files(folder, {one.name: one.image for one in pairs})


def table(folder: Path, text: str | bytes, name: str = "pairs.csv") -> Path:
    """A table beside the images a.jpg and b.jpg."""
    return write_files(folder, {"a.jpg": photo(0), "b.jpg": photo(0), name: text}) / name


def _members(pairs: Sequence[Pair]) -> list[Member]:
    members = []
    for name, image, captions in pairs:
        stem = name.rpartition(".")[0]
        text = [(f"{stem}.txt", captions[0].encode())] if len(captions) == 1 else []
        several = [(f"{stem}.json", json.dumps({"caption": captions}).encode())] if len(captions) > 1 else []
        members += [(name, image), *text, *several]
    return members


def _shards(folder: Path, pairs: Sequence[Pair]) -> Path:
    for shard, part in enumerate((pairs[:2], [], pairs[2:])):  # one of them is empty
        write_tar(folder / f"{shard}.tar", _members(part))
    return folder


def _csv(folder: Path, pairs: Sequence[Pair], separator: str = ",", name: str = "pairs.csv") -> Path:
    write_images(folder, pairs)
    most = max(len(one.captions) for one in pairs)
    rows = [[one.name, *one.captions, *[""] * (most - len(one.captions))] for one in pairs]
    names = ["text"] if most == 1 else [f"caption_{number}" for number in range(most)]
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows([["path", *names], *rows])
    return folder / name


def _jsonl(folder: Path, pairs: Sequence[Pair]) -> Path:
    lines = [json.dumps({"file_name": one.name, "caption": one.captions}) for one in pairs]
    return write_files(write_images(folder, pairs), {"pairs.jsonl": "\n".join(lines)}) / "pairs.jsonl"


def _folder(folder: Path, pairs: Sequence[Pair]) -> Path:
    return write_files(folder, {**dict(_members(pairs)), ".hidden.jpg": b"x"})


def _listed_folder(folder: Path, pairs: Sequence[Pair]) -> Path:
    """One row for each caption."""
    rows = [Pair(one.name, one.image, (text,)) for one in pairs for text in one.captions]
    write_images(folder, pairs)
    return _csv(folder, rows, "\t", "captions.tsv").parent


def write_parquet(path: Path, columns: dict[str, Any], **options: int) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, **options)
    return path


def _columns(pairs: Sequence[Pair], images: str = "bytes") -> dict[str, Any]:
    kinds: dict[str, list[Any]] = {
        "bytes": [one.image for one in pairs],
        "paths": [one.name for one in pairs],
        "structs": [{"bytes": one.image if n % 2 else None, "path": one.name} for n, one in enumerate(pairs)],
    }
    return {"image": kinds[images], "caption": [list(one.captions) for one in pairs]}


def _parquet(folder: Path, pairs: Sequence[Pair], images: str = "bytes") -> Path:
    if images != "bytes":
        write_images(folder, pairs)
    return write_parquet(folder / "pairs.parquet", _columns(pairs, images), row_group_size=4)


def _parquet_folder(folder: Path, pairs: Sequence[Pair]) -> Path:
    for part in range(3):
        columns = _columns(pairs[part * 4 : part * 4 + 4])
        write_parquet(folder / "data" / f"train-{part:05d}-of-00003.parquet", columns)
    return folder / "data"


def _saved(folder: Path, pairs: Sequence[Pair]) -> Path:
    """As Hugging Face's save_to_disk leaves it: Arrow streams, and a file that names them."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    for part, rows in enumerate((pairs[:3], pairs[3:])):
        images = [{"bytes": one.image, "path": None} for one in rows]
        columns = pyarrow.table({"image": images, "caption": [list(one.captions) for one in rows]})
        with pyarrow.ipc.new_stream(str(folder / f"{part}.arrow"), columns.schema) as stream:
            stream.write_table(columns)
    state = json.dumps({"_data_files": [{"filename": f"{n}.arrow"} for n in range(2)]})
    return write_files(folder, {"dataset_info.json": "{}", "state.json": state})


def _coco(folder: Path, pairs: Sequence[Pair]) -> Path:
    write_images(folder / "train2017", pairs)
    listed = {
        "info": {"year": 2017},
        "images": [{"id": 100 - n, "file_name": one.name, "height": 1} for n, one in enumerate(pairs)],
        "annotations": [{"image_id": 100 - n, "caption": text} for n, one in enumerate(pairs) for text in one.captions],
    }
    name = "annotations/captions_train2017.json"
    return write_files(folder, {name: json.dumps(listed)}) / name


def karpathy_entries(pairs: Sequence[Pair], splits: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"filename": one.name, "split": split, "sentences": [{"raw": text, "sentid": 0} for text in one.captions]}
        for one, split in zip(pairs, splits, strict=True)
    ]


def _karpathy(folder: Path, pairs: Sequence[Pair]) -> Path:
    splits = ["restval" if number % 2 else "train" for number in range(len(pairs))]
    listed = json.dumps({"images": karpathy_entries(pairs, splits), "dataset": "x"})
    return write_files(write_images(folder, pairs), {"dataset_x.json": listed}) / "dataset_x.json"


_WRITERS: dict[str, Callable[[Path, Sequence[Pair]], Path]] = {
    "tar": lambda folder, pairs: write_tar(folder / "0.tar", _members(pairs)),
    "shards": _shards,
    "packed tar": lambda folder, pairs: write_tar(folder / "0.tar.gz", _members(pairs)),
    "csv": _csv,
    "tsv": lambda folder, pairs: _csv(folder, pairs, "\t", "pairs.tsv"),
    "jsonl": _jsonl,
    "folder": _folder,
    "folder with a captions file": _listed_folder,
    "parquet": _parquet,
    "parquet of paths": lambda folder, pairs: _parquet(folder, pairs, "paths"),
    "parquet of structs": lambda folder, pairs: _parquet(folder, pairs, "structs"),
    "folder of parquet": _parquet_folder,
    "saved data set": _saved,
    "coco": _coco,
    "karpathy": _karpathy,
}
KINDS = tuple(_WRITERS)


# Sets with answers

CLASSNAMES = ("cat", "dog", "bird", "", "fish", "horse")
TEMPLATES = ("a photo of a {c}", "{c}")
PUZZLES = [
    ("winter", ["snow", "hot dog", "Sun", "ice", "car"], ["snow", "ice"]),
    ("food", ["hot dog", "car", "apple", "snow", "ice", "Sun"], ["apple", "hot dog"]),
]
PUZZLE_IMAGES = ("snow.png", "hot_dog.jpg", "sun.png", "ice.jpg", "car.png", "apple.jpg")


def npy(*numbers: int, kind: str = "int64") -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(numbers, dtype=kind), allow_pickle=True)
    return stream.getvalue()


def metadata(number: int) -> tuple[int, ...]:
    return number % 3, 2000 + number, number % 5, 1


def labelled(*numbers: int, with_metadata: bool = False) -> list[Member]:
    """Members of a classification set: image k has the label k % 6."""
    members = []
    for number in numbers:
        key = f"s{number:07d}"
        members += [(f"{key}.cls", str(number % 6).encode()), (f"{key}.png", image_bytes(number))]
        members += [(f"{key}.npy", npy(*metadata(number)))] if with_metadata else []
    return members


def write_task(
    folder: Path,
    *,
    sizes: Sequence[int] = (17, 17),
    classnames: Sequence[str] = CLASSNAMES,
    templates: Sequence[str] | None = TEMPLATES,
    with_metadata: bool = False,
) -> Path:
    """A classification webdataset of so many samples per shard; sample k has the label k % 6."""
    first = 0
    for shard, size in enumerate(sizes):
        members = labelled(*range(first, first + size), with_metadata=with_metadata)
        write_tar(folder / "test" / f"{shard}.tar", members)
        first += size
    lines = {"test/nshards.txt": [str(len(sizes))], "classnames.txt": classnames}
    lines |= {} if templates is None else {"zeroshot_classification_templates.txt": templates}
    return write_files(folder, {name: "".join(f"{line}\n" for line in text) for name, text in lines.items()})


def write_class_folders(folder: Path, **counts: int) -> Path:
    """counts: how many images of each class."""
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for _ in range(count):
            (folder / name / f"{number:03d}.png").write_bytes(image_bytes(number))
            number += 1
    return folder


def write_puzzles(
    folder: Path, table: str = "x.csv", rows: Sequence[Any] = PUZZLES, spell: Callable[[Any], str] = json.dumps
) -> Path:
    """Puzzles of this table beside their images."""
    images = {name: image_bytes(number, name[-3:]) for number, name in enumerate(PUZZLE_IMAGES)}
    stream = io.StringIO(newline="")
    if table.endswith(".jsonl"):
        for cue, candidates, right in rows:
            stream.write(json.dumps({"cue": cue, "associations": right, "candidates": candidates}) + "\n")
    else:
        writer = csv.writer(stream, delimiter="\t" if table.endswith(".tsv") else ",")
        writer.writerow(["ID", "cue", "associations", "candidates"])
        writer.writerows([n, cue, spell(right), spell(candidates)] for n, (cue, candidates, right) in enumerate(rows))
    return write_files(folder, {**images, table: stream.getvalue()})


# Transforms and a tokenizer that can be pickled, so that workers of every kind can be given them


def plain(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB").resize((4, 4)))).permute(2, 0, 1)


def noisy(image: Image.Image) -> torch.Tensor:
    """Draws from both generators that transforms use."""
    return plain(image).float() + torch.rand(1) + random.random()


def spawned(image: Image.Image) -> torch.Tensor:
    """As `noisy`, but only in a process that began afresh: a fork would have its parent's modules and files."""
    assert type(multiprocessing.current_process()).__name__ in ("SpawnProcess", "ForkServerProcess")
    return noisy(image)


def failing(image: Image.Image) -> torch.Tensor:
    raise ZeroDivisionError("no width")


def tokenize(captions: list[str]) -> torch.Tensor:
    """The number that the caption ends with."""
    return torch.tensor([[int((caption.split() or ["-1"])[-1])] for caption in captions])


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])
