"""What a source of image-text pairs is, and how an address becomes one."""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Protocol

from neuclip.data.sample import Fault, Sample
from neuclip.data.shards.remote import SHARD_SUFFIXES, Limits, is_remote, without_query
from neuclip.data.shards.writing import shards_missing
from neuclip.data.sources.coco import open_coco
from neuclip.data.sources.columns import Asked, say
from neuclip.data.sources.csv import ENDINGS, open_csv
from neuclip.data.sources.folder import open_folder
from neuclip.data.sources.hugging_face import is_saved_dataset, open_saved_dataset
from neuclip.data.sources.jsonl import open_jsonl
from neuclip.data.sources.listed import ListedPairs, check_pictures
from neuclip.data.sources.mixture import Mixture, split_address
from neuclip.data.sources.parquet import open_parquet
from neuclip.data.sources.remote_tar import open_remote
from neuclip.data.sources.tar import TarSource
from neuclip.errors import AskedWrongly
from neuclip.settings.nearest import nearest, nearest_path
from neuclip.settings.sections import DataSettings

TABLE_SUFFIXES = (".csv", ".tsv")
LINES_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
COCO_SUFFIXES = (".json",)
KNOWN_SUFFIXES = (SHARD_SUFFIXES, TABLE_SUFFIXES, LINES_SUFFIXES, PARQUET_SUFFIXES, COCO_SUFFIXES)
COUNTED_PICTURES = 10_000  # where counting those that are left out stops
KINDS = "tar shards, a CSV, TSV, JSONL or Parquet file, or a folder of pictures"


class Source(Protocol):
    """Pairs with dense ids 0..n-1. It can be pickled: every worker process has its own."""

    name: str

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What never became a sample: members without a picture, cut-off shards; id -1."""

    def __len__(self) -> int: ...

    def __getitem__(self, id: int) -> Sample:
        """Raises BadSample when the pair cannot be had."""

    def where(self, id: int) -> str:
        """Shard and member, or file and row, for messages."""

    def captions(self) -> list[str]:
        """The first caption of every id, "" where there is none; reads no pictures."""


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
        raise AskedWrongly(f"no data named; give --data.train icons-30k, or {KINDS}")
    asked = Asked(image_column, caption_column)
    parts = parts_of(address)
    sources = [_open_one(part, asked, caption_key, limits or Limits()) for part, _ in parts]
    weights = [weight for _, weight in parts]
    return sources[0] if weights == [1] else Mixture(sources, weights)


def parts_of(address: str) -> list[tuple[str, Fraction]]:
    """The addresses between commas, each with its weight; what is there under the whole address is one."""
    if is_there(Path(address)):
        return [(address, Fraction(1))]
    try:
        return split_address(address)
    except OSError as error:
        raise AskedWrongly(f"{address}: cannot be looked at ({error.strerror}); give a shorter pattern") from error


def check_there(address: str) -> None:
    """Raises AskedWrongly for an address that leads to nothing. Opens and builds nothing, and asks no remote."""
    from neuclip.data.named.builtin import is_builtin

    for part, _ in parts_of(address):
        if not (is_builtin(part) or is_remote(part)):
            files_of(part)


def is_there(path: Path) -> bool:
    """As `path.exists()`; what is too long for a file's name, such as a list of many addresses, is none."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise AskedWrongly(f"{path}: cannot be looked at ({error.strerror}); check its permissions") from error


def open_training_data(data: DataSettings) -> Source:
    """What a run is told to train on. Tables that lead to no picture are refused here, before a run has a folder."""
    source = open_source(
        data.train,
        image_column=data.image_column,
        caption_column=data.caption_column,
        caption_key=data.caption_key,
        limits=Limits(cache_size=data.cache_size, stall_seconds=data.remote_timeout),
    )
    for part in source.sources if isinstance(source, Mixture) else (source,):
        if isinstance(part, ListedPairs):
            check_pictures(part)
    return source


