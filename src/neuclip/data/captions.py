"""Captions: as files hold them, cleaned by one rule for all sources, and millions of them in a few arrays."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from neuclip.data.sample import BadSample
from neuclip.formatting import plural

DEFAULT_KEY = "caption"
USUAL_KEYS = ("text", "title", "description", "alt", "alt_text", "captions", "txt")  # where others keep captions
LISTED_KEYS = 12
# All that str.strip() takes away (no blank lies beyond U+3000), the zeros that a hole in a file leaves, and the mark
# that some editors put in front of UTF-8.
BLANKS = "\0\ufeff" + "".join(letter for letter in map(chr, range(0x3001)) if letter.isspace())
PIECE = 100_000  # captions that become Python strings at a time
FURTHER = np.dtype([("number", "<i8"), ("hash", "S16"), ("count", "<i4")])


def json_object(raw: bytes) -> dict[str, Any] | None:
    """None if it is not JSON, or not an object."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def captions_from_json(raw: bytes, key: str = DEFAULT_KEY) -> tuple[str, ...]:
    """What a key of a JSON object holds: one text or a list of them; nothing if it holds neither.

    Several keys between commas give several captions.

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
    """A text, or the texts of a list. Half a character, which JSON may spell ("\\ud800"), becomes a question mark.

    Numbers are texts, as they are in a CSV; NaN, which pandas writes for a missing value, is nothing.

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


def strip_blanks(text: str) -> str:
    """Without blanks and zeros around it, in whatever order they come: stripping again changes nothing."""
    return text.strip(BLANKS)


def usable_captions(captions: Iterable[str | bytes], where: str) -> tuple[str, ...]:
    """Those that are text and not blank, stripped. Raises BadSample with the first one's reason if there is none."""
    usable, reason = [], ""
    for caption in captions:
        try:
            text = strip_blanks(caption.decode() if isinstance(caption, bytes) else caption)
        except UnicodeDecodeError:
            reason = reason or "caption is not UTF-8"
            continue
        if text:
            usable.append(text)
        reason = reason or "caption is empty"
    if not usable:
        raise BadSample(reason or "caption is missing", where)
    return tuple(usable)


class Texts:
    """Many short texts in two arrays; a list of a hundred million Python strings would not fit into memory."""

    def __init__(self, bytes_: np.ndarray, ends: np.ndarray):
        self.bytes = bytes_  # uint8, all texts end to end as UTF-8
        self.ends = ends  # int64, where each text ends

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Texts:
        joined, ends = bytearray(), array("q")
        for text in texts:
            joined += text
            ends.append(len(joined))
        return cls.joined(joined, ends)

    @classmethod
    def joined(cls, bytes_: bytearray, ends: array[int]) -> Texts:
        """From both arrays, without a copy."""
        return cls(np.frombuffer(bytes_, dtype=np.uint8), np.frombuffer(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self.ends[number - 1]) if number else 0
        return self.bytes[start : int(self.ends[number])].tobytes()

    def between(self, first: int, last: int) -> list[bytes]:
        """Texts first..last-1; for many of them faster than one by one."""
        before = int(self.ends[first - 1]) if first else 0
        ends = [0, *(self.ends[first:last] - before).tolist()]
        together = self.bytes[before : before + ends[-1]].tobytes()
        return [together[start:end] for start, end in pairwise(ends)]

    def __iter__(self) -> Iterator[bytes]:
        for first in range(0, len(self), PIECE):
            yield from self.between(first, min(first + PIECE, len(self)))

    def strings(self) -> list[str]:
        """All texts; what is not UTF-8 is empty."""
        return [_decode_or_empty(text) for text in self]


def _decode_or_empty(text: bytes) -> str:
    try:
        return strip_blanks(text.decode())
    except UnicodeDecodeError:
        return ""


class Captions(NamedTuple):
    """The captions of consecutive samples, as far as the fingerprint needs them (data/fingerprint.py)."""

    first: Texts  # of each sample, stripped; empty where it has none that can be used
    further: np.ndarray  # (k,) of FURTHER: each sample with several, by number: a hash of the others and their count

    @classmethod
    def of(cls, captions: Iterable[Iterable[str | bytes]]) -> Captions:
        """From all captions of each sample, usable or not.

        >>> Captions.of([["one"], [], ["two", "zwei"]]).first.strings()
        ['one', '', 'two']
        """
        further: list[tuple[int, bytes, int]] = []
        first = Texts.of(_first_captions(captions, further))
        return cls(first, np.array(further, dtype=FURTHER))

    def per_sample(self) -> np.ndarray:
        """(n,) int64: how many captions each sample has that can be used.

        >>> Captions.of([["one"], [], ["two", "zwei"]]).per_sample()
        array([1, 0, 2])
        """
        counts = (np.diff(self.first.ends, prepend=0) > 0).astype(np.int64)
        counts[self.further["number"]] += self.further["count"]
        return counts


class CaptionCounts(NamedTuple):
    """How many captions samples have, counted without reading an image."""

    samples: int = 0
    captions: int = 0
    fewest: int = 0  # captions of a sample, among those that have any
    most: int = 0
    without: int = 0  # samples that have none

    @classmethod
    def of(cls, captions: Captions) -> CaptionCounts:
        per_sample = captions.per_sample()
        some = per_sample[per_sample > 0]
        fewest, most = (int(some.min()), int(some.max())) if len(some) else (0, 0)
        return cls(len(per_sample), int(some.sum()), fewest, most, len(per_sample) - len(some))

    def plus(self, other: CaptionCounts) -> CaptionCounts:
        return CaptionCounts(
            self.samples + other.samples,
            self.captions + other.captions,
            min(self.fewest, other.fewest) or self.fewest or other.fewest,
            max(self.most, other.most),
            self.without + other.without,
        )

    def __str__(self) -> str:
        """'27,424 samples, 1 caption each', '1,000 samples with 5,000 captions (4 to 6 each)'."""
        samples = plural(self.samples, "sample")
        if self.most == 0:
            return f"{samples} without captions"
        each = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} to {self.most}"
        number = ", 1 caption each" if self.most == 1 else f" with {plural(self.captions, 'caption')} ({each} each)"
        return f"{samples}{number}{f'; {self.without:,} without' if self.without else ''}"


def _first_captions(
    captions: Iterable[Iterable[str | bytes]], further: list[tuple[int, bytes, int]]
) -> Iterator[bytes]:
    """The first usable caption of each sample; `further` grows by the others."""
    for number, texts in enumerate(captions):
        try:
            first, *others = usable_captions(texts, "")
        except BadSample:
            first, others = "", []
        if others:
            with_lengths = "".join(f"{len(text)}:{text}" for text in others)  # which say where one ends
            further.append((number, hashlib.sha256(with_lengths.encode()).digest()[:16], len(others)))
        yield first.encode()
