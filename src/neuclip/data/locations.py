"""How an address becomes parts with weights, and each part becomes files.

Brace patterns are those of bash and of webdataset: `{00000..00019}.tar` means twenty names.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from fractions import Fraction
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from neuclip.data import by_name
from neuclip.data.sample import shorten
from neuclip.data.splits import BUILD_NOTES, refuse_several_parts
from neuclip.errors import UserError, nearest
from neuclip.progress import track
from neuclip.secrets import between_commas, without_queries, without_query

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
PACKED = re.compile(r"\.(?:tar\.gz|tgz)$", re.IGNORECASE)
INDEX_SUFFIX = ".index.npz"  # of the index beside a shard
REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
WEIGHTED = re.compile(r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)
WEIGHT = re.compile(r"\d+(?:\.\d+)?|\.\d+")
ONLY_A_HOST = re.compile(r"\w+://[^/]*")  # in http://host:8080 the number is a port
# fsspec knows many more, and some of its file systems run what an address tells them to.
PROTOCOLS = ("s3", "gs", "gcs", "az", "abfs", "abfss", "hf", "http", "https", "file", "memory")
IPV6_HOST = re.compile(r"(\w+://(?:[^/@]*@)?\[)[\da-fA-F:.]+\]")  # http://[::1]/x.tar
CHAIN = "::"
STARS = re.compile(r"[*?\[]")
MOST_COMMAS = 16  # in the name of one file
MOST_NAMES = 1_000_000  # of one pattern: LAION-5B has 600,000 shards
NUMBERS = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
# Beside shards, by our hand or img2dataset's.
ABOUT_SHARDS = re.compile(rf".*{re.escape(INDEX_SUFFIX)}|.*_stats\.json|convert\.json|skipped\.jsonl")


def parts_of(address: str) -> list[tuple[str, Fraction]]:
    """The addresses between commas with their weights, 1 where none is given. A path that exists is never cut.

    >>> parts_of("a.csv:2,shards/{0,1}.tar")
    [('a.csv', Fraction(2, 1)), ('shards/{0,1}.tar', Fraction(1, 1))]
    """
    if not address.strip():
        raise UserError("no training data; give captioned images: --data.train FOLDER, a table or tar shards")
    pieces = between_commas(address)
    parts = []
    while pieces:
        counts = range(min(len(pieces), MOST_COMMAS + 1), 1, -1)
        count = next((count for count in counts if _is_path(",".join(pieces[:count]))), 1)
        part = ",".join(pieces[:count]).strip()
        if not part:
            raise UserError(
                f"{without_queries(address)}: a comma stands alone; give addresses between commas, such as "
                "a.csv:2,shards"
            )
        parts.append(_name_and_weight(part))
        pieces = pieces[count:]
    return parts


def _is_path(text: str) -> bool:
    """Whether it is a path that is there, with or without a weight."""
    match = WEIGHTED.fullmatch(text.strip())
    return is_there(Path(text.strip())) or (match is not None and is_there(Path(match[1])))


def _name_and_weight(part: str) -> tuple[str, Fraction]:
    match = WEIGHTED.fullmatch(part)
    if match is None or ONLY_A_HOST.fullmatch(match[1]) or is_there(Path(part)):
        name, weight = part, "1"
    else:
        name, weight = match.groups()
    if not WEIGHT.fullmatch(weight) or Fraction(weight) == 0:
        public = without_query(name)
        raise UserError(
            f"{public}:{weight}: a weight is a number above 0; give {public}:2 or {public}:0.5, or leave it out"
        )
    if not is_there(Path(name)):
        _refuse_habits(name)
    return name, Fraction(weight)


def _refuse_habits(name: str) -> None:
    """Forms that webdataset and open_clip accept, and that mean something else here."""
    if name.startswith("pipe:"):
        words = [word.strip("'\"") for word in name.removeprefix("pipe:").split()]
        meant = next((word for word in words if is_remote(word) or word.lower().endswith(SHARD_SUFFIXES)), "x.tar")
        raise UserError(f"{without_query(name)}: commands are not run; give the address itself: {without_query(meant)}")
    if is_chain(name):
        public = CHAIN.join(map(without_query, name.split(CHAIN)))
        meant = public.replace(CHAIN, ",")
        raise UserError(f"{public}: several sources stand between commas; give {meant}, or {meant}:2 with a weight")


def is_remote(address: str) -> bool:
    """Whether it is downloaded: s3://, gs://, https:// and the others of PROTOCOLS; `check_protocol` refuses others."""
    return REMOTE.match(address) is not None


