"""The interface of a source of image-text pairs, the cleaning of captions, and the fingerprint of the data.

A new kind of source is one subclass of `Source` and one row of the table in data/open.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neuclip.distributed.collectives import is_main
from neuclip.formatting import plural

DEFAULT_KEY = "caption"
USUAL_KEYS = ("text", "title", "description", "alt", "alt_text", "captions", "txt")  # keys that other data use
LISTED_KEYS = 12
# What str.strip() removes (there is no blank beyond U+3000), the zeros of a hole in a file, and the byte order mark
# that some editors write.
BLANKS = "\0\ufeff" + "".join(letter for letter in map(chr, range(0x3001)) if letter.isspace())
FACTS = np.dtype([("captions", "<u2"), ("hash", "<u8")])  # of one sample: number of usable captions, and their hash
MOST_CAPTIONS = (1 << 16) - 1


@dataclass(frozen=True)
class Sample:
    """One pair as its source stores it."""

    image: bytes
    captions: tuple[str, ...]  # empty only if there is a class label instead (zero-shot data)


class Fault(NamedTuple):
    """A sample that could not be used. It keeps its id and its position; another sample replaces it in the batch."""

    id: int  # -1: it could not be indexed (no image, cut-off shard) and has no id
    reason: str  # a short phrase, always the same for one kind of fault, because reasons are counted
    where: str  # shard and member, or file and row
    times: int = 1  # the number of samples lost there


class BadSample(Exception):
    """A sample cannot be used; raised by a source or by decoding: `BadSample("caption is empty", where)`."""

    def __init__(self, reason: str, where: str):
        super().__init__(reason, where)
        self.reason = reason
        self.where = where


class Source(ABC):
    """Image-text pairs with dense ids 0..n-1. It must be picklable: every data worker has its own copy.

    A subclass must define `name`, `kind` and the four abstract methods; the rest has defaults.
    """

    name: str
    kind: str  # its name in messages: tar, csv, folder ...
    folder: Path | None = None  # the folder of the images, if they are files
    faults: tuple[Fault, ...] = ()  # samples that could not be indexed (no image, cut-off shard); their id is -1
    shard_ends: np.ndarray | None = None  # only for remote data: for each shard, the id after its last sample

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, id: int) -> Sample:
        """The pair with this id. Raises BadSample if it cannot be used, RunFailed if the machine is at fault."""

    @abstractmethod
    def where(self, id: int) -> str:
        """Shard and member, or file and row, for messages."""

    @abstractmethod
    def caption_facts(self) -> Iterator[np.ndarray]:
        """The caption facts of all samples in order of id, in arrays (k,) of FACTS. Reads no images."""

    def image_keys(self, ids: np.ndarray | None = None, *, read_images: bool = False) -> np.ndarray | None:
        """Keys (n,) uint64 of all samples, or of those with these ids, which are equal for pairs of the same image.
        None if every pair has its own image, as far as file names tell. `read_images`: if a table contains the images,
        compare their bytes."""
        return None

    def images_version(self) -> str:
        """A text that changes when the images change."""
        return ""

    def places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # (k,) -> (k,), (k,)
        """For a mixture: the number of each sample's source, and its id in that source."""
        return np.zeros_like(ids), ids

    def prefetch(self, shards: Sequence[int]) -> None:  # noqa: B027
        """Download these shards in the background, because they are read next."""


def check_id(id: int, size: int) -> None:
    if not 0 <= id < size:
        raise IndexError(f"sample {id} of {size}")