def _open_one(address: str, asked: Asked, caption_key: str, limits: Limits) -> Source:
    from neuclip.data.named.builtin import is_labelled, resolve

    if is_labelled(address):
        raise AskedWrongly(f"{address}: has labels and no captions; give it as --evaluation.zero_shot {address}")
    builtin = resolve(address)
    path = Path(address if builtin is None else builtin)
    name = address if builtin is not None else _name(path)
    source: Source
    if is_remote(address):
        source = open_remote(_name(Path(without_query(address))), address, caption_key, limits)
    elif is_there(path) and path.is_dir():
        source = _open_folder(name, path, asked, caption_key)
    else:
        source = _open_files(name, files_of(str(path)), asked, caption_key)
    if len(source) == 0:
        first = f"; first of its faults: {source.faults[0].reason}, {source.faults[0].where}" if source.faults else ""
        raise AskedWrongly(f"{address}: holds no samples{first}; give a file or folder with image-text pairs")
    return source


def _open_folder(name: str, folder: Path, asked: Asked, caption_key: str) -> Source:
    """By what lies in it: shards, else a saved data set, else Parquet files, else pictures."""
    if shards := _files_in(folder, SHARD_SUFFIXES):
        if missing := shards_missing(folder):
            raise AskedWrongly(
                f"{folder}: a conversion that was broken off, {missing:,} shards are missing; "
                "run the same neuclip data convert again, it goes on"
            )
        _say_left_out(folder, "tar shards")
        return TarSource(name, shards, caption_key)
    if is_saved_dataset(folder):
        return open_saved_dataset(name, folder, asked)
    if tables := _files_in(folder, PARQUET_SUFFIXES):
        _refuse_several_splits(folder, tables)
        _say_left_out(folder, "Parquet files")
        return open_parquet(name, tables, asked)
    if pictures := open_folder(name, folder, asked):
        return pictures
    near = _files_in(folder, TABLE_SUFFIXES) or sorted(folder.glob("captions_*.json"))
    hint = f"; did you mean {near[0]}?" if near else "; expected files such as 00000.tar, or a.jpg and a.txt"
    raise AskedWrongly(f"{folder}: no tar shards, no Parquet files and no pictures in this folder{hint}")


def _say_left_out(folder: Path, kind: str) -> None:
    """One archive among pictures decides how the folder is read; whoever meant the pictures must hear of it."""
    with os.scandir(folder) as entries:
        pictures = (entry for entry in entries if entry.name.lower().endswith(ENDINGS) and entry.name[0] != ".")
        count = sum(1 for _ in itertools.islice(pictures, COUNTED_PICTURES))
    if count:
        more = " or more" if count == COUNTED_PICTURES else ""
        say(
            f"{folder}: read as {kind}; {count:,}{more} pictures beside them are left out "
            f"(to read the pictures, move the {kind} into another folder)"
        )


def _open_files(name: str, files: list[Path], asked: Asked, caption_key: str) -> Source:
    first = files[0].name.lower()
    kind = next((suffixes for suffixes in KNOWN_SUFFIXES if first.endswith(suffixes)), None)
    if kind is None:
        known = ", ".join(suffix for suffixes in KNOWN_SUFFIXES for suffix in suffixes)
        raise AskedWrongly(f"{files[0]}: unknown kind of data; known are {known}, and folders")
    other = [file for file in files if not file.name.lower().endswith(kind)]
    if other:
        raise AskedWrongly(f"{other[0]}: is of another kind than {files[0]}; give them as {files[0]},{other[0]}")
    if kind == SHARD_SUFFIXES:
        return TarSource(name, files, caption_key)
    if kind == PARQUET_SUFFIXES:
        return open_parquet(name, files, asked)
    if len(files) > 1:
        raise AskedWrongly(
            f"{files[0]}: is one of {len(files)} tables; give them between commas: {files[0]},{files[1]}"
        )
    if kind == COCO_SUFFIXES:
        return open_coco(name, files[0])
    return open_csv(name, files[0], asked) if kind == TABLE_SUFFIXES else open_jsonl(name, files[0], asked)


