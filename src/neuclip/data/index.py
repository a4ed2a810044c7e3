"""Where each sample lies in its tar shard: found once, stored in a small file, found again when the shard changes."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from neuclip.errors import AskedWrongly

FORMAT = 1  # raise it when the meaning of a stored field changes: old index files are then rebuilt
BLOCK = 512  # tar's unit
ZEROS = bytes(BLOCK)
REGULAR = frozenset(b"07\0")
WITHOUT_DATA = frozenset(b"123456")  # links, devices, folders: their size field does not count
NO_CAPTION, TEXT_CAPTION, JSON_CAPTION = 0, 1, 2
NO_LABEL = -1

# 21 bytes per sample. Members start at multiples of 512 bytes, so a 32-bit block number reaches 2 TB.
ROW = np.dtype(
    [
        ("image_block", "<u4"),
        ("image_size", "<u4"),
        ("caption_block", "<u4"),
        ("caption_size", "<u4"),
        ("caption_kind", "u1"),
        ("label", "<i4"),
    ]
)
PICTURE_EXTENSIONS = frozenset({b"png", b"jpg", b"jpeg", b"webp", b"bmp", b"gif"})


class Texts:
    """Many short texts in two arrays: a list of a hundred million Python strings would not fit into memory."""

    def __init__(self, bytes_: np.ndarray, ends: np.ndarray):
        self.bytes = bytes_  # uint8, all texts end to end as UTF-8
        self.ends = ends  # int64, where each text ends

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Texts:
        joined, ends = bytearray(), []
        for text in texts:
            joined += text
            ends.append(len(joined))
        return cls(np.frombuffer(bytes(joined), dtype=np.uint8), np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self.ends[number - 1]) if number else 0
        return self.bytes[start : int(self.ends[number])].tobytes()

    def strings(self) -> list[str]:
        """All texts; what is not UTF-8 is empty."""
        joined, starts = self.bytes.tobytes(), [0, *self.ends.tolist()]
        return [text_or_nothing(joined[a:b]) for a, b in pairwise(starts)]


def text_or_nothing(text: bytes) -> str:
    try:
        return text.decode().strip()
    except UnicodeDecodeError:
        return ""


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard in the order of their first members, their captions, and what was wrong with it."""

    rows: np.ndarray  # (n,) of ROW
    captions: Texts  # first caption of each sample; empty where there is none
    notes: tuple[tuple[str, str, int], ...]  # reason, where it was met first, how often


def index_of(shard: Path) -> ShardIndex:
    """The index of a plain tar: read from its file if that is still true, else built and stored."""
    status = _status(shard)
    places = _places(shard)
    for place in places:
        if (index := _read(place, status)) is not None:
            return index
    index = build_index(shard)
    for place in places:
        if _may_write(place.parent) and _write(place, index, status):
            break  # with no writable place at all the index is simply built again next time
    return index


def build_index(shard: Path) -> ShardIndex:
    """Walk the headers of a plain tar and group its members into samples.

    Members belong together when they share the path up to the first dot of the base name (the webdataset layout).
    """
    try:
        with shard.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return ShardIndex(np.zeros(0, ROW), Texts.of([]), (("shard is empty", str(shard), 1),))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Grouping(shard, data).index()
    except OSError as error:
        raise AskedWrongly(f"{shard}: cannot be read ({error.strerror}); check its permissions and the disk") from error