def is_chain(address: str) -> bool:
    return CHAIN in IPV6_HOST.sub(r"\1]", address)


def check_protocol(url: str) -> str:
    """The protocol of a remote address. Raises UserError for one that is not known, and for a chain (a::b)."""
    protocol = url.partition("://")[0]
    if protocol not in PROTOCOLS or is_chain(url):
        public = CHAIN.join(map(without_query, url.split(CHAIN)))
        what = "chains of addresses are not opened" if is_chain(url) else f"{protocol}:// is not opened"
        raise UserError(f"{public}: {what}; give {'://, '.join(PROTOCOLS[:-1])}:// or a local path")
    return protocol


def is_there(path: Path) -> bool:
    """As `path.exists()`; what is too long for a file's name, such as a list of many addresses, is none."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise UserError(f"{path}: cannot be looked at ({error.strerror}); check its permissions") from error


def files_of(address: str) -> list[Path]:
    """The file or folder, or all files of a pattern, sorted by path; a missing one is an error, not a smaller set."""
    path = Path(address)
    if is_there(path):
        return [path]
    names = expand_braces(address)
    if names == [address] and not STARS.search(address):
        raise UserError(_nothing_there_message(address))
    found: set[Path] = set()
    missing = []
    for name in track(names, "looking for", len(names), "files"):
        matches = _matching(name)
        found |= matches
        missing += [] if matches else [name]
    if missing:
        raise UserError(_missing_message(address, missing, len(names)))
    files = sorted(path for path in found if not path.is_dir())
    if not files or (len(files) < len(found) and not STARS.search(address)):
        folders = [str(path) for path in sorted(found - set(files))]
        meant = ",".join(folders[:3]) + (",..." if folders[3:] else "")
        raise UserError(f"{address}: a pattern means files, and this one names folders; give {meant}")
    return files


def expand_braces(pattern: str) -> list[str]:
    """`a{08..10}.tar` -> a08.tar, a09.tar, a10.tar and `{x,y}.tar` -> x.tar, y.tar; several braces multiply, and an
    unclosed one is a letter."""
    try:
        # braceexpand makes a range as a whole before it gives the first name, hence its length is checked first.
        ranges = NUMBERS.findall(pattern)
        lengths = [abs(int(last) - int(first)) // (int(step or 1) or 1) for first, last, step in ranges]
        names = [] if max(lengths, default=0) > MOST_NAMES else braceexpand(pattern, escape=False)
        expanded = list(islice(names, MOST_NAMES + 1))
    except ValueError:
        return [pattern]
    except RecursionError:
        raise UserError(
            f"{shorten(without_query(pattern))}: too many braces inside each other; write the names into a list "
            "(shards.txt), one per line"
        ) from None
    if not 0 < len(expanded) <= MOST_NAMES:
        raise UserError(
            f"{without_query(pattern)}: means more than {MOST_NAMES:,} files; correct the numbers in its braces"
        )
    return expanded


def _matching(name: str) -> set[Path]:
    path = Path(name)
    if is_there(path):
        return {path}
    return _data_files({Path(file) for file in glob.glob(name, recursive=True)})  # noqa: PTH207


def _data_files(files: set[Path]) -> set[Path]:
    """Without the notes beside shards and without packed twins. Refuses what is listed and gone."""
    shards = {path for path in files if path.name.lower().endswith(SHARD_SUFFIXES)}
    kept = files - shards | {Path(name) for name in without_packed_twins({str(path) for path in shards})}
    about = {path for path in files - shards if ABOUT_SHARDS.fullmatch(path.name) or path.with_suffix(".tar") in shards}
    kept -= about if shards else set()
    for path in kept:
        refuse_gone(path)
    return kept


def without_packed_twins(shards: set[str]) -> set[str]:
    """`gunzip -k` leaves both files; reading both would show every sample twice."""
    return {shard for shard in shards if (plain := PACKED.sub(".tar", shard)) == shard or plain not in shards}


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Those in the folder and one below, sorted by path; hidden ones are left out. Refuses training and test in one."""
    paths = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    found = {path for path in paths if path.name.lower().endswith(suffixes) and not path.name.startswith(".")}
    links = {path for path in folder.iterdir() if not path.suffix and path.is_symlink()} if found else set()
    _data_files(links)  # those to folders that are gone
    files = sorted(path for path in _data_files(found) if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in files)
    refuse_several_parts(str(folder), names, built=(folder / BUILD_NOTES).exists())
    return files


