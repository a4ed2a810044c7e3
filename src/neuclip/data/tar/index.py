"""Where each sample lies in its tar shard: found once, stored in a small file, found again when the shard changes."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from neuclip.data.captions import DEFAULT_KEY, Captions, Texts, captions_from_json
from neuclip.data.clip_benchmark_layout import split_lines
from neuclip.data.decoding import DECODED, NOT_DECODED, NOT_DECODED_REASON, SIGNATURE_BYTES, ending_by_content
from neuclip.data.locations import INDEX_SUFFIX
from neuclip.data.machine import cache_folder
from neuclip.data.sample import UnindexedFaults
from neuclip.data.tar.files import new_file
from neuclip.data.tar.gzip import Damage, damage_of
from neuclip.data.tar.walk import BLOCK, CUT_OFF, NO_END_MARK, Gap, Member, members
from neuclip.errors import UserError

FORMAT = 8  # raise it when the meaning of a stored field changes: old index files are then rebuilt silently
NO_CAPTION, TEXT_CAPTION, JSON_CAPTION = 0, 1, 2
NO_LABEL = -1
LINES = "\n"  # in place of a caption key: every line of a `txt` member is a caption (data/clip_benchmark_layout.py)
DOTTED = "a dot in the name before its ending, where webdataset cuts names"
MOST_CAPTION_BYTES = 1 << 20  # of a `txt` or `json` member; a longer one is no caption and would fill the index
MOST_LABEL_BYTES = 64
ENDS_TOO_EARLY = (CUT_OFF, NO_END_MARK)

# 21 bytes per sample. Members start at multiples of 512 bytes: a 32-bit block number reaches 2 TB.
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
IMAGE, IMAGE_SIZE, CAPTION, CAPTION_SIZE, KIND, LABEL = range(6)  # of a row while it is built
NOTHING = [0, 0, 0, 0, NO_CAPTION, NO_LABEL]
IMAGES = frozenset(ending.encode() for ending in DECODED)
OTHER_IMAGES = frozenset(ending.encode() for ending in NOT_DECODED)

Note = tuple[str, str, int]  # reason, place (to be set behind the name of the shard), how many


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard in the order of their first members, their captions, and what was wrong with it."""

    rows: np.ndarray  # (n,) of ROW
    captions: Texts  # first caption of each sample, stripped; empty where there is none or it is not UTF-8
    further: np.ndarray  # of samples with several captions, as in Captions
    notes: tuple[Note, ...]  # what never became a sample


def load_index(shard: Path, caption_key: str = "") -> tuple[ShardIndex, str]:
    """The index of a plain tar: read from its file if that is up to date, else built and stored. And what has changed
    since the file was written; "" if nothing has, or there was none.

    With a `caption_key`, captions are those of that key of `json` members, or with LINES the lines of `txt` members;
    the index then has a file of its own.
    """
    status = status_of(shard)
    change = ""
    for place in index_places(shard, caption_key):
        stored, why_not = read_index(place, status)
        if stored is not None:
            return stored, ""
        change = change or why_not
    index = build_index(shard, caption_key)
    store_index(index_places(shard, caption_key), index, status)
    return index, change


def build_index(shard: Path, caption_key: str = "") -> ShardIndex:
    """Walk the headers of a plain tar and group its members into samples."""
    try:
        with shard.open("rb") as file:
            return build_index_of_file(file, caption_key, damage_of(shard))
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error.strerror}); check its permissions and the disk") from error


def build_index_of_file(file: BinaryIO, caption_key: str, damage: Damage | None) -> ShardIndex:
    """As `build_index`, of an open file that was unpacked up to this damage.

    Members belong together when they share the path up to the first dot of the base name (the webdataset layout).
    A name with several dots belongs to that sample (`0.seg.png` to `0`). Where there is no such sample, an image and a
    caption that share the path up to the last dot (`v1.2-000.jpg`) are a pair of their own; others are lost.
    """
    if os.fstat(file.fileno()).st_size == 0:
        return ShardIndex(np.zeros(0, ROW), *Captions.of([]), (("shard is empty", "", 1),))
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Grouping(data, caption_key, damage).build()