class _Grouping:
    """One walk over a shard: rows by key, in the order in which keys first appear."""

    def __init__(self, shard: Path, data: mmap.mmap):
        self.shard = shard
        self.data = data
        self.rows: dict[bytes, list[int]] = {}
        self.notes: dict[str, tuple[str, int]] = {}

    def index(self) -> ShardIndex:
        try:
            key = b""
            for name, offset, size in members(self.data):
                dot = name.find(b".", name.rfind(b"/") + 1)
                if dot > 0 and name[dot - 1 : dot] != b"/":
                    key = name[:dot]
                    self._add(key, name[dot + 1 :].lower(), offset, size)
        except CutOffError as cut:
            # What the cut took from the last sample is unknown: it stays only if it is a whole pair.
            row = self.rows.get(key)
            if row is not None and not (row[1] and (row[4] or row[5] != NO_LABEL)):
                del self.rows[key]
            self._note("shard is cut off", f"{self.shard} at byte {cut.position}")
        except NotTarError as damage:
            reason = "shard is damaged" if damage.position else "shard is not a tar file"
            self._note(reason, f"{self.shard} at byte {damage.position}")
        return self._finished()

    def _add(self, key: bytes, extension: bytes, offset: int, size: int) -> None:
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = [0, 0, 0, 0, NO_CAPTION, NO_LABEL]
        if size >= 1 << 32:
            self._note("member is larger than 4 GB", f"{self.shard}: {_shown(key)}.{_shown(extension)}")
        elif extension in PICTURE_EXTENSIONS:
            if row[0]:
                self._note("name occurs twice", f"{self.shard}: {_shown(key)}.{_shown(extension)}")
            else:
                row[0], row[1] = offset // BLOCK, size
        elif extension == b"txt" and row[4] != TEXT_CAPTION:
            row[2], row[3], row[4] = offset // BLOCK, size, TEXT_CAPTION
        elif extension == b"json" and row[4] == NO_CAPTION:
            row[2], row[3], row[4] = offset // BLOCK, size, JSON_CAPTION
        elif extension == b"cls":
            row[5] = _label(self.data[offset : offset + size])

    def _finished(self) -> ShardIndex:
        whole = []
        for key, row in self.rows.items():
            if row[0]:
                whole.append(tuple(row))
            else:
                self._note("no picture", f"{self.shard}: {_shown(key)}")
        captions = (self._caption(row) for row in whole)
        notes = tuple((reason, where, count) for reason, (where, count) in self.notes.items())
        return ShardIndex(np.array(whole, dtype=ROW), Texts.of(captions), notes)

    def _caption(self, row: tuple[int, ...]) -> bytes:
        raw = self.data[row[2] * BLOCK : row[2] * BLOCK + row[3]]
        if row[4] == JSON_CAPTION:
            return next(iter(captions_in_json(raw)), "").encode()
        return raw if row[4] == TEXT_CAPTION else b""

    def _note(self, reason: str, where: str) -> None:
        first, count = self.notes.get(reason, (where, 0))
        self.notes[reason] = (first, count + 1)


def captions_in_json(raw: bytes) -> tuple[str, ...]:
    """What the key "caption" of a JSON member holds: one text or a list of them; nothing if it holds neither."""
    try:
        value = json.loads(raw).get("caption")
    except (ValueError, AttributeError, RecursionError):
        return ()
    values = value if isinstance(value, list) else [value]
    # JSON may spell half a character ("\\ud800"), which no tokenizer takes.
    return tuple(text.encode(errors="replace").decode() for text in values if isinstance(text, str))


def _label(raw: bytes) -> int:
    try:
        label = int(raw)
    except ValueError:
        return NO_LABEL
    return label if 0 <= label < 1 << 31 else NO_LABEL


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _status(shard: Path) -> tuple[int, int]:
    try:
        status = shard.stat()
    except OSError as error:
        raise AskedWrongly(f"{shard}: cannot be read ({error.strerror}); check the path and its permissions") from error
    return status.st_size, status.st_mtime_ns


def _places(shard: Path) -> list[Path]:
    """Beside the shard; where that folder is read-only, in the cache."""
    from neuclip.data.builtin import cache_folder

    digest = hashlib.sha256(str(shard.absolute()).encode(errors="surrogateescape")).hexdigest()[:16]
    name = f"{shard.name}.index.npz"
    return [shard.with_name(name), cache_folder() / "indexes" / f"{digest}-{name}"]


def _read(place: Path, status: tuple[int, int]) -> ShardIndex | None:
    """None when there is no index, or it is another version's, another shard's, or broken."""
    try:
        with np.load(place, allow_pickle=False) as stored:
            if stored["stamp"].tolist() != [FORMAT, *status]:
                return None
            notes = tuple((reason, where, count) for reason, where, count in json.loads(stored["notes"].tobytes()))
            return ShardIndex(stored["rows"], Texts(stored["caption_bytes"], stored["caption_ends"]), notes)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _may_write(folder: Path) -> bool:
    """False for a folder marked read-only. The system would let root write there; whoever marked it did not mean to."""
    return not folder.exists() or bool(folder.stat().st_mode & 0o222)


