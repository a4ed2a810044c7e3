"""What a source of image-text pairs is: the base class, with a default for whatever most kinds need not say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neuclip.data.captions import CaptionCounts, Captions
from neuclip.data.order import Order
from neuclip.data.sample import Fault, Sample


class SourceFiles(NamedTuple):
    """What a source is made of, as far as it is known without reading it."""

    number: int  # shards or tables; images in files of their own are not counted, except in a folder
    bytes: int | None  # None: only reading every file would tell


class ShardFacts(NamedTuple):
    """How a source is cut into shards."""

    samples: Sequence[int]  # of each shard
    disk_bytes: Sequence[int] = ()  # of remote shards: what each takes on this disk once it is downloaded and unpacked
    cache_size: int = 0  # bytes that downloaded shards may take on this disk


def file_version(file: Path) -> str:
    try:
        status = file.stat()
    except (OSError, ValueError):
        return f"{file.name} is not there"
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"  # which stay as they are when a folder is moved


class Source(ABC):
    """Image-text pairs with dense ids 0..n-1. It can be pickled: every data worker has its own copy.

    A new kind of source has `name`, `kind`, `__len__`, `__getitem__`, `where` and `caption_pieces`, and a row in the
    table of data/open.py; the rest has defaults.
    """

    name: str
    kind: str  # as `neuclip doctor` calls it: tar, csv, folder ...
    split: str = ""  # of a file that lists several: the one that is read
    files: Sequence[Path] = ()  # that hold its pairs on this disk; images in files of their own aside
    faults: tuple[Fault, ...] = ()  # what could not be indexed: members without an image, cut-off shards; id -1
    captions_sha256: str | None = None  # the fingerprint of all captions, where it is stored
    caption_counts: CaptionCounts | None = None  # where they are known: stored, or counted before (data/fingerprint.py)
    fetches: bool = False  # data are downloaded while it is read: its workers must not be forks of this process
    captions_are_files: bool = False  # each caption is a file of its own: reading them all takes long
    texts_are_captions: bool = False  # a whole text, however many lines it has, is one caption
    images_in_rows: bool = False  # a table holds its images: only their bytes tell which rows have the same

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, id: int) -> Sample:
        """Raises BadSample when the pair cannot be used."""

    @abstractmethod
    def where(self, id: int) -> str:
        """Shard and member, or file and row, for messages."""

    @abstractmethod
    def caption_pieces(self) -> Iterator[Captions]:
        """The captions of every id in order, some at a time; reads no images."""

    def captions(self) -> list[str]:
        """The first caption of every id, "" where there is none; reads no images."""
        return [text for piece in self.caption_pieces() for text in piece.first.strings()]

    def labels(self) -> list[int] | None:
        """The class of every id; None unless every sample has one."""
        return None

    @property
    def parts(self) -> tuple[Source, ...]:
        """The sources of a mixture; of any other source itself."""
        return (self,)

    def order(self, seed: int) -> Order:
        """The endless order in which training reads it."""
        return Order(len(self), seed)

    def prefetch(self, order: Order, start: int, count: int) -> None:  # noqa: B027
        """Called before positions start..start+count-1 of `order` are read. Remote sources download ahead."""

    def image_folder(self) -> Path | None:
        """Where the images lie as files; None if they do not."""
        return None

    def check_images(self) -> None:  # noqa: B027
        """Raises UserError where no image can be found at all: a wrong table rather than bad samples."""

    def describe_files(self) -> SourceFiles:
        return SourceFiles(len(self.files), sum(file.stat().st_size for file in self.files))

    def file_versions(self) -> Iterator[str]:
        """Whatever is computed from the images holds as long as these stay the same."""
        return map(file_version, self.files)

    def places(self) -> set[str]:
        """The files or folders that hold its pairs, resolved, to see whether two sources share data."""
        return {f"{file.resolve()}{self.split and f' ({self.split})'}" for file in self.files}

    def image_keys(self) -> np.ndarray | None:
        """(n,) uint64, equal for pairs of one image; None: every pair has its own, as far as it is known unread."""
        return None

    def check_id(self, id: int) -> None:
        if not 0 <= id < len(self):
            raise IndexError(f"sample {id} of {len(self)}")

    def mark_needed(self, order: Order, start: int) -> None:  # noqa: B027
        """Mark what is read from position `start` on as used now: a mixture calls it for all before one prefetches."""

    def cheap_ids(self) -> int | None:
        """How many ids, from 0 on, can be read with a single download; None: there is no such limit."""
        return None

    def shard_facts(self) -> ShardFacts | None:
        """None for data without shards, and for a mixture: ask its parts."""
        return None

    def has_remote_indexes(self) -> bool:
        """Whether the indexes of remote shards lie beside them; may ask the remote."""
        return False
