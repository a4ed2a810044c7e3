"""The index of a tar shard: the position of each sample. It is stored beside the shard, and rebuilt if that changes."""

from __future__ import annotations

import hashlib
import json
import mmap
import multiprocessing
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from neuclip.data.decoding import DECODED, NOT_DECODED, NOT_DECODED_REASON
from neuclip.data.faults import list_faults
from neuclip.data.source import DEFAULT_KEY, caption_facts, captions_from_json
from neuclip.data.tar.walk import BLOCK, Damage, walk
from neuclip.files import cache_folder, new_file, open_regular, reading
from neuclip.machine import available_cores
from neuclip.progress import track

FORMAT = 9  # increase it when the meaning of a stored field changes: old index files are then built again
INDEX_SUFFIX = ".index.npz"  # of the index beside a shard
NO_CAPTION, TEXT_CAPTION, JSON_CAPTION = 0, 1, 2
NO_LABEL = -1
EVERY_LINE = "lines of txt"  # used in place of a caption key: every line of a `txt` member is a caption
MOST_CAPTION_BYTES = 1 << 20  # of a `txt` or `json` member; a longer one is not a caption
MOST_LABEL_BYTES = 20
IN_SERIES = 3  # up to this many missing indexes are built in this process
SMALL_INDEX = 1 << 20  # an index of up to this many bytes is accepted for any shard

# 31 bytes per sample. Members start at multiples of 512 bytes: a 32-bit block number reaches 2 TB.
ROW = np.dtype(
    [
        *(("image_block", "<u4"), ("image_size", "<u4"), ("caption_block", "<u4"), ("caption_size", "<u4")),
        *(("caption_kind", "u1"), ("label", "<i4"), ("captions", "<u2"), ("hash", "<u8")),
    ]
)
IMAGES = frozenset(ending.encode() for ending in DECODED)
OTHER_IMAGES = frozenset(ending.encode() for ending in NOT_DECODED)

