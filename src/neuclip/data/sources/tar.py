"""Image-text pairs in tar shards (the webdataset layout), read at their byte offsets."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import re
import sys
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from neuclip.data.captions import usable_captions
from neuclip.data.sample import BadSample, Fault, Sample
from neuclip.data.shards.index import (
    BLOCK,
    MOST_CAPTION_BYTES,
    NO_CAPTION,
    NO_LABEL,
    ShardIndex,
    Texts,
    build_index,
    captions_of,
    index_and_change,
    places_of,
    status_of,
    store_index,
)
from neuclip.data.shards.joined_index import joined_index
from neuclip.data.shards.open_files import OPEN_FILES, close_files, descriptor, new_number
from neuclip.errors import AskedWrongly, RunFailed
from neuclip.progress import track

# What these say of a shard is so for every process and at every time: its samples are bad. Anything else that the
# system answers (too many open files, a disk or a network that fails) may pass, and must not change what is trained on.
FAULTS_OF_THE_DATA = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP)
STEP = 1 << 16  # bytes of a packed shard at a time
LEFT_OVER_SECONDS = 2 * 24 * 3600  # a file that was begun so long ago is nobody's


class TarSource:
    """Pairs of one or many shards; ids run through the shards in the order given, in each by position.

    Captions are those of `txt` members, else of the key "caption" of `json` members; with a `caption_key`, those of
    that key of `json` members alone. It holds 21 bytes per sample: from a million samples on not in memory, but in a
    mapped file that all processes of a machine share.
    """

    most_open = 0  # files; 0: as many as all sources together may
    statuses: Sequence[tuple[int, int]] = ()  # size and time of each shard when it was indexed, where others can write

    def __init__(self, name: str, shards: Sequence[Path], caption_key: str = ""):
        if any(is_packed(shard) for shard in shards):
            remove_left_over()
        self.paths = [plain_tar(shard) for shard in track(shards, "unpacking", len(shards), "shards")]
        self.statuses = [status_of(path) for path in self.paths]
        self._join(name, [str(path) for path in self.paths], self.statuses, caption_key)

    def _join(self, name: str, shards: list[str], stamps: Sequence[object], caption_key: str) -> None:
        """Join the indexes of all shards. A stamp changes when its shard changes."""
        self.name = name
        self.shards = shards  # as messages name them
        self.caption_key = caption_key
        self.changes: dict[str, str] = {}  # what has changed since a shard was indexed
        self._begin_reading()
        paths: Sequence[Path] = getattr(self, "paths", ())  # none of remote shards, whose addresses mean one thing only
        places = [str(path.resolve()) for path in paths] or shards
        self.joined = joined_index(places, caption_key, stamps, self._numbers(), self.index)
        self.faults = tuple(Fault(-1, *note) for note in self.joined.notes)
        if self.changes:
            first, change = next(iter(self.changes.items()))
            more = f" and {len(self.changes) - 1} more shards have changed" if len(self.changes) > 1 else ""
            print(f"{first}: {change}{more}; indexed again", file=sys.stderr)

    def _begin_reading(self) -> None:
        self._number = new_number()  # in this process
        weakref.finalize(self, close_files, self._number)

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
        """Store another index for a shard; sources that are opened from now on use it.

        Under the status from before the shard was read: whatever was written since makes the index an old one.
        """
        store_index(places_of(self.paths[shard], self.caption_key), index, self.statuses[shard])

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
        if caption_size > MOST_CAPTION_BYTES:
            raise BadSample("caption is too long", self._where(shard, caption_block))
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

    def caption_texts(self) -> Iterator[Texts]:
        """As `captions`, shard by shard and not as Python's strings."""
        for shard in range(len(self.shards)):
            yield self.index(shard).captions

    def labels(self) -> list[int] | None:
        """The class (`cls` member) of every id; None unless every sample has one."""
        labels = self.joined.rows["label"]
        return None if len(labels) == 0 or (labels == NO_LABEL).any() else labels.tolist()

    def _read(self, shard: int, block: int, size: int) -> bytes:
        try:
            content = os.pread(self._file(shard), size, block * BLOCK)
        except OSError as error:
            raise self._unreadable(shard, error) from None
        if len(content) != size:
            self._check_unchanged(shard)
            raise BadSample("shard was shortened", f"{self.shards[shard]} at byte {block * BLOCK}")
        return content

    def _unreadable(self, shard: int, error: OSError) -> BadSample | RunFailed:
        if error.errno in FAULTS_OF_THE_DATA:
            return BadSample("shard cannot be read", f"{self.shards[shard]} ({error.strerror})")
        remedy = "check the disk or the network it lies on, and the memory of this machine"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "allow more open files (ulimit -n 4096) or use fewer --data.workers"
        return RunFailed(
            f"{self.shards[shard]}: cannot be read ({error.strerror}); {remedy}, then continue with --resume"
        )

    def _check_unchanged(self, shard: int) -> None:
        """In a shard that was written again, other bytes lie where its index points, and others' captions."""
        if not self.statuses:
            return
        try:
            status = os.fstat(self._file(shard))
        except OSError as error:
            raise self._unreadable(shard, error) from None
        if (status.st_size, status.st_mtime_ns) != self.statuses[shard]:
            raise RunFailed(
                f"{self.shards[shard]}: was written again while it was in use; let nobody change the data of a run, "
                "then start again (a run that has begun continues with --resume if its captions are still the same)"
            )

    def _file(self, shard: int) -> int:
        return descriptor((self._number, shard), lambda: self._open(shard), self.most_open or OPEN_FILES)

    def _where(self, shard: int, block: int) -> str:
        try:
            member = self._read(shard, block - 1, 100).split(b"\0")[0].decode(errors="backslashreplace")
        except BadSample:
            member = f"byte {block * BLOCK}"
        return f"{self.shards[shard]}: {member}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_reading()


