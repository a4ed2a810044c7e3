"""What a source is made of: its kind, its files and their size, as far as they are known without reading them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from neuclip.data.mixture import Mixture
from neuclip.data.source import Source
from neuclip.data.tables.arrow import ArrowPairs
from neuclip.data.tables.folder import ImageFolder, ListedInFolder
from neuclip.data.tables.hugging_face import SavedDataset
from neuclip.data.tables.listed import ListedPairs
from neuclip.data.tar.remote_source import RemoteTarSource
from neuclip.data.tar.source import TarSource


class Files(NamedTuple):
    """`kind` is one of tar, remote tar, csv, tsv, jsonl, ndjson, parquet, saved data set, folder; of a mixture several,
    joined by a plus."""

    kind: str
    number: int  # shards or tables; images in files of their own are not counted, except in a folder
    size: int | None  # bytes; None: not known without asking each file


def files_of(source: Source) -> Files:
    if isinstance(source, Mixture):
        return _together([files_of(part) for part in source.sources])
    if isinstance(source, RemoteTarSource):
        sizes = [shard.size for shard in source.remote]
        return Files("remote tar", len(sizes), sum(sizes) if min(sizes) >= 0 else None)
    if isinstance(source, TarSource):
        return _on_disk("tar", source.paths)
    if isinstance(source, ImageFolder | ListedInFolder):
        return Files("folder", len(source), None)
    if isinstance(source, ListedPairs):
        return _on_disk(source.path.suffix.lower().removeprefix("."), [source.path])
    files = getattr(source, "files", []) if isinstance(source, ArrowPairs) else []
    return _on_disk("saved data set" if isinstance(source, SavedDataset) else "parquet", files)


def places_of(source: Source) -> set[str]:
    """The files or folders that hold its pairs, wherever they were named from."""
    if isinstance(source, Mixture):
        return set().union(*map(places_of, source.sources))
    if isinstance(source, RemoteTarSource):
        return set(source.shards)
    files = getattr(source, "paths", ()) or getattr(source, "files", ())
    alone = getattr(source, "path", None) or getattr(source, "folder", None)
    return {str(Path(file).resolve()) for file in files or [alone] if file}


def captions_are_in_files(source: Source) -> bool:
    """Whether each caption is a file of its own, so that having them all takes long."""
    parts = source.sources if isinstance(source, Mixture) else (source,)
    return any(isinstance(part, ImageFolder) for part in parts)


def _on_disk(kind: str, files: Sequence[Path]) -> Files:
    return Files(kind, len(files), sum(file.stat().st_size for file in files))


def _together(parts: list[Files]) -> Files:
    kinds = "+".join(dict.fromkeys(part.kind for part in parts))
    sizes = [part.size for part in parts if part.size is not None]
    return Files(kinds, sum(part.number for part in parts), sum(sizes) if len(sizes) == len(parts) else None)
