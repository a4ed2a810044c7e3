"""Image-text pairs in tar shards (the webdataset layout), read at their byte offsets."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import tempfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from neuclip.data.index import BLOCK, JSON_CAPTION, NO_CAPTION, NO_LABEL, ROW, captions_in_json, index_of
from neuclip.data.sample import BadSample, Fault, Sample
from neuclip.errors import AskedWrongly
from neuclip.progress import track

OPEN_FILES = 128  # per process; systems often allow 1024 and a large set has ten thousand shards


class TarSource:
    """Pairs of one or many shards; ids run through the shards in the order given, in each by position.

    It holds 21 bytes per sample and travels to worker processes by fork or by pickle.
    """

    def __init__(self, name: str, shards: list[Path]):
        self.name = name
        self.shards = [plain_tar(shard) for shard in track(shards, "unpacking", len(shards), "shards")]
        rows, self.starts, faults = [], [0], []
        for shard in track(self.shards, "indexing", len(shards), "shards"):
            index = index_of(shard)
            rows.append(index.rows)
            self.starts.append(self.starts[-1] + len(index.rows))
            for reason, where, count in index.notes:
                faults.append(Fault(-1, reason, where if count == 1 else f"{where} and {count - 1} more"))
        self.rows = np.concatenate(rows) if rows else np.zeros(0, ROW)
        self.starts_array = np.array(self.starts[1:], dtype=np.int64)
        self.faults = tuple(faults)
        self._files: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, id: int) -> Sample:
        if not 0 <= id < len(self.rows):
            raise IndexError(f"sample {id} of {len(self.rows)}")
        image_block, image_size, caption_block, caption_size, kind, label = self.rows[id].item()
        shard = int(np.searchsorted(self.starts_array, id, side="right"))
        image = self._read(shard, image_block, image_size)
        if kind == NO_CAPTION and label == NO_LABEL:
            raise BadSample("caption is missing", self._where(shard, image_block))
        if kind == NO_CAPTION:
            return Sample(image, ())
        raw = self._read(shard, caption_block, caption_size)
        try:
            return Sample(image, _captions(raw, kind))
        except BadSample as bad:
            raise BadSample(bad.reason, self._where(shard, caption_block)) from None

    def where(self, id: int) -> str:
        """Shard and member of the picture, for messages."""
        shard = int(np.searchsorted(self.starts_array, id, side="right"))
        return self._where(shard, int(self.rows[id]["image_block"]))

    def captions(self) -> list[str]:
        """The first caption of every id; "" where there is none. Read from the index files, not from the shards."""
        return [text for shard in self.shards for text in index_of(shard).captions.strings()]

    def labels(self) -> list[int] | None:
        """The class (`cls` member) of every id; None unless every sample has one."""
        labels = self.rows["label"]
        return None if len(labels) == 0 or (labels == NO_LABEL).any() else labels.tolist()

    def _read(self, shard: int, block: int, size: int) -> bytes:
        try:
            content = os.pread(self._file(shard), size, block * BLOCK)
        except OSError as error:
            raise BadSample("shard cannot be read", f"{self.shards[shard]} ({error.strerror})") from None
        if len(content) != size:
            raise BadSample("shard was shortened", f"{self.shards[shard]} at byte {block * BLOCK}")
        return content

    def _file(self, shard: int) -> int:
        """An open descriptor. pread has no position of its own, so a forked worker may share its parent's."""
        file = self._files.get(shard)
        if file is None:
            file = self._files[shard] = os.open(self.shards[shard], os.O_RDONLY)
            if len(self._files) > OPEN_FILES:
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


def _captions(raw: bytes, kind: int) -> tuple[str, ...]:
    """What a caption member says. JSON that is broken or has no "caption" counts as missing."""
    try:
        captions = captions_in_json(raw) if kind == JSON_CAPTION else (raw.decode(),)
    except UnicodeDecodeError:
        raise BadSample("caption is not UTF-8", "") from None
    if not captions:
        raise BadSample("caption is missing", "")
    captions = tuple(text for caption in captions if (text := caption.strip()))
    if not captions:
        raise BadSample("caption is empty", "")
    return captions


def plain_tar(shard: Path) -> Path:
    """The shard itself, or its unpacked copy in the cache: gzip cannot be read at an offset."""
    if not shard.name.endswith((".gz", ".tgz")):
        return shard
    from neuclip.data.builtin import cache_folder

    try:
        status = shard.stat()
        identity = f"{shard.absolute()}\n{status.st_size}\n{status.st_mtime_ns}".encode(errors="surrogateescape")
        folder = cache_folder() / "unpacked" / hashlib.sha256(identity).hexdigest()[:16]
        unpacked = folder / f"{shard.name.removesuffix('.gz').removesuffix('.tgz').removesuffix('.tar')}.tar"
        if not unpacked.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _unpack(shard, unpacked)
    except gzip.BadGzipFile as error:
        raise AskedWrongly(f"{shard}: is not a gzip file ({error}); fetch it again") from error
    except OSError as error:
        remedy = "check its permissions and the disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            remedy = "point NEUCLIP_CACHE to a folder with room, or unpack the shards yourself"
        raise AskedWrongly(f"{shard}: cannot be unpacked ({error.strerror or error}); {remedy}") from error
    return unpacked


def _unpack(shard: Path, unpacked: Path) -> None:
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