class _Grouping:
    """Groups the members of a shard into samples, in the order in which their names first appear."""

    def __init__(self, data: mmap.mmap, caption_key: str, damage: Damage | None):
        self.data = data
        self.caption_key = caption_key
        self.damage = damage
        self.rows: dict[bytes, list[int]] = {}  # by path up to the last dot
        self.twice: list[tuple[bytes, bytes]] = []  # key and extension of a second image
        self.misnamed: dict[bytes, tuple[int, int]] = {}  # block and size of what only its first bytes call an image
        self.unread: set[bytes] = set()  # keys with an image of another kind
        self.lost = UnindexedFaults()

    def build(self) -> ShardIndex:
        gaps: list[Gap] = []
        key = b""
        for name, offset, size in members(self.data, gaps):
            own, extension = _key_and_extension(name)
            if extension:
                key = own
                self._add(key, extension, offset, size)
        for gap in gaps:
            self._note_gap(gap, key)
        if self.damage and not any(gap.reason in ENDS_TOO_EARLY for gap in gaps):
            self._note_damage(1)
        return self._finish()

    def _note_gap(self, gap: Gap, last: bytes) -> None:
        """Take back the member that the gap damaged, and count what was lost in it: one sample at least.

        What a cut took from the last sample is unknown: the sample stays only if it is a whole pair. A shard that ends
        with a member counts as cut off only if that leaves half a pair, or if unpacking stopped there.
        """
        self._take_back(gap.overrun)
        too_early = gap.reason in ENDS_TOO_EARLY
        last = _first_part(last) if _first_part(last) in self.rows else last
        row = self.rows.get(last)
        whole = row is None or _is_pair(row)
        if too_early and not whole:
            self.rows = {key: row for key, row in self.rows.items() if last not in (key, _first_part(key))}
        keys = {_key_and_extension(name)[0] for name in gap.lost}
        gone = {key for key in keys - self.rows.keys() if key and _first_part(key) not in self.rows}
        if too_early and self.damage:
            self._note_damage(max(1, len(gone)))
        elif gap.reason != NO_END_MARK or not whole:
            to = f" to {gap.stop}" if gap.stop < len(self.data) else ""
            reason = CUT_OFF if too_early else gap.reason
            self.lost.note(reason, f" at byte {gap.start}{to}", max(1, len(gone)))
        else:  # the other shards tell whether it is cut off: see TarSource
            self.lost.note(NO_END_MARK, f" at byte {gap.start}", 0)

    def _note_damage(self, times: int) -> None:
        assert self.damage is not None
        self.lost.note(self.damage.reason, f" {self.damage.place}", times)

    def _take_back(self, member: Member) -> None:
        key, extension = _key_and_extension(member[0])
        row = self.rows.get(key)
        if row is None:
            return
        if row[IMAGE] == member[1] // BLOCK:
            row[IMAGE] = row[IMAGE_SIZE] = 0
        elif row[CAPTION] == member[1] // BLOCK:
            row[CAPTION] = row[CAPTION_SIZE] = row[KIND] = NO_CAPTION
        elif extension == b"cls":
            row[LABEL] = NO_LABEL

    def _add(self, key: bytes, extension: bytes, offset: int, size: int) -> None:
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = NOTHING.copy()
        if size >= 1 << 32:
            self.lost.note("member is larger than 4 GB", f": {_shown(key)}.{_shown(extension)}")
        elif extension in IMAGES:
            if row[IMAGE]:
                self.twice.append((key, extension))
            else:
                row[IMAGE], row[IMAGE_SIZE] = offset // BLOCK, size
        elif extension == b"txt" and row[KIND] != TEXT_CAPTION and self.caption_key in ("", LINES):
            row[CAPTION], row[CAPTION_SIZE], row[KIND] = offset // BLOCK, size, TEXT_CAPTION
        elif extension == b"json" and row[KIND] == NO_CAPTION:
            row[CAPTION], row[CAPTION_SIZE], row[KIND] = offset // BLOCK, size, JSON_CAPTION
        elif extension == b"cls":
            row[LABEL] = _label(self.data[offset : offset + size]) if size <= MOST_LABEL_BYTES else NO_LABEL
        elif extension not in (b"txt", b"json") and ending_by_content(self.data[offset : offset + SIGNATURE_BYTES]):
            self.misnamed.setdefault(key, (offset // BLOCK, size))
        elif extension in OTHER_IMAGES:
            self.unread.add(key)

    def _finish(self) -> ShardIndex:
        whole = []
        for key, row in self.rows.items():
            first = _first_part(key)
            if first != key and self._has_image(first):
                continue
            if not row[IMAGE] and key in self.misnamed:
                row[IMAGE], row[IMAGE_SIZE] = self.misnamed[key]
            if not row[IMAGE]:
                self.lost.note(NOT_DECODED_REASON if key in self.unread else "no image", f": {_shown(key)}")
            elif first == key or (first not in self.rows and _is_pair(row)):
                whole.append(tuple(row))
            else:
                self.lost.note(DOTTED, f": {_shown(key)}")
        for key, extension in self.twice:
            if _first_part(key) == key or not self._has_image(_first_part(key)):
                self.lost.note("name occurs twice", f": {_shown(key)}.{_shown(extension)}")
        notes = tuple((fault.reason, fault.where, fault.times) for fault in self.lost.faults())
        return ShardIndex(np.array(whole, dtype=ROW), *Captions.of(self._captions(whole)), notes)

    def _has_image(self, key: bytes) -> bool:
        """A name with one dot more, as `0.seg.png` beside `0.jpg`, is then a further member of this sample."""
        return self.rows.get(key, NOTHING)[IMAGE] > 0

    def _captions(self, rows: list[tuple[int, ...]]) -> Iterator[tuple[str | bytes, ...]]:
        for _, _, block, size, kind, _ in rows:
            if size > MOST_CAPTION_BYTES:
                yield ()  # reading the sample counts it as a fault
            else:
                yield captions_of(self.data[block * BLOCK : block * BLOCK + size], kind, self.caption_key)


def captions_of(raw: bytes, kind: int, caption_key: str) -> tuple[str | bytes, ...]:
    """The captions that a member of this kind holds, as they are."""
    if kind == JSON_CAPTION:
        return captions_from_json(raw, DEFAULT_KEY if caption_key in ("", LINES) else caption_key)
    if kind == TEXT_CAPTION:
        return split_lines(raw) if caption_key == LINES else (raw,)
    return ()


def _key_and_extension(name: bytes) -> tuple[bytes, bytes]:
    """The path up to the last dot of the file name, and what follows the dot. Hidden files and names without a dot have
    no extension, and belong to no sample."""
    start = name.rfind(b"/") + 1
    if name.startswith(b".", start):
        return b"", b""
    dot = name.rfind(b".", start)
    return (name[:dot], name[dot + 1 :].lower()) if dot > start else (name, b"")


def _first_part(key: bytes) -> bytes:
    """Up to the first dot of the file name: what webdataset calls the key; the key itself where it has no dot."""
    dot = key.find(b".", key.rfind(b"/") + 1)
    return key if dot < 0 else key[:dot]


def _is_pair(row: list[int]) -> bool:
    return row[IMAGE_SIZE] > 0 and (row[KIND] != NO_CAPTION or row[LABEL] != NO_LABEL)


def _label(raw: bytes) -> int:
    try:
        label = int(raw)
    except ValueError:
        return NO_LABEL
    return label if 0 <= label < 1 << 31 else NO_LABEL


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def status_of(shard: Path) -> tuple[int, int]:
    """Size in bytes and time in nanoseconds: they change when the shard changes."""
    try:
        status = shard.stat()
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error.strerror}); check the path and its permissions") from error
    return status.st_size, status.st_mtime_ns


