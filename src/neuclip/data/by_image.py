"""A table with one row per caption, read for retrieval: rows of the same image become one sample with all captions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain

import numpy as np

from neuclip.data.captions import PIECE, Captions
from neuclip.data.sample import BadSample, Sample
from neuclip.data.source import Source, SourceFiles
from neuclip.progress import track


def group_by_image(source: Source) -> Source:
    """The source itself unless several of its samples have the same image.

    Scored as it is, such a table would count an image's other captions as wrong answers.
    """
    keys = _keys_of_images(source) if source.images_in_rows else source.image_keys()
    if keys is None or len(np.unique(keys)) == len(keys):
        return source
    return GroupedByImage(source, keys)


class GroupedByImage(Source):
    """One sample per different key of `keys` (n,), in the order in which they first appear, with the captions of all
    rows that have it. Rows without a usable caption are `left_out`, unless their image has no other: what is measured
    are images, and each of these still has a caption."""

    def __init__(self, source: Source, keys: np.ndarray):
        self.source = source
        self.name = source.name
        self.kind = source.kind
        self.split = source.split
        self.files = source.files
        self.fetches = source.fetches
        self.captions_are_files = source.captions_are_files
        self.texts_are_captions = source.texts_are_captions
        _, first, image = np.unique(keys, return_index=True, return_inverse=True)
        image = np.argsort(np.argsort(first))[image]  # (n,): the id here of each row
        has_caption = np.concatenate([piece.per_sample() > 0 for piece in source.caption_pieces()])
        image_has_caption = np.bincount(image, weights=has_caption) > 0
        unused = ~has_caption & image_has_caption[image]
        rows = np.flatnonzero(~unused)
        self._rows = rows[np.argsort(image[rows], kind="stable")]
        self._ends = np.cumsum(np.bincount(image[rows]))
        self.left_out = np.flatnonzero(unused)
        self.faults = source.faults

    def rows(self, id: int) -> list[int]:
        """The ids of the source that have this image."""
        return self._rows[self._ends[id - 1] if id else 0 : self._ends[id]].tolist()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        # Each reads the file of the image again: far less work than decoding it once.
        samples = [self.source[row] for row in self.rows(id)]
        return Sample(samples[0].image, tuple(chain.from_iterable(sample.captions for sample in samples)))

    def where(self, id: int) -> str:
        """That of its first row."""
        return self.source.where(self.rows(id)[0])

    def caption_pieces(self) -> Iterator[Captions]:
        captions: list[tuple[str | bytes, ...]] = []
        for piece in self.source.caption_pieces():
            several = set((piece.further["number"] + len(captions)).tolist())
            captions += [
                self._captions_of_row(row) if row in several else (text,)
                for row, text in enumerate(piece.first, start=len(captions))
            ]
        for first in range(0, len(self), PIECE):
            ids = range(first, min(first + PIECE, len(self)))
            yield Captions.of(chain.from_iterable(captions[row] for row in self.rows(id)) for id in ids)

    def _captions_of_row(self, row: int) -> tuple[str, ...]:
        """Of a row with several; none if it cannot be read, which is the same for all rows of its image."""
        try:
            return self.source[row].captions
        except BadSample:
            return ()

    def describe_files(self) -> SourceFiles:
        return self.source.describe_files()

    def places(self) -> set[str]:
        return self.source.places()

    def check_images(self) -> None:
        self.source.check_images()


def _keys_of_images(source: Source) -> np.ndarray:
    """(n,) uint64 from the images' bytes, which are all read for it; what cannot be read stands for itself."""
    keys = np.empty(len(source), dtype=np.uint64)
    for id in track(range(len(source)), f"comparing the images of {source.name}", len(source)):
        try:
            content = source[id].image
        except BadSample:
            content = b"sample %d" % id
        keys[id] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return keys
