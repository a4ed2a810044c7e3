"""Image-text pairs in tar shards (the webdataset layout), read at their byte offsets."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import sys
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from neuclip.data.captions import usable_captions
from neuclip.data.index import (
    BLOCK,
    NO_CAPTION,
    NO_LABEL,
    ShardIndex,
    build_index,
    captions_of,
    index_and_change,
    places_of,
    status_of,
    store_index,
)
from neuclip.data.joined_index import joined_index
from neuclip.data.sample import BadSample, Fault, Sample
from neuclip.errors import AskedWrongly, RunFailed
from neuclip.progress import track

OPEN_FILES = 128  # per process; systems often allow 1024 and a large set has ten thousand shards


class TarSource:
    """Pairs of one or many shards; ids run through the shards in the order given, in each by position.

    Captions are those of `txt` members, else of the key "caption" of `json` members; with a `caption_key`, those of
    that key of `json` members alone. It holds 21 bytes per sample: from a million samples on not in memory, but in a
    mapped file that all processes of a machine share.
    """

    most_open = 0  # files; 0: OPEN_FILES
    statuses: Sequence[tuple[int, int]] = ()  # size and time of each shard when it was indexed, where others can write

    def __init__(self, name: str, shards: Sequence[Path], caption_key: str = ""):
        self.paths = [plain_tar(shard) for shard in track(shards, "unpacking", len(shards), "shards")]
        self.statuses = [status_of(path) for path in self.paths]
        self._join(name, [str(path) for path in self.paths], self.statuses, caption_key)

    def _join(self, name: str, shards: list[str], stamps: Sequence[object], caption_key: str) -> None:
        """Join the indexes of all shards. A stamp changes when its shard changes."""
        self.name = name
        self.shards = shards  # as messages name them
        self.caption_key = caption_key
        self.changes: dict[str, str] = {}  # what has changed since a shard was indexed
        self._files: OrderedDict[int, int] = OrderedDict()
        self.joined = joined_index(shards, [caption_key, *stamps], self._numbers(), self.index)
        self.faults = tuple(Fault(-1, *note) for note in self.joined.notes)
        if self.changes:
            first, change = next(iter(self.changes.items()))
            more = f" and {len(self.changes) - 1} more shards have changed" if len(self.changes) > 1 else ""
            print(f"{first}: {change}{more}; indexed again", file=sys.stderr)

    def _numbers(self) -> Iterator[int]:
        """The shards, one after the other, as they are indexed."""
        return track(range(len(self.shards)), "indexing", len(self.shards), "shards")

    def index(self, shard: int) -> ShardIndex:
        """Stored, or made and stored."""
        index, change = index_and_change(self.paths[shard], self.caption_key)
        if change:
            self.changes[self.shards[shard]] = change
        return index

    def reread(self, shard: int) -> ShardIndex:
        """The index of a shard as it is now, whatever is stored."""
        return build_index(self.paths[shard], self.caption_key)

    def store(self, shard: int, index: ShardIndex) -> None:
        """Store another index for a shard; sources that are opened from now on use it."""
        store_index(places_of(self.paths[shard], self.caption_key), index, status_of(self.paths[shard]))

    def _open(self, shard: int) -> int:
        return os.open(self.paths[shard], os.O_RDONLY)

    @property
    def captions_sha256(self) -> str | None:
        """What data/fingerprint.py would find, where it is stored."""
        return self.joined.captions_sha256

    def __len__(self) -> int:
        return len(self.joined.rows)

    def __getitem__(self, id: int) -> Sample:
        if not 0 <= id < len(self):
            raise IndexError(f"sample {id} of {len(self)}")
        image_block, image_size, caption_block, caption_size, kind, label = self.joined.rows[id].item()
        shard = self.joined.shard_of(id)
        image = self._read(shard, image_block, image_size)
        self._check_unchanged(shard)
        if kind == NO_CAPTION and label == NO_LABEL:
            raise BadSample("caption is missing", self._where(shard, image_block))
        if kind == NO_CAPTION:
            return Sample(image, ())
        raw = self._read(shard, caption_block, caption_size)
        try:
            return Sample(image, usable_captions(captions_of(raw, kind, self.caption_key), ""))
        except BadSample as bad:
            raise BadSample(bad.reason, self._where(shard, caption_block)) from None

    def where(self, id: int) -> str:
        """Shard and member of the picture, for messages."""
        return self._where(self.joined.shard_of(id), int(self.joined.rows[id]["image_block"]))

    def captions(self) -> list[str]:
        """The first caption of every id; "" where there is none. Read from the index files, not from the shards."""
        return [text for shard in range(len(self.shards)) for text in self.index(shard).captions.strings()]

    def labels(self) -> list[int] | None:
        """The class (`cls` member) of every id; None unless every sample has one."""
        labels = self.joined.rows["label"]
        return None if len(labels) == 0 or (labels == NO_LABEL).any() else labels.tolist()

    def _read(self, shard: int, block: int, size: int) -> bytes:
        try:
            content = os.pread(self._file(shard), size, block * BLOCK)
        except OSError as error:
            raise BadSample("shard cannot be read", f"{self.shards[shard]} ({error.strerror})") from None
        if len(content) != size:
            self._check_unchanged(shard)
            raise BadSample("shard was shortened", f"{self.shards[shard]} at byte {block * BLOCK}")
        return content

    def _check_unchanged(self, shard: int) -> None:
        """In a shard that was written again, other bytes lie where its index points, and others' captions."""
        if not self.statuses:
            return
        status = os.fstat(self._file(shard))
        if (status.st_size, status.st_mtime_ns) != self.statuses[shard]:
            raise RunFailed(
                f"{self.shards[shard]}: was written again while it was in use; let nobody change the data of a run, "
                "then start again (a run that has begun continues with --resume if its captions are still the same)"
            )

    def _file(self, shard: int) -> int:
        """An open descriptor. pread has no position of its own, so a forked worker may share its parent's."""
        file = self._files.get(shard)
        if file is None:
            file = self._files[shard] = self._open(shard)
            if len(self._files) > (self.most_open or OPEN_FILES):
                os.close(self._files.popitem(last=False)[1])
        return file

    def _where(self, shard: int, block: int) -> str:
        try:
            member = self._read(shard, block - 1, 100).split(b"\0")[0].decode(errors="backslashreplace")
        except BadSample:
            member = f"byte {block * BLOCK}"
        return f"{self.shards[shard]}: {member}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)


