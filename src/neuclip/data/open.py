"""How an address becomes a source. A new kind of source is one row of KINDS."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from neuclip.data import by_name
from neuclip.data.clip_benchmark_layout import (
    DATASET_TYPE,
    SHARD_COUNT,
    evaluated_part,
    is_retrieval_set,
    numbered_shards,
)
from neuclip.data.decoding import IMAGE_SUFFIXES
from neuclip.data.hold_out import split
from neuclip.data.locations import (
    SHARD_SUFFIXES,
    STARS,
    check_protocol,
    expand_braces,
    files_in,
    files_of,
    is_remote,
    is_there,
    parts_of,
    read_list,
    shards_of,
)
from neuclip.data.mixture import Mixture
from neuclip.data.source import Source
from neuclip.data.splits import is_part, refuse_several_parts
from neuclip.data.tables.arrow import holds_images, is_saved_dataset, open_parquet, open_saved_dataset
from neuclip.data.tables.coco import open_coco
from neuclip.data.tables.columns import ColumnChoice, print_once, read_json_file
from neuclip.data.tables.csv import read_csv
from neuclip.data.tables.folder import coco_captions, has_header, open_folder
from neuclip.data.tables.jsonl import read_jsonl
from neuclip.data.tables.karpathy import csv_entries, is_karpathy_csv, is_karpathy_json, json_entries, open_karpathy
from neuclip.data.tables.listed import ListedPairs
from neuclip.data.tar.gzip import PACKED_CUT_OFF, PACKED_DAMAGED
from neuclip.data.tar.index import LINES
from neuclip.data.tar.remote import Limits, RemoteShard, remote_shards
from neuclip.data.tar.remote_source import RemoteTarSource
from neuclip.data.tar.source import TarSource
from neuclip.data.tar.walk import CUT_OFF, DAMAGED, ENDS_IN_ZEROS, NO_END_MARK, NOT_TAR
from neuclip.data.tar.writing import shards_missing
from neuclip.errors import UserError
from neuclip.secrets import without_query
from neuclip.settings.sections import DataSettings, Settings

COUNTED_IMAGES = 10_000  # where counting those that are left out stops
PACKED_SUFFIXES = (".zip", ".7z", ".bz2", ".xz", ".zst", ".rar")
SHARD_DAMAGE = (CUT_OFF, DAMAGED, ENDS_IN_ZEROS, NO_END_MARK, NOT_TAR, PACKED_CUT_OFF, PACKED_DAMAGED)
EXAMPLES = "tar shards, a CSV, TSV, JSONL or Parquet file, or a folder of images"


class OpenOptions(NamedTuple):
    """What the user says about the data beside its address; each kind of source takes what it needs."""

    columns: ColumnChoice = ColumnChoice()
    caption_key: str = ""
    limits: Limits = Limits()
    retrieval: bool = False  # to be measured on, not trained on


Opener = Callable[[str, list[Path], OpenOptions], Source]  # takes the source's name and its files


class Kind(NamedTuple):
    """Files that are opened in the same way."""

    suffixes: tuple[str, ...]
    open: Opener
    several_files: bool = False  # whether several files can be one source
    remote: bool = False  # whether it is read from a remote address


def _open_shards(name: str, files: list[Path], options: OpenOptions) -> Source:
    """The texts of a retrieval set are read as its mark says, whatever caption key the other data of a run have."""
    marked = {folder for folder in {file.parent for file in files} if is_retrieval_set(folder)}
    outside = [file for file in files if file.parent not in marked]
    if marked and outside:
        raise UserError(
            f"{outside[0]}: is not of a retrieval set, and {min(marked)} is ({DATASET_TYPE}); their texts are read "
            "differently: give them between commas"
        )
    source = TarSource(name, files, LINES if marked else options.caption_key)
    damage = [fault for fault in source.faults if fault.reason in SHARD_DAMAGE]
    if marked and options.retrieval and damage:
        raise UserError(
            f"{damage[0].where}: {damage[0].reason}; figures on a part of a set cannot be compared: copy it again"
        )
    return source


def _open_json(name: str, files: list[Path], options: OpenOptions) -> Source:
    content = read_json_file(files[0], "fetch it again")
    if is_karpathy_json(content):
        return open_karpathy(name, files[0], json_entries(content), retrieval=options.retrieval)
    return open_coco(name, files[0], content)


def _open_csv(name: str, files: list[Path], options: OpenOptions) -> Source:
    path = files[0]
    if is_karpathy_csv(path, options.columns):
        return open_karpathy(name, path, csv_entries(path), retrieval=options.retrieval)
    return ListedPairs(name, path, read_csv(path, options.columns))


def _open_text(name: str, files: list[Path], options: OpenOptions) -> Source:
    """A table of captions if it begins with a header; else a list of shards, end to end in its order."""
    path = files[0]
    if has_header(path, options.columns):
        return ListedPairs(name, path, read_csv(path, options.columns))
    lines = read_list(path)
    urls = [line for _, line in lines if is_remote(line)]
    if urls:
        if len(urls) < len(lines):
            raise UserError(f"{path}: lists local and remote shards; make two lists and give them between commas")
        remote = _remote_shards(urls, options.limits)
        _refuse_repeated(path, [shard.url for shard in remote])
        return RemoteTarSource(name, remote, options.caption_key, options.limits)
    shards = [shard for place, line in lines for shard in _shards_of_line(place, line)]
    _refuse_repeated(path, [str(shard) for shard in shards])
    return _open_shards(name, shards, options)


def _open_jsonl(name: str, files: list[Path], options: OpenOptions) -> Source:
    return ListedPairs(name, files[0], read_jsonl(files[0], options.columns))


KINDS: list[Kind] = [
    Kind(SHARD_SUFFIXES, _open_shards, several_files=True, remote=True),
    Kind((".csv", ".tsv"), _open_csv),
    Kind((".jsonl", ".ndjson"), _open_jsonl),
    Kind((".parquet",), lambda name, files, options: open_parquet(name, files, options.columns), several_files=True),
    Kind((".json",), _open_json),
    Kind((".txt",), _open_text),
]


def kind_of(name: str) -> Kind | None:
    """The kind of a file by its name; None if its ending is not known."""
    return next((kind for kind in KINDS if name.lower().endswith(kind.suffixes)), None)


def open_source(
    address: str,
    *,
    image_column: str = "",
    caption_column: str = "",
    caption_key: str = "",
    limits: Limits | None = None,
    retrieval: bool = False,
) -> Source:
    """A data set by name, a file or folder of image-text pairs of any known kind, a pattern, or several between commas.

    `limits` are those of remote data. With `retrieval` it is to be measured on: of files with splits the test split is
    read.

    >>> open_source("icons-30k"); open_source("shards/{00000..00019}.tar"); open_source("pairs.csv:2,photos:0.5")
    """
    if not address:
        raise UserError(f"no data given; give --data.train icons-30k, or {EXAMPLES}")
    columns = ColumnChoice(image_column, caption_column, "evaluation" if retrieval else "data")
    options = OpenOptions(columns, caption_key, limits or Limits(), retrieval)
    parts = parts_of(address)
    sources = [_open_one(part, options) for part, _ in parts]
    weights = [weight for _, weight in parts]
    return sources[0] if weights == [1] else Mixture(sources, weights)


def open_as(address: str, data: DataSettings, *, retrieval: bool = False) -> Source:
    """With columns, caption key and limits of a run. Tables that lead to no image are refused here, before a run has a
    folder."""
    source = open_source(
        address,
        image_column=data.image_column,
        caption_column=data.caption_column,
        caption_key=data.caption_key,
        limits=Limits(cache_size=data.cache_size, stall_seconds=data.remote_timeout),
        retrieval=retrieval,
    )
    source.check_images()
    return source


def open_training_data(settings: Settings) -> Source:
    """What a run trains on: without what data.hold_out keeps for evaluation."""
    source = open_as(settings.data.train, settings.data)
    return split(source, settings.data.hold_out, settings.run.seed)[0] if settings.data.hold_out else source


def open_held_out_part(settings: Settings) -> Source:
    """What data.hold_out keeps from training."""
    source = open_as(settings.data.train, settings.data)
    return split(source, settings.data.hold_out, settings.run.seed)[1]


def data_name(address: str) -> str:
    """The name of the source that an address means, without opening it."""
    return "+".join(_part_name(part) for part, _ in parts_of(address))


def _part_name(address: str) -> str:
    return address if by_name.is_name(address) else short_name(without_query(address))


def _open_one(address: str, options: OpenOptions) -> Source:
    if by_name.is_labelled(address):
        raise UserError(f"{address}: has labels and no captions; give it as --evaluation.zero_shot {address}")
    folder = by_name.resolve(address)
    path, name = folder or Path(address), _part_name(address)
    if folder:  # its files are ours: what the user says about others does not hold for them
        options = OpenOptions(limits=options.limits, retrieval=options.retrieval)
    source: Source
    if is_remote(address):
        remote = _remote_shards([address], options.limits)
        source = RemoteTarSource(name, remote, options.caption_key, options.limits)
    elif is_there(path) and path.is_dir():
        source = _open_folder(name, path, options)
    else:
        source = _open_files(name, files_of(str(path)), options)
    if len(source) == 0:
        first = f"; first of its faults: {source.faults[0].reason}, {source.faults[0].where}" if source.faults else ""
        raise UserError(
            f"{without_query(address)}: holds no samples{first}; give a file or folder with image-text pairs"
        )
    return source


def _remote_shards(addresses: list[str], limits: Limits) -> list[RemoteShard]:
    for url in (url for address in addresses for url in expand_braces(address)):
        check_protocol(url)
        name = without_query(url)
        kind = kind_of(name)
        if (kind and not kind.remote) or name.lower().endswith(PACKED_SUFFIXES):
            raise UserError(
                f"{name}: only tar shards can be remote; fetch it and give the local file, or make "
                "shards of that with neuclip data convert and upload them"
            )
    return remote_shards(addresses, limits)


def short_name(address: str) -> str:
    """A name for records: the file's without its ending, a pattern's folder."""
    path = Path(address).absolute()
    while not is_there(path) and (STARS.search(path.name) or "{" in path.name):
        path = path.parent
    endings = "|".join(re.escape(suffix) for kind in KINDS for suffix in kind.suffixes)
    return re.sub(rf"({endings})$", "", path.name, flags=re.IGNORECASE)


def _open_files(name: str, files: list[Path], options: OpenOptions) -> Source:
    first = files[0]
    kind = kind_of(first.name)
    if kind is None:
        if first.name.lower().endswith(PACKED_SUFFIXES):
            raise UserError(f"{first}: is packed in a way that is not read; unpack it, or make a .tar or .tar.gz")
        known = ", ".join(suffix for kind in KINDS for suffix in kind.suffixes)
        raise UserError(f"{first}: unknown kind of data; known are {known}, and folders")
    other = [file for file in files if not file.name.lower().endswith(kind.suffixes)]
    if other:
        ending = next(suffix for suffix in kind.suffixes if first.name.lower().endswith(suffix))
        raise UserError(
            f"{other[0]}: is of another kind than {first}; give one kind ('{first.with_name(f'*{ending}')}'), or "
            "several between commas"
        )
    if len(files) > 1 and not kind.several_files:
        raise UserError(f"{first}: is one of {len(files)} files; give them between commas: {first},{files[1]}")
    return kind.open(name, files, options)


def _open_folder(name: str, folder: Path, options: OpenOptions) -> Source:
    """By what lies in it: shards, else a saved data set, else Parquet files with images, else images."""
    if options.retrieval and is_retrieval_set(folder):
        folder = evaluated_part(folder)
        # A folder that is marked itself, which is not the layout's, may do without the count.
        if (folder / SHARD_COUNT).exists() or (any(folder.glob("*.tar")) and not (folder / DATASET_TYPE).is_file()):
            numbered_shards(folder)
    if shards := files_in(folder, SHARD_SUFFIXES):
        if missing := shards_missing(folder):
            raise UserError(
                f"{folder}: holds an unfinished conversion, {missing:,} shards are missing; "
                "run the same neuclip data convert again to continue it"
            )
        _print_left_out(folder, "tar shards")
        return _open_shards(name, shards, options)
    if is_saved_dataset(folder):
        return open_saved_dataset(name, folder, options.columns)
    tables = files_in(folder, (".parquet",))
    if tables and holds_images(tables[0], options.columns):
        _print_left_out(folder, "Parquet files")
        return open_parquet(name, tables, options.columns)
    if annotations := coco_captions(folder):
        raise UserError(
            f"{folder}: its captions are in {annotations[-1].parent}; give one of the files there, such as "
            f"{annotations[0]}"
        )
    _refuse_several_folders(folder)
    if images := open_folder(name, folder, options.columns):
        return images
    if tables:
        return open_parquet(name, tables, options.columns)  # raises: its images are elsewhere
    near = files_in(folder, (".csv", ".tsv", *PACKED_SUFFIXES)) or sorted(folder.glob("captions_*.json"))
    hint = f"; did you mean {near[0]}?" if near else "; expected files such as 00000.tar, or a.jpg and a.txt"
    raise UserError(f"{folder}: no tar shards, no Parquet files and no images in this folder{hint}")


def _refuse_several_folders(folder: Path) -> None:
    """Of images: folders with other names than train or test may be classes or authors, and are one part together."""
    entries = [entry for entry in folder.iterdir() if entry.name[0] != "."]
    files = [f"{entry.name}/image" if is_part(entry.name) else "image" for entry in entries if entry.is_dir()]
    files += ["image" for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES)]
    refuse_several_parts(str(folder), files)


def _print_left_out(folder: Path, kind: str) -> None:
    """One archive among images decides how the folder is read; users who meant the images must be told."""
    with os.scandir(folder) as entries:
        images = (entry for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES) and entry.name[0] != ".")
        count = sum(1 for _ in itertools.islice(images, COUNTED_IMAGES))
    if count:
        more = " or more" if count == COUNTED_IMAGES else ""
        print_once(
            f"{folder}: read as {kind}; {count:,}{more} images beside them are left out "
            f"(to read the images, move the {kind} into another folder)"
        )


def _shards_of_line(place: str, line: str) -> list[Path]:
    try:
        return shards_of(line)
    except UserError as error:
        table = "; a table of captions begins with a header such as image,caption" if re.search(r"[,\t]", line) else ""
        raise UserError(f"{place} (a list of shards, one address per line): {error}{table}") from error


def _refuse_repeated(path: Path, shards: list[str]) -> None:
    shard, times = Counter(shards).most_common(1)[0]
    if times > 1:
        raise UserError(
            f"{path}: lists {without_query(shard)} {times} times; list it once, or give a weight, such as {path}:2"
        )
