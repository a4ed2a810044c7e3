"""A data set's identity in one line, so that results are compared on equal data only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from neuclip.data.shards.index import Texts
from neuclip.data.source import Source

KEPT_BYTES = 256 << 20  # of captions between the two passes; of more the second pass reads them again


def fingerprint(source: Source) -> dict[str, int | str]:
    """{"count": n, "sha256": of the captions in order of id}: equal for equal pairs, in whatever files they lie.

    All lengths come before all captions, and say where one id's caption ends: hence two passes.
    """
    if stored := getattr(source, "captions_sha256", None):  # of a billion captions that were read once already
        return {"count": len(source), "sha256": stored}
    digest = hashlib.sha256()
    kept: list[np.ndarray] = []
    size = 0
    for texts in caption_texts(source):
        digest.update(np.diff(texts.ends, prepend=0).astype("<i8").tobytes())
        size += texts.bytes.nbytes
        if size <= KEPT_BYTES:
            kept.append(texts.bytes)
        else:
            kept.clear()
    for captions in kept if size <= KEPT_BYTES else (texts.bytes for texts in caption_texts(source)):
        digest.update(captions.tobytes())
    return {"count": len(source), "sha256": digest.hexdigest()}


def caption_texts(source: Source) -> Iterator[Texts]:
    """The first caption of every id in pieces: a hundred million Python strings would not fit into memory."""
    for part in getattr(source, "sources", (source,)):
        in_pieces = getattr(part, "caption_texts", None)
        if in_pieces is None:
            yield Texts.of(caption.encode() for caption in part.captions())
            continue
        for texts in in_pieces():
            # Zeros around a caption are not part of it; nearly never are there any.
            zeros = not texts.bytes.all()
            yield Texts.of(caption.encode() for caption in texts.strings()) if zeros else texts