def _write(place: Path, index: ShardIndex, status: tuple[int, int]) -> bool:
    """Store in one move, so that a process that reads at the same time, or a kill, never meets half a file."""
    temporary = ""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                stamp=np.array([FORMAT, *status], dtype=np.int64),
                rows=index.rows,
                caption_bytes=index.captions.bytes,
                caption_ends=index.captions.ends,
                notes=np.frombuffer(json.dumps(index.notes).encode(), dtype=np.uint8),
            )
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would hide it from colleagues who share the shards
        Path(temporary).replace(place)
        return True
    except OSError:
        Path(temporary).unlink(missing_ok=True) if temporary else None
        return False


class CutOffError(Exception):
    """The file ends inside a member or without its end mark."""

    def __init__(self, position: int):
        super().__init__(position)
        self.position = position


class NotTarError(Exception):
    """There is no valid header at this byte."""

    def __init__(self, position: int):
        super().__init__(position)
        self.position = position


def members(data: mmap.mmap | bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, offset of its bytes, number of bytes) of every regular file of a plain tar, as they lie.

    Understands ustar prefixes, GNU long names and large sizes, and pax headers. Raises CutOffError after the last whole
    member of a truncated file, NotTarError where a header should be and is none.
    """
    end = len(data)
    position = 0
    long_name, pax_size = b"", -1
    while position + BLOCK <= end:
        header = data[position : position + BLOCK]
        if header == ZEROS:
            return
        kind = header[156]
        size = _size(header, position)
        if pax_size >= 0 and kind in REGULAR:
            size = pax_size
        start = position + BLOCK
        stop = start if kind in WITHOUT_DATA else start + size
        if stop > end:
            raise CutOffError(position)
        if kind in REGULAR:
            yield long_name or _name(header), start, size
            long_name, pax_size = b"", -1
        elif kind == 76:  # L: the next member's name
            long_name = data[start:stop].rstrip(b"\0")
        elif kind == 120:  # x: pax fields of the next member
            long_name, pax_size = _pax(data[start:stop], long_name)
        elif kind not in b"Kg":
            long_name, pax_size = b"", -1
        position = start + (stop - start + BLOCK - 1) // BLOCK * BLOCK
    raise CutOffError(position)


def _size(header: bytes, position: int) -> int:
    """The size field, if this is a header at all: it says "ustar", or, in tars from before 1988, its checksum fits."""
    try:
        if header[257:262] != b"ustar" and int(header[148:156].rstrip(b"\0 "), 8) != _checksum(header):
            raise NotTarError(position)
        if header[124] & 0x80:  # GNU: sizes from 8 GB on are binary
            return int.from_bytes(header[125:136], "big")
        size = int(header[124:136].rstrip(b"\0 ") or b"0", 8)
        if size < 0:
            raise NotTarError(position)
        return size
    except ValueError as error:
        raise NotTarError(position) from error


def _checksum(header: bytes) -> int:
    return sum(header) - sum(header[148:156]) + 8 * ord(" ")  # it counts its own eight bytes as blanks


def _name(header: bytes) -> bytes:
    name = header[: header.find(b"\0", 0, 100)] if b"\0" in header[:100] else header[:100]
    if header[345] and header[257:263] == b"ustar\0":  # GNU headers ("ustar ") use these bytes for other things
        return header[345:500].rstrip(b"\0") + b"/" + name
    return name


def _pax(records: bytes, name: bytes) -> tuple[bytes, int]:
    """`path` and `size` of a pax header: records of the form b"<length> <key>=<value>\\n"."""
    size = -1
    while records:
        length, _, _ = records.partition(b" ")
        if not length.isdigit() or int(length) == 0:
            break
        key, _, value = records[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"path":
            name = value
        elif key == b"size" and value.isdigit():
            size = int(value)
        records = records[int(length) :]
    return name, size