def _refuse_several_splits(folder: Path, tables: list[Path]) -> None:
    """train-00000-of-00010.parquet beside test-00000-of-00001.parquet: reading both would train on the test."""
    splits = sorted({match[1] for table in tables if (match := re.match(r"(\w+)-\d+-of-\d+", table.name))})
    if len(splits) > 1:
        chosen = tables[0].with_name(f"{splits[-1]}-*.parquet")
        raise AskedWrongly(f"{folder}: holds the splits {', '.join(splits)}; give one of them, such as '{chosen}'")


def shards_of(address: str) -> list[Path]:
    """The tar shards that an address means, sorted by path."""
    path = Path(address)
    if is_there(path) and path.is_dir():
        shards = _files_in(path, SHARD_SUFFIXES)
        if not shards:
            raise AskedWrongly(
                f"{address}: no tar shards in this folder or one below; expected files such as 00000.tar"
            )
        return shards
    files = files_of(address)
    for file in files:
        if not file.name.lower().endswith(SHARD_SUFFIXES):
            raise AskedWrongly(f"{file}: is not a tar shard; known are {', '.join(SHARD_SUFFIXES)}")
    return files


def files_of(address: str) -> list[Path]:
    """The file, or all files of a pattern, sorted by path."""
    path = Path(address)
    if is_there(path):
        return [path]
    if "{" in address:
        return _named(address)
    if any(letter in address for letter in "*?["):
        found = sorted(Path(file) for file in glob.glob(address) if Path(file).is_file())  # noqa: PTH207
        if not found:
            remedy = _other_folder(address) or "check the folder, and that it is in quotes"
            raise AskedWrongly(f"{address}: no file matches this pattern; {remedy}")
        return found
    raise AskedWrongly(_nothing_there(address))


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Those in the folder and one below; hidden ones are left out."""
    found = {path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.name.lower().endswith(suffixes)}
    # `gunzip -k` leaves both files; reading both would show every sample twice.
    twins = {path for path in found if path.suffix == ".gz" and path.with_suffix("") in found}
    return sorted(path for path in found - twins if path.is_file() and not path.name.startswith("."))


def _named(pattern: str) -> list[Path]:
    """All files of a brace pattern; a missing one is an error, not a smaller data set."""
    paths = sorted({Path(text) for text in expand_braces(pattern)})
    if not paths:
        raise AskedWrongly(f"{pattern}: no file matches this pattern; the first number must not be above the last")
    missing = [path for path in paths if not (is_there(path) and path.is_file())]
    if missing:
        raise AskedWrongly(
            f"{pattern}: {len(missing)} of {len(paths)} files do not exist, first of all {missing[0]}; "
            f"{_other_folder(pattern) or 'correct the pattern'}"
        )
    return paths


def expand_braces(pattern: str) -> list[str]:
    """`a{00..02}.tar` -> a00.tar, a01.tar, a02.tar and `{x,y}.tar` -> x.tar, y.tar; several braces multiply."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span:
        first, last = span.groups()
        choices = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    else:
        choices = match[1].split(",")
    return [
        text for choice in choices for text in expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def _nothing_there(address: str) -> str:
    from neuclip.data.named.builtin import builtin_names

    names = builtin_names()
    name, slash, part = address.partition("/")
    near = nearest(name, names)
    proposals = [f"{near}{slash}{part}"] if near else []
    proposals += [str(path)] if (path := nearest_path(Path(address))) else []
    if best := nearest(address, proposals):
        return f"{address}: no such file, folder or built-in data set; did you mean {best}?"
    return f"{address}: no such file or folder; check the path, or use a built-in data set: {', '.join(names)}"


def _other_folder(pattern: str) -> str:
    """The same pattern where its folder is called otherwise; "" if its folder is there, or none is nearly called so."""
    path = Path(pattern)
    near = nearest_path(path.parent)
    return f"did you mean {near / path.name}?" if near not in (None, path.parent) else ""


def _name(path: Path) -> str:
    """A short name for records: the file's without its endings, a pattern's folder."""
    if not is_there(path) and any(letter in path.name for letter in "{*?["):
        return path.absolute().parent.name
    endings = "|".join(re.escape(suffix) for suffixes in KNOWN_SUFFIXES for suffix in suffixes)
    return re.sub(rf"({endings})$", "", path.absolute().name, flags=re.IGNORECASE)
