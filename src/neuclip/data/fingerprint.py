"""A data set's identity in one line, so that results are compared on equal data only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from typing import TYPE_CHECKING

import numpy as np

from neuclip.data.captions import CaptionCounts, Captions
from neuclip.data.machine import cache_folder
from neuclip.records import write_text_safely

if TYPE_CHECKING:
    from neuclip.data.source import Source

KEPT_BYTES = 256 << 20  # of captions between the two passes; of more the second pass reads them again
SHA256 = re.compile(r"[0-9a-f]{64}")
HASHED = np.dtype([("number", "<i8"), ("hash", "S16")])  # of FURTHER; other captions or more have another hash


def fingerprint(source: Source) -> dict[str, int | str]:
    """{"count": n, "sha256": of the captions in order of id}: equal for equal pairs, in whatever files they lie."""
    sha256 = source.captions_sha256 or _of_mixture(source) or _of_captions(source)
    if source.caption_counts is None and all(part.caption_counts for part in source.parts):
        count_captions(source)
    return {"count": len(source), "sha256": sha256}


def count_captions(source: Source) -> CaptionCounts:
    """Of all its samples; the source remembers it. They are read for it unless they were fingerprinted before."""
    if source.caption_counts is None:
        counts = CaptionCounts()
        if len(source.parts) > 1:
            for part in source.parts:
                counts = counts.plus(count_captions(part))
        else:
            for captions in source.caption_pieces():
                counts = counts.plus(CaptionCounts.of(captions))
        source.caption_counts = counts
    return source.caption_counts


def _of_mixture(source: Source) -> str | None:
    """None unless a part of a mixture is so large that its hash is stored. The hash of all captions follows from those
    of the parts only by reading them again: it is kept in the cache folder under the parts' fingerprints."""
    if not any(part.captions_sha256 for part in source.parts):
        return None
    name = hashlib.sha256(json.dumps([fingerprint(part) for part in source.parts]).encode()).hexdigest()
    place = cache_folder() / "fingerprints" / name
    with contextlib.suppress(OSError, ValueError):
        if SHA256.fullmatch(stored := place.read_text(encoding="ascii")):
            return stored
    sha256 = _of_captions(source)
    with contextlib.suppress(OSError):  # a disk that is full or read-only: it is computed again next time
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text_safely(place, sha256)
    return sha256


def _of_captions(source: Source) -> str:
    digest = CaptionDigest()
    kept: list[np.ndarray] = []
    size = 0
    for captions in source.caption_pieces():
        digest.add_lengths(captions)
        size += captions.first.bytes.nbytes
        if size <= KEPT_BYTES:
            kept.append(captions.first.bytes)
        else:
            kept.clear()
    for texts in kept if size <= KEPT_BYTES else (captions.first.bytes for captions in source.caption_pieces()):
        digest.add_texts(texts)
    source.caption_counts = digest.counts
    return digest.hexdigest()


class CaptionDigest:
    """SHA-256 of captions in order of id, however they are cut into pieces.

    The lengths of all first captions come before the captions, and say where one id's ends: hence two passes over the
    pieces. The further captions of samples with several come last, as one hash; it is left out where no sample has
    several.
    """

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._further = hashlib.sha256()
        self._several = False
        self.counts = CaptionCounts()

    def add_lengths(self, captions: Captions) -> None:
        """First for all pieces."""
        self._sha256.update(np.diff(captions.first.ends, prepend=0).astype("<i8").tobytes())
        if len(captions.further):
            further = np.empty(len(captions.further), dtype=HASHED)
            further["number"] = captions.further["number"] + self.counts.samples  # ids, whatever the cut into pieces
            further["hash"] = captions.further["hash"]
            self._further.update(further.tobytes())
            self._several = True
        self.counts = self.counts.plus(CaptionCounts.of(captions))

    def add_texts(self, first: np.ndarray) -> None:
        """Then, for all pieces again, the bytes of their first captions."""
        self._sha256.update(first.tobytes())

    def hexdigest(self) -> str:
        """Once, at the end."""
        if self._several:
            self._sha256.update(self._further.digest())
        return self._sha256.hexdigest()
