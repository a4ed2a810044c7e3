"""What a source of image-text pairs is, how its captions are cleaned, and what identifies it.

A new kind of source is one class here below and one row of the table in data/open.py.
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
USUAL_KEYS = ("text", "title", "description", "alt", "alt_text", "captions", "txt")  # where others keep captions
LISTED_KEYS = 12
# All that str.strip() takes away (no blank lies beyond U+3000), the zeros that a hole in a file leaves, and the mark
# that some editors put in front of UTF-8.
BLANKS = "\0\ufeff" + "".join(letter for letter in map(chr, range(0x3001)) if letter.isspace())
FACTS = np.dtype([("captions", "<u2"), ("hash", "<u8")])  # of one sample: how many usable captions, and their hash
MOST_CAPTIONS = (1 << 16) - 1


@dataclass(frozen=True)
class Sample:
    """One pair as it lies in its source."""

    image: bytes
    captions: tuple[str, ...]  # none only where there is a class label instead (zero-shot data)


class Fault(NamedTuple):
    """A sample that could not be used: it keeps its id and its position, another one replaces it in the batch."""

    id: int  # -1: it could not be indexed (no image, cut-off shard) and has no id
    reason: str  # a short phrase, the same for the same kind of fault: reasons are counted
    where: str  # shard and member, or file and row
    times: int = 1  # how many are lost there


class BadSample(Exception):
    """Raised by a source, or by decoding, for an unusable sample: `BadSample("caption is empty", where)`."""

    def __init__(self, reason: str, where: str):
        super().__init__(reason, where)
        self.reason = reason
        self.where = where


class Source(ABC):
    """Image-text pairs with dense ids 0..n-1. It can be pickled: every data worker has its own copy.

    `name`, `kind` and the four abstract methods must be written; the rest has defaults.
    """

    name: str
    kind: str  # as messages call it: tar, csv, folder ...
    folder: Path | None = None  # where the images lie as files
    faults: tuple[Fault, ...] = ()  # what could not be indexed: members without an image, cut-off shards; id -1
    shard_ends: np.ndarray | None = None  # of data that are downloaded shard by shard: the id after the last of each

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, id: int) -> Sample:
        """Raises BadSample when the pair cannot be used, RunFailed when the machine is at fault."""

    @abstractmethod
    def where(self, id: int) -> str:
        """Shard and member, or file and row, for messages."""

    @abstractmethod
    def caption_facts(self) -> Iterator[np.ndarray]:
        """Of every id in order, some at a time: (k,) of FACTS. Reads no images."""

    def image_keys(self, ids: np.ndarray | None = None, *, read_images: bool = False) -> np.ndarray | None:
        """Of all samples, or of those with these ids, (n,) uint64, equal for pairs of one image; None: every pair has
        an image of its own, as far as names tell. `read_images`: where tables hold them, their bytes tell."""
        return None

    def images_version(self) -> str:
        """Changes when the images change."""
        return ""

    def places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # (k,) -> (k,), (k,)
        """Of a mixture: the number of each sample's source, and its id there."""
        return np.zeros_like(ids), ids

    def prefetch(self, shards: Sequence[int]) -> None:  # noqa: B027
        """Download these shards, which are read next, in the background."""


def check_id(id: int, size: int) -> None:
    if not 0 <= id < size:
        raise IndexError(f"sample {id} of {size}")


def json_object(raw: bytes) -> dict[str, Any] | None:
    """None if it is not JSON, or not an object."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def captions_from_json(raw: bytes, key: str = DEFAULT_KEY) -> tuple[str, ...]:
    """What a key of a JSON object holds: one text or a list of them; several keys between commas give several captions.

    >>> captions_from_json(b'{"caption": ["one", "two"], "alt": "three"}', "caption,alt")
    ('one', 'two', 'three')
    """
    values = json_object(raw) or {}
    keys = [key] if key in values else [name.strip() for name in key.split(",")]
    return tuple(text for name in keys for text in texts_in(values.get(name)))


def other_keys(raw: bytes) -> str:
    """For a JSON object without the caption key: which keys it has, and how to choose one.

    >>> other_keys(b'{"url": "http://x", "text": "a cat"}')
    'its keys are url, text: name one with --data.caption_key text'
    """
    values = json_object(raw) or {}
    likely = [key for key in (*USUAL_KEYS, *values) if texts_in(values.get(key))]
    if not likely:
        return "no key of it holds a text"
    listed = ", ".join([*values][:LISTED_KEYS]) + (" ..." if len(values) > LISTED_KEYS else "")
    return f"its keys are {listed}: name one with --data.caption_key {likely[0]}"


def texts_in(value: Any) -> tuple[str, ...]:
    """A text, or the texts of a list. Numbers are texts, as they are in a CSV; NaN, which pandas writes for a missing
    value, is nothing. Half a character, which JSON may spell ("\\ud800"), becomes a question mark.

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
    """Those that are text and not blank, stripped. Raises BadSample with the first one's reason if there is none."""
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
    """A row of FACTS: equal for equal captions, in whatever files they lie."""
    try:
        usable = usable_captions(captions, "")
    except BadSample:
        return 0, 0
    text = usable[0] if len(usable) == 1 else "".join(f"{len(one)}:{one}" for one in usable)
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return min(len(usable), MOST_CAPTIONS), int.from_bytes(digest, "little")


class CaptionCounts(NamedTuple):
    """How many captions samples have."""

    samples: int = 0
    captions: int = 0
    fewest: int = 0  # captions of a sample, among those that have any
    most: int = 0
    without: int = 0  # samples that have none

    def __str__(self) -> str:
        """'27,424 samples, 1 caption each', '1,000 samples with 5,000 captions (4 to 6 each)'."""
        samples = plural(self.samples, "sample")
        if self.most == 0:
            return f"{samples} without captions"
        each = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} to {self.most}"
        number = ", 1 caption each" if self.most == 1 else f" with {plural(self.captions, 'caption')} ({each} each)"
        return f"{samples}{number}{f'; {self.without:,} without' if self.without else ''}"


def fingerprint(source: Source) -> tuple[dict[str, int | str], CaptionCounts]:
    """{"count": n, "sha256": of the captions in order of id}: equal for equal pairs, in whatever files they lie. And
    how many captions there are."""
    digest, samples, captions, without, fewest, most = hashlib.sha256(), 0, 0, 0, MOST_CAPTIONS, 0
    for piece in source.caption_facts():
        digest.update(np.ascontiguousarray(piece).tobytes())
        counts = piece["captions"]
        some = counts[counts > 0]
        samples, captions, without = samples + len(piece), captions + int(some.sum()), without + len(piece) - len(some)
        fewest, most = min(fewest, int(some.min(initial=MOST_CAPTIONS))), max(most, int(some.max(initial=0)))
    known = CaptionCounts(samples, captions, fewest if most else 0, most, without)
    return {"count": samples, "sha256": digest.hexdigest()}, known


@cache
def print_once(line: str) -> None:
    """One line on stderr, from the main rank, and only once however often a source is opened."""
    if is_main():
        print(line, file=sys.stderr)


def shorten(name: str, most: int = 200) -> str:
    """A name for messages. A wrong table may give a whole image in base64 for a name, or a page of text."""
    return name if len(name) <= most else f"{name[: most - 33]}... ({len(name):,} letters)"
