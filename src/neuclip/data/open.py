"""How an address becomes a source."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path

from neuclip.data.image_kinds import ENDINGS
from neuclip.data.locations import (
    COCO_SUFFIXES,
    KNOWN_SUFFIXES,
    LIST_SUFFIXES,
    PARQUET_SUFFIXES,
    TABLE_SUFFIXES,
    files_in,
    files_of,
    is_there,
    lines_of,
    name_of,
    parts_of,
    shards_of,
)
from neuclip.data.mixture import Mixture
from neuclip.data.source import Source
from neuclip.data.splits import is_part, refuse_several_parts
from neuclip.data.tables.coco import open_coco
from neuclip.data.tables.columns import Asked, say
from neuclip.data.tables.csv import open_csv
from neuclip.data.tables.folder import captions_of_coco, open_folder
from neuclip.data.tables.hugging_face import is_saved_dataset, open_saved_dataset
from neuclip.data.tables.jsonl import open_jsonl
from neuclip.data.tables.listed import ListedPairs, check_images
from neuclip.data.tables.parquet import holds_images, open_parquet
from neuclip.data.tar.remote import SHARD_SUFFIXES, Limits, is_remote, remote_shards
from neuclip.data.tar.remote_source import RemoteTarSource, open_remote
from neuclip.data.tar.source import TarSource
from neuclip.data.tar.writing import shards_missing
from neuclip.datasets.catalogue import is_labelled, resolve
from neuclip.errors import UserError
from neuclip.settings.secrets import without_query
from neuclip.settings.sections import DataSettings

COUNTED_PICTURES = 10_000  # where counting those that are left out stops
PACKED_SUFFIXES = (".zip", ".7z", ".bz2", ".xz", ".zst", ".rar")
KINDS = "tar shards, a CSV, TSV, JSONL or Parquet file, or a folder of images"


def open_source(
    address: str,
    *,
    image_column: str = "",
    caption_column: str = "",
    caption_key: str = "",
    limits: Limits | None = None,
) -> Source:
    """A built-in name, a file or folder of image-text pairs of any known kind, a pattern, or several between commas.

    `limits` are those of remote data.

    >>> open_source("icons-30k"); open_source("shards/{00000..00019}.tar"); open_source("pairs.csv:2,photos:0.5")
    """
    if not address:
        raise UserError(f"no data named; give --data.train icons-30k, or {KINDS}")
    asked = Asked(image_column, caption_column)
    parts = parts_of(address)
    sources = [_open_one(part, asked, caption_key, limits or Limits()) for part, _ in parts]
    weights = [weight for _, weight in parts]
    return sources[0] if weights == [1] else Mixture(sources, weights)


def open_training_data(data: DataSettings) -> Source:
    """What a run is told to train on. Tables that lead to no image are refused here, before a run has a folder."""
    source = open_source(
        data.train,
        image_column=data.image_column,
        caption_column=data.caption_column,
        caption_key=data.caption_key,
        limits=Limits(cache_size=data.cache_size, stall_seconds=data.remote_timeout),
    )
    check_listed_images(source)
    return source


def check_listed_images(source: Source) -> None:
    """Raises UserError for a table, alone or in a mixture, that leads to no image."""
    for part in source.sources if isinstance(source, Mixture) else (source,):
        if isinstance(part, ListedPairs):
            check_images(part)


def _open_one(address: str, asked: Asked, caption_key: str, limits: Limits) -> Source:
    if is_labelled(address):
        raise UserError(f"{address}: has labels and no captions; give it as --evaluation.zero_shot {address}")
    builtin = resolve(address)
    path = Path(address if builtin is None else builtin)
    name = address if builtin is not None else name_of(without_query(address))
    source: Source
    if is_remote(address):
        source = open_remote(name, address, caption_key, limits)
    elif is_there(path) and path.is_dir():
        source = _open_folder(name, path, asked, caption_key)
    else:
        source = _open_files(name, files_of(str(path)), asked, caption_key, limits)
    if len(source) == 0:
        first = f"; first of its faults: {source.faults[0].reason}, {source.faults[0].where}" if source.faults else ""
        raise UserError(
            f"{without_query(address)}: holds no samples{first}; give a file or folder with image-text pairs"
        )
    return source


def _open_folder(name: str, folder: Path, asked: Asked, caption_key: str) -> Source:
    """By what lies in it: shards, else a saved data set, else Parquet files with images, else images."""
    if shards := files_in(folder, SHARD_SUFFIXES):
        if missing := shards_missing(folder):
            raise UserError(
                f"{folder}: a conversion that was broken off, {missing:,} shards are missing; "
                "run the same neuclip data convert again, it goes on"
            )
        _say_left_out(folder, "tar shards")
        return TarSource(name, shards, caption_key)
    if is_saved_dataset(folder):
        return open_saved_dataset(name, folder, asked)
    tables = files_in(folder, PARQUET_SUFFIXES)
    if tables and holds_images(tables[0], asked):
        _say_left_out(folder, "Parquet files")
        return open_parquet(name, tables, asked)
    if annotations := captions_of_coco(folder):
        raise UserError(
            f"{folder}: its captions are in {annotations[-1].parent}; give one of the files there, such as "
            f"{annotations[0]}"
        )
    _refuse_several_folders(folder)
    if images := open_folder(name, folder, asked):
        return images
    if tables:
        return open_parquet(name, tables, asked)  # which says that its images are elsewhere
    near = files_in(folder, (*TABLE_SUFFIXES, *PACKED_SUFFIXES)) or sorted(folder.glob("captions_*.json"))
    hint = f"; did you mean {near[0]}?" if near else "; expected files such as 00000.tar, or a.jpg and a.txt"
    raise UserError(f"{folder}: no tar shards, no Parquet files and no images in this folder{hint}")


def _refuse_several_folders(folder: Path) -> None:
    """Of images: folders that are not called so may be classes or authors, and are one part together."""
    shown = [entry for entry in folder.iterdir() if entry.name[0] != "."]
    files = [f"{entry.name}/image" if is_part(entry.name) else "image" for entry in shown if entry.is_dir()]
    files += ["image" for entry in shown if entry.name.lower().endswith(ENDINGS)]
    refuse_several_parts(str(folder), files)


def _say_left_out(folder: Path, kind: str) -> None:
    """One archive among images decides how the folder is read; whoever meant the images must hear of it."""
    with os.scandir(folder) as entries:
        images = (entry for entry in entries if entry.name.lower().endswith(ENDINGS) and entry.name[0] != ".")
        count = sum(1 for _ in itertools.islice(images, COUNTED_PICTURES))
    if count:
        more = " or more" if count == COUNTED_PICTURES else ""
        say(
            f"{folder}: read as {kind}; {count:,}{more} images beside them are left out "
            f"(to read the images, move the {kind} into another folder)"
        )


def _open_list(name: str, path: Path, caption_key: str, limits: Limits) -> Source:
    """Shards of one source, end to end in the order of the list."""
    lines = lines_of(path)
    urls = [line for _, line in lines if is_remote(line)]
    if urls:
        if len(urls) < len(lines):
            raise UserError(f"{path}: lists local and remote shards; make two lists and give them between commas")
        remote = remote_shards(urls, limits)
        _refuse_twice(path, [shard.url for shard in remote])
        return RemoteTarSource(name, remote, caption_key, limits)
    shards = [shard for place, line in lines for shard in _shards_of_line(place, line)]
    _refuse_twice(path, [str(shard) for shard in shards])
    return TarSource(name, shards, caption_key)


def _shards_of_line(place: str, line: str) -> list[Path]:
    try:
        return shards_of(line)
    except UserError as error:
        raise UserError(f"{place} (a list of shards, one address per line): {error}") from error


def _refuse_twice(path: Path, shards: list[str]) -> None:
    shard, times = Counter(shards).most_common(1)[0]
    if times > 1:
        raise UserError(
            f"{path}: lists {without_query(shard)} {times} times; list it once, or give a weight, such as {path}:2"
        )


def _open_files(name: str, files: list[Path], asked: Asked, caption_key: str, limits: Limits) -> Source:
    first = files[0].name.lower()
    kind = next((suffixes for suffixes in KNOWN_SUFFIXES if first.endswith(suffixes)), None)
    if kind is None:
        if first.endswith(PACKED_SUFFIXES):
            raise UserError(f"{files[0]}: is packed in a way that is not read; unpack it, or make a .tar or .tar.gz")
        known = ", ".join(suffix for suffixes in KNOWN_SUFFIXES for suffix in suffixes)
        raise UserError(f"{files[0]}: unknown kind of data; known are {known}, and folders")
    other = [file for file in files if not file.name.lower().endswith(kind)]
    if other:
        pattern = files[0].with_name(f"*{next(suffix for suffix in kind if first.endswith(suffix))}")
        raise UserError(
            f"{other[0]}: is of another kind than {files[0]}; give one kind ('{pattern}'), or several between commas"
        )
    if kind == SHARD_SUFFIXES:
        return TarSource(name, files, caption_key)
    if kind == PARQUET_SUFFIXES:
        return open_parquet(name, files, asked)
    if len(files) > 1:
        raise UserError(f"{files[0]}: is one of {len(files)} files; give them between commas: {files[0]},{files[1]}")
    if kind == LIST_SUFFIXES:
        return _open_list(name, files[0], caption_key, limits)
    if kind == COCO_SUFFIXES:
        return open_coco(name, files[0])
    return open_csv(name, files[0], asked) if kind == TABLE_SUFFIXES else open_jsonl(name, files[0], asked)