def json_object(raw: bytes) -> dict[str, Any] | None:
    """The JSON object in these bytes; None if they are not JSON, or not an object."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def captions_from_json(raw: bytes, key: str = DEFAULT_KEY) -> tuple[str, ...]:
    """The captions in a JSON object: the text, or list of texts, under `key`, or under several keys separated by
    commas.

    >>> captions_from_json(b'{"caption": ["one", "two"], "alt": "three"}', "caption,alt")
    ('one', 'two', 'three')
    """
    values = json_object(raw) or {}
    keys = [key] if key in values else [name.strip() for name in key.split(",")]
    return tuple(text for name in keys for text in texts_in(values.get(name)))


def other_keys(raw: bytes) -> str:
    """A hint for a JSON object without the caption key: which keys it has, and how to choose one.

    >>> other_keys(b'{"url": "http://x", "text": "a cat"}')
    'its keys are url, text: name one with --data.caption_key text'
    """
    values = json_object(raw) or {}
    likely = [key for key in (*USUAL_KEYS, *values) if texts_in(values.get(key))]
    if not likely:
        return "none of its keys has a text"
    listed = ", ".join([*values][:LISTED_KEYS]) + (" ..." if len(values) > LISTED_KEYS else "")
    return f"its keys are {listed}: name one with --data.caption_key {likely[0]}"


def texts_in(value: Any) -> tuple[str, ...]:
    """The text in a value, or the texts in a list. Numbers become texts, as they are in a CSV. NaN, which pandas writes
    for a missing value, is skipped. Half a character, which JSON can contain ("\\ud800"), becomes a question mark.

    >>> texts_in(["a cat", 1984, 0.5, float("nan"), None])
    ('a cat', '1984', '0.5')
    """
    values = value if isinstance(value, list) else [value]
    return tuple(text for text in map(_text, values) if text is not None)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return str(value) if isinstance(value, int | float) else None


def usable_captions(captions: Iterable[str | bytes], where: str) -> tuple[str, ...]:
    """The captions that are UTF-8 and not blank, stripped. If there is none, raises BadSample with the reason for the
    first caption."""
    usable, reason = [], ""
    for caption in captions:
        try:
            text = (caption.decode() if isinstance(caption, bytes) else caption).strip(BLANKS)
        except UnicodeDecodeError:
            reason = reason or "caption is not UTF-8"
            continue
        if text:
            usable.append(text)
        reason = reason or "caption is empty"
    if not usable:
        raise BadSample(reason or "caption is missing", where)
    return tuple(usable)


def caption_facts(captions: Iterable[str | bytes]) -> tuple[int, int]:
    """The row of FACTS of a sample. It is equal for equal captions, regardless of their files."""
    try:
        usable = usable_captions(captions, "")
    except BadSample:
        return 0, 0
    text = usable[0] if len(usable) == 1 else "".join(f"{len(caption)}:{caption}" for caption in usable)
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return min(len(usable), MOST_CAPTIONS), int.from_bytes(digest, "little")


class CaptionCounts(NamedTuple):
    """Counts of the captions of a source's samples."""

    samples: int = 0
    captions: int = 0
    fewest: int = 0  # captions per sample, among samples that have any
    most: int = 0
    without: int = 0  # samples without captions

    def __str__(self) -> str:
        """'27,424 samples, 1 caption each', '1,000 samples with 5,000 captions (4 to 6 each)'."""
        samples = plural(self.samples, "sample")
        if self.most == 0:
            return f"{samples} without captions"
        each = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} to {self.most}"
        number = ", 1 caption each" if self.most == 1 else f" with {plural(self.captions, 'caption')} ({each} each)"
        return f"{samples}{number}{f'; {self.without:,} without' if self.without else ''}"


def fingerprint(source: Source) -> tuple[dict[str, int | str], CaptionCounts]:
    """The fingerprint {"count": n, "sha256": hash of the captions in order of id}, and the counts of captions. The
    fingerprint is the same for the same captions, regardless of their files."""
    digest, samples, captions, without, fewest, most = hashlib.sha256(), 0, 0, 0, MOST_CAPTIONS, 0
    for piece in source.caption_facts():
        digest.update(np.ascontiguousarray(piece).tobytes())
        counts = piece["captions"]
        some = counts[counts > 0]
        samples, captions, without = samples + len(piece), captions + int(some.sum()), without + len(piece) - len(some)
        fewest, most = min(fewest, int(some.min(initial=MOST_CAPTIONS))), max(most, int(some.max(initial=0)))
    caption_counts = CaptionCounts(samples, captions, fewest if most else 0, most, without)
    return {"count": samples, "sha256": digest.hexdigest()}, caption_counts


@cache
def print_once(line: str) -> None:
    """Print a line on stderr, on the main rank, and only the first time it is printed."""
    if is_main():
        print(line, file=sys.stderr)


def shorten(name: str, most: int = 200) -> str:
    """The name, shortened for messages: a wrong column may contain images in base64 or pages of text."""
    return name if len(name) <= most else f"{name[: most - 33]}... ({len(name):,} letters)"
