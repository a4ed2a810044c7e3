"""Small data of every kind, and the doors by which tests go into the data: what they know of its code is here.

`samples` are pairs to write, `write` puts them into files of any kind, `write_tar` makes odd shards by hand; then come
sets with answers, transforms, and last the doors.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import multiprocessing
import pickle
import random
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from neuclip.data import held_out, loader
from neuclip.data import open as opening
from neuclip.data import source as sources
from neuclip.data.convert import convert as convert
from neuclip.data.decoding import FastDecode as FastDecode
from neuclip.data.decoding import decode as decode
from neuclip.data.faults import FaultLog, refuse_bad_source
from neuclip.data.held_out import named as named
from neuclip.data.loader import Batch
from neuclip.data.mixture import Mixture
from neuclip.data.mixture import group_by_image as group_by_image
from neuclip.data.mixture import order_of as order_of
from neuclip.data.mixture import split as split
from neuclip.data.open import data_name as data_name
from neuclip.data.order import Order as Order
from neuclip.data.order import ShardOrder as ShardOrder
from neuclip.data.order import augmentation_seeds as augmentation_seeds
from neuclip.data.source import BadSample as BadSample
from neuclip.data.source import Fault, Source
from neuclip.data.source import Sample as Sample
from neuclip.data.tar import source as tar_source
from neuclip.data.tar.remote import Limits
from neuclip.data.task_sets import DEFAULT_TEMPLATES as DEFAULT_TEMPLATES
from neuclip.data.task_sets import ZeroShotTask, read_puzzles
from neuclip.errors import RunFailed, UserError
from neuclip.settings.reading import read_settings
from tests.builders.images import photo

EXTENSIONS = ("png", "jpg", "webp")
Member = tuple[str, bytes]
Content = list[tuple[bytes, tuple[str, ...]]]


# Images


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


def pairs(*stems: str) -> list[Member]:
    """Members of samples that have these names, and them as captions."""
    numbered = enumerate(stems)
    return [m for n, stem in numbered for m in ((f"{stem}.png", image_bytes(n)), (f"{stem}.txt", stem.encode()))]


def tar_bytes(members: Sequence[Member], form: int = tarfile.USTAR_FORMAT, time: float = 0) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content in members:
            information = tarfile.TarInfo(name)
            information.size, information.mtime = len(content), time
            tar.addfile(information, io.BytesIO(content))
    return stream.getvalue()


def write_tar(path: Path, members: Sequence[Member], form: int = tarfile.USTAR_FORMAT, time: float = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, form, time))
    return path


def write_shards(folder: Path, sizes: Sequence[int]) -> Path:
    """Shards of the given numbers of pairs; pair k is named and drawn after k."""
    first = 0
    for shard, size in enumerate(sizes):
        members = [member for number in range(first, first + size) for member in pair(number)]
        write_tar(folder / f"{shard:05d}.tar", members)
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


def write_images(folder: Path, pairs: Sequence[Pair]) -> Path:
    for one in pairs:
        (folder / one.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / one.name).write_bytes(one.image)
    return folder


def _members(pairs: Sequence[Pair]) -> list[Member]:
    members = []
    for name, image, captions in pairs:
        stem = name.rpartition(".")[0]
        text = [(f"{stem}.txt", captions[0].encode())] if len(captions) == 1 else []
        several = [(f"{stem}.json", json.dumps({"caption": captions}).encode())] if len(captions) > 1 else []
        members += [(name, image), *text, *several]
    return members


def _tar(folder: Path, pairs: Sequence[Pair]) -> Path:
    return write_tar(folder / "0.tar", _members(pairs))


def _shards(folder: Path, pairs: Sequence[Pair]) -> Path:
    cuts = (0, 2, 2, len(pairs))  # one of them is empty
    for shard in range(3):
        write_tar(folder / f"{shard}.tar", _members(pairs[cuts[shard] : cuts[shard + 1]]))
    return folder


def _packed(folder: Path, pairs: Sequence[Pair]) -> Path:
    (folder / "0.tar.gz").write_bytes(gzip.compress(tar_bytes(_members(pairs))))
    return folder / "0.tar.gz"


def _csv(folder: Path, pairs: Sequence[Pair], separator: str = ",", ending: str = "csv") -> Path:
    write_images(folder, pairs)
    most = max(len(one.captions) for one in pairs)
    rows = [[one.name, *one.captions, *[""] * (most - len(one.captions))] for one in pairs]
    names = ["text"] if most == 1 else [f"caption_{number}" for number in range(most)]
    with (folder / f"pairs.{ending}").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows([["path", *names], *rows])
    return folder / f"pairs.{ending}"


def _jsonl(folder: Path, pairs: Sequence[Pair]) -> Path:
    write_images(folder, pairs)
    lines = [json.dumps({"file_name": one.name, "caption": one.captions}) for one in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder / "pairs.jsonl"


def _folder(folder: Path, pairs: Sequence[Pair]) -> Path:
    write_images(folder, pairs)
    for name, content in _members(pairs):
        (folder / name).write_bytes(content)
    (folder / ".hidden.jpg").write_bytes(b"x")
    return folder


def _listed_folder(folder: Path, pairs: Sequence[Pair]) -> Path:
    """One row for each caption."""
    rows = [Pair(one.name, one.image, (text,)) for one in pairs for text in one.captions]
    write_images(folder, pairs)
    _csv(folder, rows, "\t", "tsv").rename(folder / "captions.tsv")
    return folder


def write_parquet(path: Path, columns: dict[str, Any], **options: int) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, **options)
    return path


def _columns(pairs: Sequence[Pair], images: str) -> dict[str, Any]:
    values: list[Any] = [one.image for one in pairs]
    if images == "paths":
        values = [one.name for one in pairs]
    elif images == "structs":
        values = [{"bytes": one.image if n % 2 else None, "path": one.name} for n, one in enumerate(pairs)]
    return {"image": values, "caption": [list(one.captions) for one in pairs]}


def _parquet(folder: Path, pairs: Sequence[Pair], images: str = "bytes") -> Path:
    if images != "bytes":
        write_images(folder, pairs)
    return write_parquet(folder / "pairs.parquet", _columns(pairs, images), row_group_size=4)


def _parquet_folder(folder: Path, pairs: Sequence[Pair]) -> Path:
    for part in range(3):
        columns = _columns(pairs[part * 4 : part * 4 + 4], "bytes")
        write_parquet(folder / "data" / f"train-{part:05d}-of-00003.parquet", columns)
    return folder / "data"


def _saved(folder: Path, pairs: Sequence[Pair]) -> Path:
    """As Hugging Face's save_to_disk leaves it: Arrow streams, and a file that names them."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    for part, rows in enumerate((pairs[:3], pairs[3:])):
        images = [{"bytes": one.image, "path": None} for one in rows]
        table = pyarrow.table({"image": images, "caption": [list(one.captions) for one in rows]})
        with pyarrow.ipc.new_stream(str(folder / f"{part}.arrow"), table.schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"{n}.arrow"} for n in range(2)]}))
    return folder