def index_places(shard: Path, caption_key: str = "") -> list[Path]:
    """Beside the shard; where that folder is read-only, in the cache."""
    digest = hashlib.sha256(str(shard.absolute()).encode(errors="surrogateescape")).hexdigest()[:16]
    in_cache = cached_index_place(digest, shard.name, caption_key)
    return [shard.with_name(in_cache.name.removeprefix(f"{digest}-")), in_cache]


def cached_index_place(digest: str, name: str, caption_key: str) -> Path:
    key_part = f".{hashlib.sha256(caption_key.encode()).hexdigest()[:8]}" if caption_key else ""
    return cache_folder() / "indexes" / f"{digest}-{name}{key_part}{INDEX_SUFFIX}"


def read_index(place: Path, status: tuple[int, int | None], most: float = math.inf) -> tuple[ShardIndex | None, str]:
    """The stored index; or None and why it cannot be used: "" when there is none or it has another format.

    `status` is size and time of the shard; no time where it says nothing. It has at most `most` bytes once unpacked.
    """
    try:
        with np.load(place, allow_pickle=False) as stored:
            if sum(entry.file_size for entry in stored.zip.infolist()) > most:
                return None, f"its index has more than {most:,} bytes"
            version, size, time = stored["stamp"].tolist()
            if version != FORMAT:
                return None, ""
            if size != status[0]:
                return None, f"it had {size:,} bytes when it was indexed and has {status[0]:,} now"
            if status[1] is not None and time != status[1]:
                return None, "it was written again since it was indexed"
            notes = tuple((reason, where, count) for reason, where, count in json.loads(stored["notes"].tobytes()))
            captions = Texts(stored["caption_bytes"], stored["caption_ends"])
            return ShardIndex(stored["rows"], captions, stored["further"], notes), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError, EOFError, TypeError, MemoryError, zipfile.BadZipFile):
        # TypeError: a single array; MemoryError: one that claims to be larger than any memory
        return None, "its index was damaged"


def store_index(places: list[Path], index: ShardIndex, status: tuple[int, int]) -> None:
    """At the first place that can be written. Where none can, the index is built again next time."""
    for place in places:
        folder = place.parent
        if folder.exists() and not folder.stat().st_mode & 0o222:
            continue  # marked read-only; the system would let root write there all the same
        try:
            _write_index(place, index, status)
            return
        except OSError:
            continue


def _write_index(place: Path, index: ShardIndex, status: tuple[int, int]) -> None:
    with new_file(place) as unfinished, unfinished.open("wb") as file:
        np.savez(
            file,
            stamp=np.array([FORMAT, *status], dtype=np.int64),
            rows=index.rows,
            caption_bytes=index.captions.bytes,
            caption_ends=index.captions.ends,
            further=index.further,
            notes=np.frombuffer(json.dumps(index.notes).encode(), dtype=np.uint8),
        )