def plain_tar(shard: Path) -> Path:
    """The shard itself, or its unpacked copy in the cache: gzip cannot be read at an offset."""
    if not shard.name.endswith((".gz", ".tgz")):
        return shard
    from neuclip.data.cache_folder import cache_folder

    try:
        status = shard.stat()
        identity = f"{shard.absolute()}\n{status.st_size}\n{status.st_mtime_ns}".encode(errors="surrogateescape")
        folder = cache_folder() / "unpacked" / hashlib.sha256(identity).hexdigest()[:16]
        unpacked = folder / f"{shard.name.removesuffix('.gz').removesuffix('.tgz').removesuffix('.tar')}.tar"
        if not unpacked.exists():
            folder.mkdir(parents=True, exist_ok=True)
            unpack(shard, unpacked)
    except gzip.BadGzipFile as error:
        raise AskedWrongly(f"{shard}: is not a gzip file ({error}); fetch it again") from error
    except OSError as error:
        remedy = "check its permissions and the disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            remedy = "point NEUCLIP_CACHE to a folder with room, or unpack the shards yourself"
        raise AskedWrongly(f"{shard}: cannot be unpacked ({error.strerror or error}); {remedy}") from error
    return unpacked


def unpack(shard: Path, unpacked: Path) -> None:
    """In one move. A damaged end leaves the whole part: the index then notes that the shard is cut off."""
    handle, temporary = tempfile.mkstemp(dir=unpacked.parent, prefix=f".{unpacked.name}.")
    try:
        with os.fdopen(handle, "wb") as target, gzip.open(shard, "rb") as packed:
            try:
                shutil.copyfileobj(packed, target, 1 << 20)
            except (EOFError, zlib.error):
                if target.tell() == 0:
                    raise gzip.BadGzipFile("nothing in it can be read") from None
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would hide it from others who share the cache
        Path(temporary).replace(unpacked)
    finally:
        Path(temporary).unlink(missing_ok=True)