def _coco(folder: Path, pairs: Sequence[Pair]) -> Path:
    write_images(folder / "train2017", pairs)
    listed = {
        "info": {"year": 2017},
        "images": [{"id": 100 - n, "file_name": one.name, "height": 1} for n, one in enumerate(pairs)],
        "annotations": [{"image_id": 100 - n, "caption": text} for n, one in enumerate(pairs) for text in one.captions],
    }
    (folder / "annotations").mkdir()
    (folder / "annotations" / "captions_train2017.json").write_text(json.dumps(listed))
    return folder / "annotations" / "captions_train2017.json"


def karpathy_entries(pairs: Sequence[Pair], splits: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"filename": one.name, "split": split, "sentences": [{"raw": text, "sentid": 0} for text in one.captions]}
        for one, split in zip(pairs, splits, strict=True)
    ]


def _karpathy(folder: Path, pairs: Sequence[Pair]) -> Path:
    write_images(folder, pairs)
    splits = ["restval" if number % 2 else "train" for number in range(len(pairs))]
    (folder / "dataset_x.json").write_text(json.dumps({"images": karpathy_entries(pairs, splits), "dataset": "x"}))
    return folder / "dataset_x.json"


_WRITERS: dict[str, Callable[[Path, Sequence[Pair]], Path]] = {
    "tar": _tar,
    "shards": _shards,
    "packed tar": _packed,
    "csv": _csv,
    "semicolons": lambda folder, pairs: _csv(folder, pairs, ";"),
    "tsv": lambda folder, pairs: _csv(folder, pairs, "\t", "tsv"),
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


def table(folder: Path, text: str | bytes, name: str = "pairs.csv") -> Path:
    """A table beside the images a.jpg and b.jpg."""
    folder.mkdir(parents=True, exist_ok=True)
    for image in ("a.jpg", "b.jpg"):
        (folder / image).write_bytes(photo(0))
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


# Sets with answers

CLASSNAMES = ("cat", "dog", "bird", "", "fish", "horse")
TEMPLATES = ("a photo of a {c}", "{c}")
PUZZLES = [
    ("winter", ["snow", "hot dog", "Sun", "ice", "car"], ["snow", "ice"]),
    ("food", ["hot dog", "car", "apple", "snow", "ice", "Sun"], ["apple", "hot dog"]),
]


def npy(*numbers: int) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(numbers))
    return stream.getvalue()