def shards_of(address: str) -> list[Path]:
    """The tar shards that an address means, sorted by path."""
    path = Path(address)
    files = files_in(path, SHARD_SUFFIXES) if is_there(path) and path.is_dir() else files_of(address)
    for file in files:
        if not file.name.lower().endswith(SHARD_SUFFIXES):
            raise UserError(f"{file}: is not a tar shard; known are {', '.join(SHARD_SUFFIXES)}")
    if not files:
        raise UserError(f"{address}: no tar shards in this folder or one below; expected files such as 00000.tar")
    return files


def read_list(path: Path) -> list[tuple[str, str]]:
    """The addresses in a list, one per line, each with its place for messages; local ones start at the list's folder.
    Empty lines are left out, and those that begin with #."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a list of shards ({error}); give a text file in UTF-8") from None
    numbered = [(f"{path} line {number}", line.strip()) for number, line in enumerate(lines, 1)]
    addresses = [(place, line) for place, line in numbered if line and not line.startswith("#")]
    if not addresses:
        raise UserError(f"{path}: lists no shards; give one address per line")
    for place, line in addresses:
        if by_name.is_name(line) and not is_there(path.parent / line):
            raise UserError(
                f"{place}: {line} is a data set by name, and a list names shards; give it beside the list, as "
                f"{path},{line}"
            )
    return [(place, line if is_remote(line) else str(path.parent / line)) for place, line in addresses]


def refuse_gone(path: Path) -> None:
    """Raises UserError for what a folder lists and is not there: a missing file is not a smaller data set."""
    if not is_there(path):
        raise UserError(_gone_message(path))


def _gone_message(path: Path) -> str:
    if _is_link(path):
        return f"{path}: is a link to {path.readlink()}, which is gone; bring that back, or remove the link"
    return f"{path}: is gone; bring it back"


def _is_link(path: Path) -> bool:
    return os.path.islink(path)  # noqa: PTH114  (Path's own raises for names that are too long)


def _missing_message(address: str, missing: list[str], count: int) -> str:
    remedy = _other_folder(address)
    if count == 1:
        return f"{address}: no file matches this pattern; {remedy or 'check the folder, and that it is in quotes'}"
    what = "patterns match no file" if STARS.search(address) else "files do not exist"
    first = f"{len(missing)} of {count} {what}, first of all {missing[0]}"
    return f"{address}: {first}; {remedy or 'correct the pattern'}"


def _nothing_there_message(address: str) -> str:
    if _is_link(Path(address)):
        return _gone_message(Path(address))
    if "{" in address:
        return f"{address}: no such file or folder; a pattern has closed braces, such as {{a,b}}.tar or {{00..19}}.tar"
    names = by_name.names()
    name, slash, part = address.partition("/")
    near = nearest(name, names)
    proposals = [f"{near}{slash}{part}"] if near else []
    proposals += [str(path)] if (path := nearest_path(Path(address))) else []
    if best := nearest(address, proposals):
        return f"{address}: no such file, folder or data set by name; did you mean {best}?"
    return f"{address}: no such file or folder; check the path, or use a data set by name: {', '.join(names)}"


def _other_folder(pattern: str) -> str:
    """The same pattern in the folder with the nearest name; "" if its own folder is there, or no name is near."""
    path = Path(pattern)
    near = nearest_path(path.parent)
    return f"did you mean {near / path.name}?" if near not in (None, path.parent) else ""


COMPARED = 10_000  # file names per folder at most; a million would take seconds


def nearest_path(path: Path) -> Path | None:
    """The existing path with nearly this name, mistyped folders corrected too; None if there is none.

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
