"""Image files that need no caption: those of class folders, whose folder is their label, and those of puzzles."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from neuclip.data.captions import Captions, Texts
from neuclip.data.sample import Fault, Sample
from neuclip.data.source import Source, SourceFiles
from neuclip.data.tables.listed import read_image


class PlainImages(Source):
    """Ids follow `images`, paths from the folder; `labels` are theirs, or none."""

    kind = "folder"

    def __init__(
        self,
        name: str,
        folder: Path,
        images: Sequence[str],
        labels: Sequence[int] = (),
        faults: tuple[Fault, ...] = (),
    ):
        self.name = name
        self.folder = folder
        self.files = (folder,)
        self.faults = faults
        self._images = Texts.of(os.fsencode(image) for image in images)
        self._labels = list(labels)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        return Sample(read_image(self.folder, self._images[id], self.where(id)), ())

    def where(self, id: int) -> str:
        return str(self.folder / os.fsdecode(self._images[id]))

    def caption_pieces(self) -> Iterator[Captions]:
        yield Captions.of(() for _ in range(len(self)))

    def labels(self) -> list[int] | None:
        return self._labels or None

    def describe_files(self) -> SourceFiles:
        return SourceFiles(len(self), None)