def metadata(number: int) -> tuple[int, ...]:
    return number % 3, 2000 + number, number % 5, 1


def sample(number: int, *, with_metadata: bool = False) -> list[Member]:
    key = f"s{number:07d}"
    members = [(f"{key}.cls", str(number % 6).encode()), (f"{key}.png", image_bytes(number))]
    return [*members, *([(f"{key}.npy", npy(*metadata(number)))] if with_metadata else [])]


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
        numbers = range(first, first + size)
        members = [member for number in numbers for member in sample(number, with_metadata=with_metadata)]
        write_tar(folder / "test" / f"{shard}.tar", members)
        first += size
    (folder / "test" / "nshards.txt").write_text(f"{len(sizes)}\n")
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in classnames))
    if templates is not None:
        (folder / "zeroshot_classification_templates.txt").write_text("".join(f"{line}\n" for line in templates))
    return folder


def write_class_folders(folder: Path, **counts: int) -> Path:
    """counts: how many images of each class."""
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for _ in range(count):
            (folder / name / f"{number:03d}.png").write_bytes(image_bytes(number))
            number += 1
    return folder


def write_puzzle_images(folder: Path, names: Sequence[str] = ("snow", "hot_dog", "sun", "ice", "car", "apple")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        ending = "jpg" if number % 2 else "png"
        (folder / f"{name}.{ending}").write_bytes(image_bytes(number, ending))


def write_puzzle_table(path: Path, rows: Sequence[Any] = PUZZLES, spell: Callable[[Any], str] = json.dumps) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(["ID", "cue", "associations", "candidates"])
        for number, (cue, candidates, associations) in enumerate(rows):
            writer.writerow([number, cue, spell(associations), spell(candidates)])


# Transforms and a tokenizer that can be pickled, so that workers of every kind can be given them


def plain(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB").resize((4, 4)))).permute(2, 0, 1)


def noisy(image: Image.Image) -> torch.Tensor:
    """Draws from both generators that transforms use."""
    return plain(image).float() + torch.rand(1) + random.random()


def spawned(image: Image.Image) -> torch.Tensor:
    """As `noisy`, but only in a process that began afresh: a fork would have its parent's modules and files."""
    assert type(multiprocessing.current_process()).__name__ == "SpawnProcess"
    return noisy(image)


def afresh(image: Image.Image) -> torch.Tensor:
    assert type(multiprocessing.current_process()).__name__ in ("SpawnProcess", "ForkServerProcess")
    return plain(image)


def failing(image: Image.Image) -> torch.Tensor:
    raise ZeroDivisionError("no width")


def tokenize(captions: list[str]) -> torch.Tensor:
    """The number that the caption ends with."""
    return torch.tensor([[int((caption.split() or ["-1"])[-1])] for caption in captions])


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


# Doors


def open_source(address: object, *, cache_size: int = 10**9, timeout: float = 20, tries: int = 3, **columns: str):
    """`cache_size`, `timeout` and `tries` are limits of remote data."""
    limits = Limits(cache_size, timeout, attempts=tries, first_wait=0)
    return opening.open_source(str(address), limits=limits, **columns)


def training_data(*flags: str) -> Source:
    return opening.open_training_data(settings(*flags))


def retrieval(address: object, *flags: str) -> Source:
    """One sample per image, as what is measured on is opened."""
    return held_out.open_retrieval(str(address), settings(*flags))


def held_out_sets(*flags: str) -> dict[str, Source]:
    return held_out.HeldOutSets.open(settings("--evaluation.zero_shot", "none", *flags)).retrieval


def held_out_addresses(*flags: str) -> tuple[str, ...]:
    """What a run is measured on, of retrieval."""
    return held_out.held_out_addresses(settings(*flags))[0]


def zero_shot_task(folder: Path, name: str = "") -> ZeroShotTask:
    return ZeroShotTask.open(folder, name=name)


def puzzles(folder: Path) -> tuple[list[tuple[str, tuple[int, ...], tuple[int, ...]]], Source]:
    """Of each puzzle its cue, the ids of its candidates, and those of its associations among them."""
    found = read_puzzles(folder)
    return [(one.cue, one.candidates, one.associations) for one in found.puzzles], found.source


def settings(*flags: str):
    return read_settings(None, list(flags))


def description(order: Order) -> tuple[int, str]:
    """What a checkpoint stores, so that no run continues in another order."""
    return order.size, order.description


def batches(
    source: Source,
    *,
    steps: int = 1,
    first: int = 0,
    seed: int = 0,
    batch_size: int = 6,
    order: Order | None = None,
    transform: Callable[[Image.Image], torch.Tensor] = plain,
    tokens: Callable[[list[str]], torch.Tensor] = tokenize,
    workers: int = 0,
    **options: Any,
) -> Iterator[Batch]:
    """Those of training from sample `first` on; `options` are rank, ranks and start_method."""
    return _batches(source, seed, batch_size, order, transform, tokens, workers, options).steps(first, steps)


def windows(source: Source, *, seed: int, batch_size: int) -> Any:
    """What a data worker has: windows[start] is the batch of the samples from `start` on."""
    return _batches(source, seed, batch_size, None, plain, tokenize, 0, {}).windows


def _batches(source, seed, batch_size, order, transform, tokens, workers, options) -> loader.Batches:
    return loader.Batches(
        source,
        order or Order(len(source), seed),
        batch_size=batch_size,
        transform=transform,
        tokenize=tokens,
        seed=seed,
        workers=workers,
        **options,
    )


def read_images(source: Source, *, batch_size: int = 4, transform=plain, workers: int = 0, **options: Any):
    """Batches of evaluation: every id once, in order."""
    return loader.read_images(source, transform=transform, batch_size=batch_size, workers=workers, **options)


def content(source: Source) -> Content:
    return [(one.image, one.captions) for one in (source[id] for id in range(len(source)))]


def captions(source: Source) -> list[tuple[str, ...]]:
    return [captions for _, captions in content(source)]


def outcomes(source: Source) -> list[str]:
    """Of each id its first caption, or the reason why it is bad."""
    results = []
    for id in range(len(source)):
        try:
            results.append(source[id].captions[0])
        except BadSample as bad:
            results.append(bad.reason)
    return results


def fault_of(source: Source, id: int) -> BadSample:
    with pytest.raises(BadSample) as caught:
        source[id]
    return caught.value


def faults(source: Source) -> list[tuple[str, str, int]]:
    """What could not be indexed: reason, place, how many."""
    assert all(fault.id == -1 for fault in source.faults)
    return [(fault.reason, fault.where, fault.times) for fault in source.faults]


def fault_counts(source: Source) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason, _, times in faults(source):
        counts[reason] = counts.get(reason, 0) + times
    return counts


def fingerprint(source: Source) -> tuple[int, str]:
    found, _ = sources.fingerprint(source)
    return int(found["count"]), str(found["sha256"])


def caption_counts(source: Source) -> str:
    return str(sources.fingerprint(source)[1])


def parts(source: Source) -> tuple[Source, ...]:
    return source.parts if isinstance(source, Mixture) else (source,)


def shard_ends(source: Source) -> list[int]:
    """Of remote data: the id after the last of each shard."""
    assert source.shard_ends is not None
    return source.shard_ends.tolist()


class RunsLog(FaultLog):
    """As a run uses it, one rank alone."""

    def note_batch(self, batch: Batch) -> None:
        self.add(batch.faults)
        if message := self.note(len(batch.ids), len(batch.faults)):
            raise RunFailed(message)

    def note_source(self, source: Source) -> None:
        self.add(source.faults)


def fault_log(path: Path, limit: float) -> RunsLog:
    """What a run lists and counts: `note_batch` takes a batch, `note_source` what could not be indexed."""
    return RunsLog(path, limit)


def refused_for_unindexed(source: Source, limit: float) -> str:
    """Why no run is started on so much that could not be indexed; "" if one may."""
    try:
        refuse_bad_source(source, limit)
    except RunFailed as refused:
        return str(refused)
    return ""


def travelled(source: Any) -> Any:
    """As it arrives in another process."""
    return pickle.loads(pickle.dumps(source))


def refusal(action: object, kind: type[Exception] = UserError, **columns: Any) -> str:
    """The one line with which an address, or a call, is refused."""
    with pytest.raises(kind) as caught:
        action() if callable(action) else open_source(action, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def failure(action: Callable[[], object]) -> str:
    """The one line with which a run ends because of the machine."""
    return refusal(action, RunFailed)


def batch_of(size: int, bad: Sequence[int], reason: str = "image is empty") -> Batch:
    """A batch of ids 0..size-1 in which these are bad."""
    faults = tuple(Fault(id, reason, f"0.tar: {id}.png") for id in bad)
    return Batch(torch.zeros(size, 3, 1, 1), torch.zeros(size, 1), torch.arange(size), faults)


def unindexed(reason: str, where: str, times: int = 1) -> Fault:
    return Fault(-1, reason, where, times)


def open_shards_at_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    kept = lru_cache(number)(tar_source._open.__wrapped__)
    monkeypatch.setattr(tar_source, "_open", kept)
