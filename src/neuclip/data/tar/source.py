"""Image-text pairs in tar shards (the webdataset layout), read directly at their byte offsets."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from neuclip.data.faults import list_faults
from neuclip.data.source import FACTS, BadSample, Sample, Source, check_id, other_keys, usable_captions
from neuclip.data.tar.index import (
    BLOCK,
    FORMAT,
    JSON_CAPTION,
    MOST_CAPTION_BYTES,
    NO_CAPTION,
    NO_LABEL,
    ROW,
    ShardIndex,
    captions_of,
    load_indexes,
)
from neuclip.errors import RunFailed, UserError
from neuclip.files import (
    NO_ROOM,
    UNFINISHED,
    UNFINISHED_SECONDS,
    cache_folder,
    mark_used,
    new_file,
    open_regular,
    read_regular,
    reading,
    remove_unused,
    write_json,
)

PIECE = 1_000_000  # samples whose caption facts are yielded at a time
PIECE_BYTES = 1 << 20
PACKED = (".gz", ".tgz")
MOST_LISTED = 1000  # faults listed per reason; a longer list would not be read
OPEN_FILES = 128  # per process; systems often allow 1024, and a large set has ten thousand shards

Stamp = tuple[int, int]  # size and time of a shard: they change when the shard changes


class TarSource(Source):
    """Pairs of one or many shards; ids number the samples in the order of the shards, and in each shard by position.

    Captions come from `txt` members, else from the key "caption" of `json` members. With a `caption_key`, they come
    only from that key of `json` members; with EVERY_LINE as the key, they are all lines of `txt` members. A sample
    needs 31 bytes, in a memory-mapped file that all processes of a machine share.
    """

    kind = "tar"

    def __init__(self, name: str, shards: Sequence[Path], caption_key: str = ""):
        self.paths = [plain_tar(shard).absolute() for shard in shards]
        self.stamps: list[Stamp] = [stamp_of(path) for path in self.paths]
        resolved = [str(path.resolve()) for path in self.paths]  # the same from every working folder
        self._join(name, list(map(str, shards)), caption_key, [resolved, self.stamps])

    def _join(self, name: str, shards: list[str], caption_key: str, identity: list[Any]) -> None:
        """Map the rows of all shards into memory, one shard after the other, from a file in the cache folder.
        `identity` changes when a shard changes."""
        self.name, self.shards, self.caption_key = name, shards, caption_key  # shards: their names in messages
        raw = json.dumps([FORMAT, caption_key, identity]).encode(errors="surrogateescape")
        self.joined = cache_folder() / "indexes" / "joined" / f"{hashlib.sha256(raw).hexdigest()[:32]}.rows"
        try:
            about = self._read_joined()
        except Exception:  # missing or damaged: write it again
            about = self._write_joined(self._indexes())
        self.ends = np.array(about["ends"], dtype=np.int64)
        self.images = str(about["images"])
        self._map(int(self.ends[-1]))
        notes = ((reason, f"{shards[number]}{place}", times) for number, reason, place, times in about["notes"])
        self.faults = list_faults(notes, MOST_LISTED)

    def _indexes(self) -> Iterator[ShardIndex]:
        return load_indexes(self.paths, self.caption_key)

    def _read_joined(self) -> dict[str, Any]:
        """Read the description of the joined rows. Raises an error if they are missing or damaged."""
        about: dict[str, Any] = json.loads(read_regular(self.joined.with_suffix(".json")))
        checksum = 0
        with open_regular(self.joined) as file:
            while piece := file.read(PIECE_BYTES):
                checksum = zlib.crc32(piece, checksum)
            if checksum != about["checksum"] or file.tell() != about["ends"][-1] * ROW.itemsize:
                raise ValueError("the file was changed")
        mark_used(self.joined)
        mark_used(self.joined.with_suffix(".json"))
        return about

    def _write_joined(self, indexes: Iterable[ShardIndex]) -> dict[str, Any]:
        """Write the rows of all shards to one file, shard by shard: a billion rows in memory would take 31 GB."""
        about: dict[str, Any] = {"ends": [], "notes": []}
        images, checksum, end = hashlib.sha256(), 0, 0
        try:
            with new_file(self.joined) as file:
                for number, index in enumerate(indexes):
                    content = index.rows.tobytes()
                    file.write(content)
                    checksum = zlib.crc32(content, checksum)
                    end += len(index.rows)
                    about["ends"].append(end)
                    about["notes"] += [(number, *note) for note in index.notes]
                    images.update(index.images.encode())
            about |= {"images": images.hexdigest(), "checksum": checksum}
            write_json(self.joined.with_suffix(".json"), about)
        except OSError as error:
            raise UserError(
                f"{self.joined}: cannot be written ({error.strerror}); remove what is at this path, or set "
                "NEUCLIP_CACHE to a folder with enough space"
            ) from error
        remove_unused(self.joined.parent.glob("[!.]*"))
        remove_unused(self.joined.parent.glob(f".*{UNFINISHED}"), UNFINISHED_SECONDS)
        return about

    def _map(self, count: int) -> None:
        try:
            rows = np.memmap(self.joined, ROW, "r", shape=(count,)) if count else np.zeros(0, ROW)
        except (OSError, ValueError) as error:
            raise RunFailed(f"{self.joined}: was removed while it was in use; start again with --resume") from error
        self.rows = np.asarray(rows)  # indexing a plain array is faster

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, id: int) -> Sample:
        check_id(id, len(self))
        image_block, image_size, caption_block, caption_size, kind, label, _, _ = self.rows[id].item()
        shard = int(np.searchsorted(self.ends, id, side="right"))
        image = self._read(shard, image_block, image_size)
        if kind == NO_CAPTION:
            if label == NO_LABEL:
                raise BadSample("caption is missing", self._where(shard, image_block))
            return Sample(image, ())
        if caption_size > MOST_CAPTION_BYTES:
            raise BadSample("caption is too long", self._where(shard, caption_block))
        raw = self._read(shard, caption_block, caption_size)
        captions = captions_of(raw, kind, self.caption_key)
        try:
            return Sample(image, usable_captions(captions, ""))
        except BadSample as bad:
            hint = f" ({other_keys(raw)})" if kind == JSON_CAPTION and not captions else ""
            raise BadSample(bad.reason, self._where(shard, caption_block) + hint) from None

    def where(self, id: int) -> str:
        """The shard and the member of the image."""
        check_id(id, len(self))
        shard = int(np.searchsorted(self.ends, id, side="right"))
        return self._where(shard, int(self.rows[id]["image_block"]))

    def _where(self, shard: int, block: int) -> str:
        name = self._read(shard, block - 1, 100).partition(b"\0")[0]
        return f"{self.shards[shard]}: {name.decode(errors='backslashreplace')}"

    def caption_facts(self) -> Iterator[np.ndarray]:
        for first in range(0, len(self), PIECE):
            rows = self.rows[first : first + PIECE]
            facts = np.empty(len(rows), FACTS)
            facts["captions"], facts["hash"] = rows["captions"], rows["hash"]
            yield facts

    def images_version(self) -> str:
        """A hash of the checksums of all images. It does not depend on the paths of the shards."""
        return self.images

    @property
    def labels(self) -> np.ndarray:  # (n,) int32
        """The label (`cls` member) of every sample; NO_LABEL if it has none."""
        return self.rows["label"]

    def _open(self, shard: int) -> BinaryIO:
        return _open(self.paths[shard], self.stamps[shard])

    def _read(self, shard: int, block: int, size: int) -> bytes:
        """Read bytes of a shard. Raises RunFailed and not BadSample on an error: it may be transient, and must not
        change the training data. It is also raised if the shard was written again, because the index would then point
        to wrong bytes and pair images with wrong captions."""
        try:
            file = self._open(shard).fileno()
            content = os.pread(file, size, block * BLOCK)
            changed = len(content) != size or (bool(self.stamps) and _stamp(os.fstat(file)) != self.stamps[shard])
        except OSError as error:
            raise RunFailed(
                f"{self.shards[shard]}: cannot be read ({error.strerror}); {_remedy(error)}, then continue with "
                "--resume"
            ) from None
        if changed:
            raise RunFailed(
                f"{self.shards[shard]}: was written again while it was in use; do not change the data during a run, "
                "and start again (a run that has begun continues with --resume if its captions are still the same)"
            )
        return content

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rows": len(self)}  # each process maps the file itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map(state["rows"])


@lru_cache(maxsize=OPEN_FILES)  # shared by all sources of this process; a file that is evicted is closed
def _open(path: Path, stamp: Stamp) -> BinaryIO:
    return open_regular(path)


def _remedy(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "allow more open files (ulimit -n 4096) or use fewer --data.workers"
    if error.errno == errno.ENOENT:
        return "it has disappeared since the run began; put it back"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "check its permissions"
    return "check its disk or network, and the memory of this machine"


def stamp_of(path: Path) -> Stamp:
    with reading(path, "check the path and its permissions"):
        return _stamp(path.stat())


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns


def plain_tar(shard: Path) -> Path:
    """The shard itself, or the unpacked copy of a packed one in the cache: gzip cannot be read at an offset."""
    if not shard.name.lower().endswith(PACKED):
        return shard
    identity = f"{shard.absolute()} {stamp_of(shard)}".encode(errors="surrogateescape")
    copies = cache_folder() / "unpacked"
    copy = copies / hashlib.sha256(identity).hexdigest()[:16] / "plain.tar"
    stamp_file = copy.with_name("stamp.json")  # size and time of the copy when it was made
    if not _is_unchanged(copy, stamp_file):
        remove_unused(copies.glob("[0-9a-f]*"))
        remove_unused(copies.glob(f"*/.*{UNFINISHED}"), UNFINISHED_SECONDS)
        try:
            with open_regular(shard) as packed, new_file(copy) as file:
                unpack(packed, file, str(shard))
            write_json(stamp_file, stamp_of(copy))
        except OSError as error:
            remedy = "check its permissions and the disk"
            if error.errno in (*NO_ROOM, errno.EROFS):
                remedy = "set NEUCLIP_CACHE to a folder with enough space, or unpack the shards yourself"
            raise UserError(f"{shard}: cannot be unpacked ({error.strerror or error}); {remedy}") from error
    mark_used(copy.parent)  # not the copy itself: its time tells whether it has changed
    return copy


def _is_unchanged(copy: Path, stamp_file: Path) -> bool:
    try:
        return json.loads(read_regular(stamp_file)) == list(stamp_of(copy)) and copy.is_file()
    except Exception:  # missing or damaged: it is made again
        return False


def unpack(packed: BinaryIO, file: IO[bytes], name: str, max_bytes: int | None = None) -> None:
    """Unpack a gzip file to at most `max_bytes`. Raises UserError if it is damaged; `name` is its name in messages."""
    size = 0
    try:
        with gzip.open(packed) as content:
            while piece := content.read(PIECE_BYTES):
                size += len(piece)
                if max_bytes is not None and size > max_bytes:
                    raise UserError(
                        f"{name}: unpacks to more than the {max_bytes:,} bytes of --data.cache_size; give more"
                    )
                file.write(piece)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name}: is damaged ({error}); fetch it again") from error