Note = tuple[str, str, int]  # reason, place (to be appended to the name of the shard), number of samples


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard in the order of their first members."""

    rows: np.ndarray  # (n,) of ROW
    notes: tuple[Note, ...]  # members that could not become a sample
    images: str  # digest of all images


@dataclass(slots=True)
class _Sample:
    image: tuple[int, int] = (0, 0)  # offset, size
    caption: tuple[int, int] = (0, 0)
    kind: int = NO_CAPTION
    label: int = NO_LABEL
    unsupported: bool = False  # it has an image in a format that is not supported


def build_index(shard: Path, caption_key: str = "") -> ShardIndex:
    """Walk the headers of a plain tar and group its members into samples. With a `caption_key`, captions are read only
    from that key of `json` members; with EVERY_LINE, they are the lines of `txt` members."""
    with reading(shard, "check its permissions and the disk"), open_regular(shard) as file:
        return index_of_file(file, caption_key)


def index_of_file(file: BinaryIO, caption_key: str) -> ShardIndex:
    if os.fstat(file.fileno()).st_size == 0:
        return ShardIndex(np.zeros(0, ROW), (("shard is empty", "", 1),), "")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _group(data, caption_key)


def _group(data: mmap.mmap, caption_key: str) -> ShardIndex:
    """Group members into samples: members with the same path up to the last dot are one sample. `0.seg.png` belongs to
    the sample `0` if that exists, as in webdataset; `v1.2-000.jpg` and `v1.2-000.txt` are a sample `v1.2-000`."""
    members, damage = walk(data)
    samples: dict[bytes, _Sample] = {}
    notes: list[Note] = []
    for name, offset, size in members:
        key, ending = key_and_ending(name)
        if not ending:
            continue
        sample = samples.get(key)
        if sample is None:
            sample = samples[key] = _Sample()
        if ending in IMAGES:
            if sample.image[0]:
                notes.append(("name occurs twice", f": {_shown(name)}", 1))
            else:
                sample.image = (offset, size)
        elif ending == b"txt" and sample.kind != TEXT_CAPTION and caption_key in ("", EVERY_LINE):
            sample.caption, sample.kind = (offset, size), TEXT_CAPTION
        elif ending == b"json" and sample.kind == NO_CAPTION:
            sample.caption, sample.kind = (offset, size), JSON_CAPTION
        elif ending == b"cls":
            sample.label = _label(data[offset : offset + size]) if size <= MOST_LABEL_BYTES else NO_LABEL
        elif ending in OTHER_IMAGES:
            sample.unsupported = True
    if damage:
        notes.append(_note_damage(damage, samples))
    rows, checksums = _rows(data, samples, caption_key, notes)
    short_notes = tuple((fault.reason, fault.where, fault.times) for fault in list_faults(notes))
    images = hashlib.sha256(checksums.tobytes()).hexdigest()[:32]
    return ShardIndex(np.array(rows, dtype=ROW), short_notes, images)


def _note_damage(damage: Damage, samples: dict[bytes, _Sample]) -> Note:
    """Remove the samples that lost a member, and return the note of the damage. Using the rest of such a sample might
    pair its image with a wrong caption."""
    lost = {key for name in damage.lost if (parts := key_and_ending(name))[1] and (key := parts[0])}
    for key in lost:
        samples.pop(key, None)
    return damage.reason, f" at byte {damage.position}", max(1, len(lost))


def _rows(
    data: mmap.mmap, samples: dict[bytes, _Sample], caption_key: str, notes: list[Note]
) -> tuple[list[tuple[Any, ...]], array[int]]:
    """A row for each sample, and the checksum of its image. Samples without an image or caption are added to `notes`.
    The checksums cost little, because the walk has read these bytes from disk anyway."""
    rows: list[tuple[Any, ...]] = []
    checksums = array("I")
    with memoryview(data) as view:
        for key, sample in samples.items():
            first = _first_part(key)
            if first != key and first in samples and samples[first].image[0]:
                continue
            (offset, size), (at, length) = sample.image, sample.caption
            if not offset or size >= 1 << 32 or length >= 1 << 32:
                notes.append((NOT_DECODED_REASON if sample.unsupported else "no image", f": {_shown(key)}", 1))
                continue
            if first != key and sample.kind == NO_CAPTION and sample.label == NO_LABEL:
                notes.append(("caption is missing", f": {_shown(key)}", 1))
                continue
            with view[offset : offset + size] as image:
                checksums.append(zlib.crc32(image))
            raw = data[at : at + length] if length <= MOST_CAPTION_BYTES else b""
            facts = caption_facts(captions_of(raw, sample.kind, caption_key))
            rows.append((offset // BLOCK, size, at // BLOCK, length, sample.kind, sample.label, *facts))
    return rows, checksums


def captions_of(raw: bytes, kind: int, caption_key: str) -> tuple[str | bytes, ...]:
    """The captions in a member of this kind, not yet cleaned."""
    if kind == JSON_CAPTION:
        return captions_from_json(raw, DEFAULT_KEY if caption_key in ("", EVERY_LINE) else caption_key)
    if kind == TEXT_CAPTION:
        return tuple(raw.split(b"\n")) if caption_key == EVERY_LINE else (raw,)
    return ()


def key_and_ending(name: bytes) -> tuple[bytes, bytes]:
    """The key of a member's sample, and its ending in lower case. The ending is empty for hidden files and for names
    without a dot, which belong to no sample."""
    start = name.rfind(b"/") + 1
    dot = name.rfind(b".", start)
    return (name[:dot], name[dot + 1 :].lower()) if dot > start and not name.startswith(b".", start) else (name, b"")


def _first_part(key: bytes) -> bytes:
    """The key up to the first dot of the file name, which is what webdataset calls the key."""
    dot = key.find(b".", key.rfind(b"/") + 1)
    return key if dot < 0 else key[:dot]


def _label(raw: bytes) -> int:
    try:
        return label if 0 <= (label := int(raw)) < 1 << 31 else NO_LABEL
    except ValueError:
        return NO_LABEL


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def index_name(shard: str, caption_key: str) -> str:
    """The file name of a shard's index; each caption key has its own index."""
    key_part = f".{hashlib.sha256(caption_key.encode()).hexdigest()[:8]}" if caption_key else ""
    return f"{shard}{key_part}{INDEX_SUFFIX}"


