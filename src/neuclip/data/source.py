"""What a source of image-text pairs is, and how an address becomes one."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Protocol

from neuclip.data.sample import Fault, Sample
from neuclip.data.sources.csv import CsvSource
from neuclip.data.sources.tar import TarSource
from neuclip.errors import AskedWrongly

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
TABLE_SUFFIXES = (".csv", ".tsv")


class Source(Protocol):
    """Pairs with dense ids 0..n-1. It can be pickled: every worker process has its own."""

    name: str
    faults: tuple[Fault, ...]  # what never became a sample: members without a picture, cut-off shards; id -1

    def __len__(self) -> int: ...

    def __getitem__(self, id: int) -> Sample:
        """Raises BadSample when the pair cannot be had."""

    def where(self, id: int) -> str:
        """Shard and member, or file and row, for messages."""

    def captions(self) -> list[str]:
        """The first caption of every id, "" where there is none; reads no pictures."""


def open_source(address: str, *, image_column: str = "", caption_column: str = "") -> Source:
    """A built-in name, a tar shard, a folder or brace pattern of shards, or a CSV/TSV file.

    >>> open_source("icons-30k"); open_source("shards/{00000..00019}.tar"); open_source("pairs.csv")
    """
    from neuclip.data.builtin import resolve

    if not address:
        raise AskedWrongly("no data named; give --data.train icons-30k, a folder of tar shards or a CSV file")
    builtin = resolve(address)
    path = Path(address if builtin is None else builtin)
    name = address if builtin is not None else _name(path)
    source: Source
    if path.name.lower().endswith(TABLE_SUFFIXES) and path.is_file():
        source = CsvSource(name, path, image_column, caption_column)
    else:
        source = TarSource(name, shards_of(str(path)))
    if len(source) == 0:
        first = f"; first of its faults: {source.faults[0].reason}, {source.faults[0].where}" if source.faults else ""
        raise AskedWrongly(f"{address}: holds no samples{first}; give a file or folder with image-text pairs")
    return source


def shards_of(address: str) -> list[Path]:
    """The shards that an address means, sorted by path."""
    path = Path(address)
    if path.is_dir():
        shards = _shards_in(path)
        if not shards:
            raise AskedWrongly(
                f"{address}: no tar shards in this folder or one below; expected files such as 00000.tar"
            )
        return shards
    if path.exists():
        if not path.name.lower().endswith(SHARD_SUFFIXES):
            raise AskedWrongly(
                f"{address}: unknown kind of data; known are {', '.join(SHARD_SUFFIXES + TABLE_SUFFIXES)}"
            )
        return [path]
    if "{" in address:
        return _named(address)
    raise AskedWrongly(_nothing_there(address))


def _shards_in(folder: Path) -> list[Path]:
    found = {
        path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.name.lower().endswith(SHARD_SUFFIXES)
    }
    # `gunzip -k` leaves both files; reading both would show every sample twice.
    twins = {path for path in found if path.suffix == ".gz" and path.with_suffix("") in found}
    return sorted(path for path in found - twins if path.is_file() and not path.name.startswith("."))


def _named(pattern: str) -> list[Path]:
    """All files of a brace pattern; a missing one is an error, not a smaller data set."""
    paths = sorted({Path(text) for text in expand_braces(pattern)})
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise AskedWrongly(
            f"{pattern}: {len(missing)} of {len(paths)} files do not exist, first of all {missing[0]}; "
            "correct the pattern"
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
    from neuclip.data.builtin import builtin_names

    names = builtin_names()
    name, slash, part = address.partition("/")
    near = difflib.get_close_matches(name, names, 1)
    if near:
        return f"{address}: no such file, folder or built-in data set; did you mean {near[0]}{slash}{part}?"
    return f"{address}: no such file or folder; check the path, or use a built-in data set: {', '.join(names)}"


def _name(path: Path) -> str:
    """A short name for records: the file's without its endings, a pattern's folder."""
    if "{" in path.name:
        return path.absolute().parent.name
    return re.sub(r"\.(tar|tar\.gz|tgz|csv|tsv)$", "", path.absolute().name, flags=re.IGNORECASE)
