"""Splits a data path (`address`) into parts with weights, and finds the files of each part.

Brace patterns are those of bash and of webdataset: `{00000..00019}.tar` means twenty names. Evaluation sets have the
layout of CLIP_benchmark:

SET/dataset_type.txt    the word retrieval; absent in a classification set
SET/test/nshards.txt    the number of shards
SET/test/0.tar ...      images, each with a `txt` member (one caption per line) or a `cls` member (its label)
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path, PurePosixPath

from braceexpand import braceexpand

from neuclip.data import by_name
from neuclip.data.source import shorten
from neuclip.errors import UserError, nearest
from neuclip.files import read_regular, reading
from neuclip.secrets import between_commas, without_queries, without_query

COMPARED = 10_000  # at most this many file names per folder are compared to find a similar one
SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
PACKED = re.compile(r"\.(?:tar\.gz|tgz)$", re.IGNORECASE)
REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
WEIGHTED = re.compile(r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
ONLY_A_HOST = re.compile(r"\w+://[^/]*")  # in http://host:8080 the number is a port
# fsspec supports many more, but some of its file systems execute what a URL says.
PROTOCOLS = ("s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "http", "https", "file", "memory")
IPV6_HOST = re.compile(r"(\w+://(?:[^/@]*@)?\[)[\da-fA-F:.]+\]")  # http://[::1]/x.tar
STARS = re.compile(r"[*?\[]")
MOST_NAMES = 1_000_000  # per pattern: LAION-5B has 600,000 shards
NUMBERS = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
DATASET_TYPE, RETRIEVAL, SHARD_COUNT = "dataset_type.txt", "retrieval", "nshards.txt"
PARTS = r"train(?:ing)?|val(?:id(?:ation)?)?|test|dev|held[-_]?out|new[-_](?:drawings|concepts)|zero[-_]shot"
PART_FOLDER = re.compile(rf"(?:{PARTS})\d*", re.IGNORECASE)  # COCO's are train2017, val2017
# cc3m-train-0000.tar is a part, latest.tar is not a test part; in Hugging Face's NAME-00000-of-00002 any NAME is a part
PART_FILE = re.compile(rf"^\w+(?=-\d+-of-\d+)|(?<![a-z])(?:{PARTS})(?![a-z])", re.IGNORECASE)
LONGEST_PATH = 4096  # letters; the limit of Linux
LARGEST_LIST = 1 << 28  # bytes of a list of shards


def parts_of(address: str) -> list[tuple[str, int]]:
    """The parts of a data path between its commas, with their weights (default 1). An existing path is never split.

    >>> parts_of("a.csv:2,shards/{0,1}.tar")
    [('a.csv', 2), ('shards/{0,1}.tar', 1)]
    """
    if not address.strip():
        raise UserError("no training data; give captioned images: --data.train FOLDER, a table or tar shards")
    pieces = [address] if is_there(Path(address)) else [piece.strip() for piece in between_commas(address)]
    if not all(pieces):
        raise UserError(
            f"{without_queries(address)}: has a comma with no data path before or after it; separate data paths with "
            "commas, such as a.csv:2,shards"
        )
    parts = [_name_and_weight(piece) for piece in pieces]
    name, times = Counter(name for name, _ in parts).most_common(1)[0]
    if times > 1:
        public = without_query(name)
        raise UserError(f"{public}: is given {times} times; give it once, with a weight: {public}:{times}")
    return parts


def _name_and_weight(part: str) -> tuple[str, int]:
    match = WEIGHTED.fullmatch(part)
    name, weight = part, "1"
    if match and not is_there(Path(part)) and not ONLY_A_HOST.fullmatch(match[1]):
        name, weight = match.groups()
    public = without_query(name)
    if not weight.isdecimal() or not int(weight):
        raise UserError(
            f"{public}:{weight}: the weight must be a whole number above 0, which says how often each sample appears "
            f"per epoch; give {public}:2, or instead of a fraction give the other data more weight"
        )
    if name.startswith("pipe:") and not is_there(Path(name)):
        words = [word.strip("'\"") for word in name.removeprefix("pipe:").split()]
        meant = next((word for word in words if is_remote(word) or word.lower().endswith(SHARD_SUFFIXES)), "x.tar")
        raise UserError(f"{public}: commands are not run; give only the path or URL: {without_query(meant)}")
    if "::" in IPV6_HOST.sub(r"\1]", name) and not is_there(Path(name)):
        meant = ",".join(map(without_query, name.split("::")))
        raise UserError(f"{public}: separate several sources with commas; give {meant}, or {meant}:2 with a weight")
    return name, int(weight)


def is_remote(address: str) -> bool:
    """Whether the data path is a URL (s3://, gs://, https:// ...); `check_protocol` refuses unknown protocols."""
    return REMOTE.match(address) is not None


def check_protocol(url: str) -> str:
    """The protocol of a URL. Raises UserError if it is not supported, and for a chain of URLs (a::b)."""
    protocol, chain = url.partition("://")[0], "::" in IPV6_HOST.sub(r"\1]", url)
    if protocol not in PROTOCOLS or chain:
        what = "chained URLs are not supported" if chain else f"{protocol}:// is not supported"
        public = "::".join(map(without_query, url.split("::")))
        raise UserError(f"{public}: {what}; give {'://, '.join(PROTOCOLS[:-1])}:// or a local path")
    return protocol


def is_there(path: Path) -> bool:
    """Whether a path exists. False for a text that is too long for a path, such as a list of many data paths."""
    try:
        return path.exists()
    except PermissionError as error:
        raise UserError(f"{path}: cannot be accessed ({error.strerror}); check its permissions") from error
    except (OSError, ValueError):
        return False


def files_of(address: str) -> list[Path]:
    """The file or folder itself, or all files of a pattern, sorted by path. A missing file raises UserError: it must
    not silently make the data set smaller."""
    if is_there(Path(address)):
        return [Path(address)]
    names = expand_braces(address)
    if names == [address] and not STARS.search(address):
        raise UserError(_nothing_there(address))
    matches = {name: [Path(name)] if is_there(Path(name)) else _matching(name) for name in names}
    if missing := [name for name, paths in matches.items() if not paths]:
        what = "patterns match no file" if STARS.search(address) else "files do not exist"
        first = f"{len(missing)} of {len(names)} {what}, the first is {missing[0]}" if names[1:] else "no file matches"
        raise UserError(
            f"{shorten(address, 500)}: {shorten(first, 500)}; check the folder and the numbers, and "
            "that the pattern is in quotes"
        )
    files = data_files(path for paths in matches.values() for path in paths)
    if folders := [str(path) for path in files if path.is_dir()]:
        meant = ",".join(folders[:3]) + (",..." if folders[3:] else "")
        raise UserError(f"{address}: a pattern must match files, but this one matches folders; give {meant}")
    return files


def _matching(pattern: str) -> list[Path]:
    """The files that match a pattern; folders only if no file matches."""
    if len(pattern) > LONGEST_PATH:
        return []
    paths = [Path(name) for name in glob.glob(pattern, recursive=True)]  # noqa: PTH207
    return [path for path in paths if not path.is_dir()] or paths


def data_files(paths: Iterable[Path]) -> list[Path]:
    """The data among these files, sorted. If there are shards, only they are data (not their indexes and statistics),
    without packed copies of plain ones: gunzip -k leaves both."""
    paths = {path for path in paths if not path.name.startswith(".")}
    shards = {path for path in paths if path.name.lower().endswith(SHARD_SUFFIXES)}
    twins = {
        path for path in shards if (plain := path.with_name(PACKED.sub(".tar", path.name))) != path and plain in shards
    }
    files = sorted(shards - twins or paths)
    if broken := next((path for path in files if not is_there(path)), None):
        raise UserError(_broken_link(broken))
    return files


def _broken_link(link: Path) -> str:
    return f"{link}: is a link to {link.readlink()}, which does not exist; restore that file, or remove the link"


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files with these endings in the folder and one level below, sorted by path, without hidden ones. Raises
    UserError if they are of several parts, such as train and test."""
    paths = (path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.name.lower().endswith(suffixes))
    files = [path for path in data_files(paths) if not path.is_dir()]
    refuse_several_parts(str(folder), (path.relative_to(folder).as_posix() for path in files))
    return files


def expand_braces(pattern: str) -> list[str]:
    """`a{08..10}.tar` -> a08.tar, a09.tar, a10.tar and `{x,y}.tar` -> x.tar, y.tar. Several braces give all
    combinations; an unclosed brace is an ordinary letter."""
    try:
        # braceexpand makes a whole range before it yields the first name, so the length is checked first.
        ranges = [abs(int(b) - int(a)) // (int(step or 1) or 1) for a, b, step in NUMBERS.findall(pattern)]
        names = [] if max(ranges, default=0) > MOST_NAMES else braceexpand(pattern, escape=False)
        expanded = list(islice(names, MOST_NAMES + 1))
    except (ValueError, RecursionError):
        return [pattern]
    if not 0 < len(expanded) <= MOST_NAMES:
        raise UserError(
            f"{without_query(pattern)}: expands to more than {MOST_NAMES:,} files; correct the numbers in its braces"
        )
    return expanded


def read_list(path: Path) -> list[str]:
    """The paths and URLs in a list of shards, one per line. Relative paths start at the list's folder. Empty lines, and
    lines that begin with #, are skipped."""
    with reading(path, "give a text file in UTF-8 with one path or URL per line"):
        text = read_regular(path, LARGEST_LIST).decode("utf-8-sig")
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if not lines:
        raise UserError(f"{path}: lists no shards; give one path or URL per line")
    return [line if is_remote(line) else str(path.parent / line) for line in lines]


def refuse_several_parts(folder: str, files: Iterable[str]) -> None:
    """Raise UserError if files (their paths from the folder, with slashes) are of several parts and one of these is not
    for training: otherwise a run would train on its test data.

    >>> refuse_several_parts("spl", ["train/0.tar", "test/0.tar"])                        # doctest: +SKIP
    neuclip.errors.UserError: spl: holds the parts test, train; give one of them, such as spl/train
    """
    parts = {_part(PurePosixPath(file)): file for file in files}
    named = sorted(parts.keys() - {""})
    held_out = [part for part in named if not part.lower().startswith("train")]
    if not held_out or len(parts) == 1:
        return
    chosen = next((part for part in named if part not in held_out), held_out[0])
    example = _path_of_part(folder.rstrip("/"), parts[chosen], chosen)
    if len(named) > 1:
        raise UserError(f"{folder}: holds the parts {', '.join(named)}; give one of them, such as {example}")
    raise UserError(
        f"{folder}: holds the part {named[0]} beside other data; move {named[0]} elsewhere to use the rest, or give "
        f"{example} to use it alone"
    )


def is_part(folder: str) -> bool:
    """Whether a folder's name is the name of a part, such as train or test."""
    return PART_FOLDER.fullmatch(folder) is not None


def _part(file: PurePosixPath) -> str:
    if len(file.parts) > 1 and is_part(file.parts[0]):
        return file.parts[0]
    match = PART_FILE.search(file.name)
    return match[0] if match else ""


def _path_of_part(folder: str, file: str, part: str) -> str:
    if file.startswith(f"{part}/"):
        return f"{folder}/{part}"
    path = PurePosixPath(file)
    ending = path.name[path.name.index(part) + len(part) :].partition(".")[2]
    return f"'{folder}/{path.with_name(f'{path.name[: path.name.index(part) + len(part)]}*.{ending}')}'"


def is_retrieval_set(folder: Path) -> bool:
    """Whether the folder, or the folder of which it is a part (`test`), is marked as a retrieval set. In such a set,
    every line of a text is a caption."""
    folder = folder.absolute()
    return dataset_type(folder) == RETRIEVAL or (is_part(folder.name) and dataset_type(folder.parent) == RETRIEVAL)


def dataset_type(folder: Path) -> str:
    """The content of dataset_type.txt; "" if the file is missing."""
    mark = folder / DATASET_TYPE
    if not is_there(mark):
        return ""
    with reading(mark, f"write the word {RETRIEVAL} into it, or remove it"):
        return read_regular(mark, 1 << 16).decode(errors="replace").strip().lower()


def numbered_shards(folder: Path) -> list[Path]:
    """0.tar, 1.tar ..., as many as nshards.txt says. Raises UserError unless exactly these are in the folder: an
    incomplete set would give other results."""
    count_file = folder / SHARD_COUNT
    tars = {path.name: path for path in folder.glob("*.tar") if not path.name.startswith(".")}
    if not is_there(count_file):
        raise UserError(
            f"{count_file}: no such file; without it, missing shards cannot be noticed; copy the set again, or write "
            f"the number of shards to this file ({len(tars)} are there)"
        )
    with reading(count_file, "write how many tar files there are"):
        text = read_regular(count_file, 1 << 16).decode(errors="replace").strip()
    if not text.isdecimal() or not 0 < int(text[:9]) == int(text[:20]):
        raise UserError(f"{count_file}: {text[:40]!r} is not a number of shards; write how many tar files there are")
    names = [f"{number}.tar" for number in range(min(int(text), len(tars) + 1))]
    if missing := next((name for name in names if name not in tars), None):
        raise UserError(f"{folder / missing}: missing, though {count_file} says {text} shards; copy it again")
    if further := sorted(tars.keys() - {*names}):
        raise UserError(
            f"{folder / further[0]}: is not among the {text} shards that {count_file} counts; correct the number, or "
            "remove the file"
        )
    return [folder / name for name in names]


def _nothing_there(address: str) -> str:
    """The error message for a data path that does not exist."""
    path, address = Path(address), shorten(address, 500)
    if os.path.islink(path):  # noqa: PTH114 (Path's own raises for names that are too long)
        return _broken_link(path)
    if "{" in address:
        return f"{address}: no such file or folder; a pattern needs closed braces, such as {{a,b}}.tar, {{00..19}}.tar"
    name, slash, part = address.partition("/")
    near = nearest(name, by_name.PARTS)
    proposals = [f"{near}{slash}{part}"] if near else []
    proposals += [str(path)] if (path := nearest_path(Path(address))) else []  # type: ignore[assignment]
    if best := nearest(address, proposals):
        return f"{address}: no such file, folder or data set by name; did you mean {best}?"
    names = ", ".join(by_name.PARTS)
    return f"{address}: no such file or folder; check the path, or use a data set by name: {names}"


def nearest_path(path: Path) -> Path | None:
    """The existing path with the most similar name, with mistyped folders corrected too; None if none is similar.

    >>> nearest_path(Path("phtos/pairs.cvs"))                                            # doctest: +SKIP
    PosixPath('photos/pairs.csv')
    """
    try:
        if path.exists():
            return path
        folder = nearest_path(path.parent)
        if folder is None or not folder.is_dir():
            return None
        if (folder / path.name).exists():
            return folder / path.name
        with os.scandir(folder) as entries:
            shown = (entry.name for entry in islice(entries, COMPARED) if not entry.name.startswith("."))
            names = sorted(name for name in shown if (folder / name).exists())  # not broken links
    except OSError:  # no permission to list the folder, or a name that is too long
        return None
    near = nearest(path.name, names)
    return folder / near if near else None