def index_paths(shard: Path, caption_key: str = "") -> list[Path]:
    """The paths where a shard's index may be: beside the shard or, if that folder is read-only, in the cache folder."""
    digest = hashlib.sha256(str(shard.absolute()).encode(errors="surrogateescape")).hexdigest()[:16]
    name = index_name(shard.name, caption_key)
    return [shard.with_name(name), cache_folder() / "indexes" / f"{digest}-{name}"]


def read_index(path: Path, size: int, time: int | None, max_bytes: int | None = None) -> ShardIndex | None:
    """Read the stored index of a shard with this size and time (None: any time), of at most `max_bytes`. Returns None
    if it is missing, damaged, or belongs to another version of the shard."""
    try:
        with open_regular(path, max_bytes) as file, np.load(file, allow_pickle=False) as stored:
            unpacked_bytes = sum(entry.file_size for entry in stored.zip.infolist())
            if max_bytes is not None and unpacked_bytes > max_bytes:
                return None
            about = json.loads(stored["about"].tobytes())
            if about["format"] != FORMAT or about["size"] != size or (time is not None and about["time"] != time):
                return None
            rows, notes = stored["rows"], tuple((str(r), str(w), int(n)) for r, w, n in about["notes"])
            return ShardIndex(rows, notes, str(about["images"])) if rows.dtype == ROW and rows.ndim == 1 else None
    except Exception:  # whatever is wrong with it, it can be built again
        return None


def store_index(paths: Iterable[Path], index: ShardIndex, size: int, time: int) -> None:
    """Store an index at the first of these paths that can be written. If none can, it is built again next time."""
    about = {"format": FORMAT, "size": size, "time": time, "notes": index.notes, "images": index.images}
    for path in paths:
        folder = path.parent
        if folder.exists() and not folder.stat().st_mode & 0o222:
            continue  # a read-only folder, although root could write there
        try:
            with new_file(path) as file:
                np.savez(file, rows=index.rows, about=np.frombuffer(json.dumps(about).encode(), np.uint8))
            return
        except OSError:
            continue


def load_index(shard: Path, caption_key: str = "") -> ShardIndex:
    """The index of a plain tar: read from its file if that is up to date, else built and stored."""
    if index := _stored_index(shard, caption_key):
        return index
    status = shard.stat()
    index = build_index(shard, caption_key)
    # Size and time are from before the shard was read: if it was written meanwhile, the index counts as out of date.
    store_index(index_paths(shard, caption_key), index, status.st_size, status.st_mtime_ns)
    return index


def _stored_index(shard: Path, caption_key: str) -> ShardIndex | None:
    with reading(shard, "check the path and its permissions"):
        status = shard.stat()
    max_bytes = max(status.st_size, SMALL_INDEX)  # an index is smaller than its shard: a tar's headers take more bytes
    paths = index_paths(shard, caption_key)
    indexes = (read_index(path, status.st_size, status.st_mtime_ns, max_bytes) for path in paths)
    return next((index for index in indexes if index is not None), None)


def load_indexes(shards: Sequence[Path], caption_key: str = "") -> Iterator[ShardIndex]:
    """The indexes of all shards, in order. If many are missing, one process per core builds them: one process alone
    would take hours for a billion samples. They are forks: a user's script needs no `if __name__ == "__main__"`."""
    missing = [shard for shard in shards if _stored_index(shard, caption_key) is None]
    if len(missing) > IN_SERIES and available_cores() > 1 and "fork" in multiprocessing.get_all_start_methods():
        with ProcessPoolExecutor(available_cores(), multiprocessing.get_context("fork")) as pool:
            built = pool.map(partial(_store_one, caption_key=caption_key), missing)
            for _ in track(built, "indexing", len(missing), "shards"):
                pass
        missing = []
    for shard in track(shards, "indexing", len(shards), "shards") if missing else shards:
        yield load_index(shard, caption_key)


def _store_one(shard: Path, caption_key: str) -> None:
    """Build and store an index in a worker process. The main process reads it from its file."""
    load_index(shard, caption_key)