def is_packed(shard: Path) -> bool:
    return shard.name.lower().endswith((".gz", ".tgz"))


def plain_tar(shard: Path) -> Path:
    """The shard itself, or its unpacked copy in the cache: gzip cannot be read at an offset."""
    if not is_packed(shard):
        return shard
    try:
        status = shard.stat()
        identity = f"{shard.absolute()}\n{status.st_size}\n{status.st_mtime_ns}".encode(errors="surrogateescape")
        folder = unpacked_folder() / hashlib.sha256(identity).hexdigest()[:16]
        name = re.sub(r"(\.tar)?(\.gz|\.tgz)$", "", shard.name, flags=re.IGNORECASE)
        unpacked = folder / f"{name}.tar"
        if not unpacked.exists():
            folder.mkdir(parents=True, exist_ok=True)
            if damage := unpack(shard, unpacked):
                print(f"{shard}: {damage}; what could be unpacked before is used, fetch it again", file=sys.stderr)
    except gzip.BadGzipFile as error:
        raise AskedWrongly(f"{shard}: is not a gzip file ({error}); fetch it again") from error
    except OSError as error:
        remedy = "check its permissions and the disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            remedy = "point NEUCLIP_CACHE to a folder with room, or unpack the shards yourself"
        raise AskedWrongly(f"{shard}: cannot be unpacked ({error.strerror or error}); {remedy}") from error
    return unpacked


def unpacked_folder() -> Path:
    from neuclip.data.cache_folder import cache_folder

    return cache_folder() / "unpacked"


def remove_left_over() -> None:
    """What killed unpackings have begun."""
    for file in unpacked_folder().glob("*/.*.part"):
        try:
            if file.stat().st_mtime < time.time() - LEFT_OVER_SECONDS:
                file.unlink()
        except OSError:  # another process was faster, or it is another user's
            continue


def unpack(shard: Path, unpacked: Path) -> str:
    """In one move. Of a damaged one all that comes before the damage, and what is wrong with it; "" if nothing is."""
    handle, temporary = tempfile.mkstemp(dir=unpacked.parent, prefix=f".{unpacked.name}.", suffix=".part")
    damage: list[str] = []
    try:
        with os.fdopen(handle, "wb") as target, shard.open("rb") as packed:
            for content in decoded(packed, damage):
                target.write(content)
            if damage and target.tell() == 0:
                raise gzip.BadGzipFile("nothing in it can be read")
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would hide it from others who share the cache
        Path(temporary).replace(unpacked)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return "".join(damage)


def decoded(packed: BinaryIO, damage: list[str]) -> Iterator[bytes]:
    """The content of gzip members end to end, up to the first byte that makes no sense; `damage` then says why."""
    decoder = zlib.decompressobj(wbits=31)  # gzip with its checksum
    inside, whole = False, 0  # members
    while chunk := packed.read(STEP):
        while chunk:
            if whole and not inside and not (chunk := chunk.lstrip(b"\0")):
                break  # padding between members, or behind the last
            before = decoder.copy()
            try:
                content = decoder.decompress(chunk)
            except zlib.error as error:
                yield from up_to_damage(before, chunk)
                damage.append(f"is damaged ({error})")
                return
            inside = not decoder.eof
            chunk = decoder.unused_data
            yield content
            if decoder.eof:
                whole += 1
                decoder = zlib.decompressobj(wbits=31)
    if inside:
        damage.append("is cut off")


def up_to_damage(decoder: Any, chunk: bytes) -> Iterator[bytes]:
    """Byte by byte: an error keeps to itself what was decoded before it."""
    try:
        for number in range(len(chunk)):
            yield decoder.decompress(chunk[number : number + 1])
    except zlib.error:
        return
