"""Opens the source that a data path (`address`) means. A new kind of source is one row of KINDS."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from neuclip.data import by_name
from neuclip.data.decoding import IMAGE_SUFFIXES
from neuclip.data.locations import (
    DATASET_TYPE,
    SHARD_COUNT,
    SHARD_SUFFIXES,
    STARS,
    check_protocol,
    dataset_type,
    expand_braces,
    files_in,
    files_of,
    is_part,
    is_remote,
    is_retrieval_set,
    is_there,
    numbered_shards,
    parts_of,
    read_list,
    refuse_several_parts,
)
from neuclip.data.mixture import Mixture, split
from neuclip.data.source import Source, shorten
from neuclip.data.tables.arrow import holds_images, is_saved_dataset, open_parquet, open_saved_dataset
from neuclip.data.tables.coco import is_karpathy_csv, open_json, open_karpathy_csv
from neuclip.data.tables.folder import coco_captions, open_folder
from neuclip.data.tables.listed import ColumnChoice, ListedPairs
from neuclip.data.tables.text import has_header, read_csv, read_jsonl
from neuclip.data.tar.index import EVERY_LINE
from neuclip.data.tar.remote import Limits, list_shards
from neuclip.data.tar.remote_source import RemoteTarSource
from neuclip.data.tar.source import TarSource
from neuclip.errors import UserError
from neuclip.files import read_regular, reading
from neuclip.secrets import without_query
from neuclip.settings.sections import DataSettings, Settings

PACKED_SUFFIXES = (".zip", ".7z", ".bz2", ".xz", ".zst", ".rar")
CONVERSION = "convert.json"  # says what a folder of shards is converted from; written before the first shard
OFFLINE = "HF_HUB_OFFLINE"  # with the value 0 in the environment, missing data may be downloaded
EXAMPLES = "tar shards, a CSV, TSV, JSONL or Parquet file, or a folder of images"


_not_fetched: ContextVar[str] = ContextVar("not_fetched", default="")


@contextlib.contextmanager
def local_only(run: str | Path, remedy: str = "") -> Iterator[None]:
    """Refuse downloads while this is active, unless the user sets HF_HUB_OFFLINE=0: the data paths come from the
    settings of `run`, which may be a stranger's. `remedy`: what else the user can do."""
    reason = f"the settings of {run} name it; set {OFFLINE}=0 for this command to fetch it{remedy}"
    token = _not_fetched.set("" if os.environ.get(OFFLINE) == "0" else reason)
    try:
        yield
    finally:
        _not_fetched.reset(token)


class OpenOptions(NamedTuple):
    """Options that come with a data path. Each kind of source uses the ones it needs."""

    columns: ColumnChoice = ColumnChoice()
    caption_key: str = ""
    limits: Limits = Limits()
    retrieval: bool = False  # the data are for evaluation, not for training


Opener = Callable[[str, list[Path], OpenOptions], Source]  # takes the source's name, its files and the options


class Kind(NamedTuple):
    """A kind of file, and the function that opens it."""

    suffixes: tuple[str, ...]
    open: Opener
    several_files: bool = False  # whether several files can be one source
    remote: bool = False  # whether it can be read from a URL


def _open_shards(name: str, files: list[Path], options: OpenOptions) -> Source:
    """Open shards. In a set marked as a retrieval set, every line of a text is a caption; the caption key of the run's
    other data is ignored."""
    marked = {folder for folder in {file.parent for file in files} if is_retrieval_set(folder)}
    outside = [file for file in files if file.parent not in marked]
    if marked and outside:
        raise UserError(
            f"{outside[0]}: is not of a retrieval set, but {min(marked)} is ({DATASET_TYPE}); their texts are read "
            "differently: give them as two data paths separated by a comma"
        )
    source = TarSource(name, files, EVERY_LINE if marked else options.caption_key)
    damage = [fault for fault in source.faults if fault.reason.startswith("shard ")]
    if marked and options.retrieval and damage:
        raise UserError(
            f"{damage[0].where}: {damage[0].reason}; results on a part of a set are not comparable: copy it again"
        )
    return source


def _open_csv(name: str, files: list[Path], options: OpenOptions) -> Source:
    if is_karpathy_csv(files[0], options.columns):
        return open_karpathy_csv(name, files[0], retrieval=options.retrieval)
    return ListedPairs(name, files[0], read_csv(files[0], options.columns))


def _open_text(name: str, files: list[Path], options: OpenOptions) -> Source:
    """Open a text file: a table of captions if it begins with a header, else a list of shards, read in its order."""
    path = files[0]
    if has_header(path, options.columns):
        return ListedPairs(name, path, read_csv(path, options.columns))
    lines = read_list(path)
    if urls := [line for line in lines if is_remote(line)]:
        if len(urls) < len(lines):
            raise UserError(f"{path}: lists local and remote shards; make two lists, separated by a comma")
        _refuse_repeated(path, [url for line in urls for url in expand_braces(line)])
        return _open_remote(name, urls, options)
    shards = [shard for line in lines for shard in _shards_of(path, line)]
    _refuse_repeated(path, list(map(str, shards)))
    return _open_shards(name, shards, options)


def _shards_of(path: Path, line: str) -> list[Path]:
    """The tar shards that a line of a list means."""
    try:
        is_folder = is_there(Path(line)) and Path(line).is_dir()
        files = files_in(Path(line), SHARD_SUFFIXES) if is_folder else files_of(line)
        if other := [file for file in files if not file.name.lower().endswith(SHARD_SUFFIXES)]:
            raise UserError(f"{other[0]}: is not a tar shard; known are {', '.join(SHARD_SUFFIXES)}")
        if not files:
            raise UserError(f"{line}: no tar shards in this folder or one below; expected files such as 00000.tar")
        return files
    except UserError as error:
        table = "; a table of captions begins with a header such as image,caption" if re.search(r"[,\t]", line) else ""
        raise UserError(
            f"{path} (a list of shards, one path or URL per line): {shorten(str(error), 600)}{table}"
        ) from error


def _refuse_repeated(path: Path, shards: list[str]) -> None:
    shard, times = Counter(shards).most_common(1)[0]
    if times > 1:
        raise UserError(
            f"{path}: lists {without_query(shard)} {times} times; list it once, or give a weight, such as {path}:2"
        )


KINDS: list[Kind] = [
    Kind(SHARD_SUFFIXES, _open_shards, several_files=True, remote=True),
    Kind((".csv", ".tsv"), _open_csv),
    Kind((".jsonl", ".ndjson"), lambda name, files, o: ListedPairs(name, files[0], read_jsonl(files[0], o.columns))),
    Kind((".parquet",), lambda name, files, o: open_parquet(name, files, o.columns), several_files=True),
    Kind((".json",), lambda name, files, options: open_json(name, files[0], retrieval=options.retrieval)),
    Kind((".txt",), _open_text),
]


def kind_of(name: str) -> Kind | None:
    """The kind of a file with this name; None if its ending is not known."""
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
    """Open a data path: a data set by name, a file or folder of image-text pairs of any known kind, a pattern, or
    several of these separated by commas.

    `limits` apply to remote data. `retrieval` says that the data are for evaluation: of files with splits, the test
    split is read.

    >>> open_source("icons-30k"); open_source("shards/{00000..00019}.tar"); open_source("pairs.csv:2,photos")
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
    """Open a data path with these settings. Raises UserError for a table of which no image exists."""
    source = open_source(
        address,
        image_column=data.image_column,
        caption_column=data.caption_column,
        caption_key=data.caption_key,
        limits=Limits(cache_size=data.cache_size, timeout=data.remote_timeout),
        retrieval=retrieval,
    )
    for part in source.parts if isinstance(source, Mixture) else (source,):
        if isinstance(part, ListedPairs):
            part.check_images()
    return source


def open_training_data(settings: Settings) -> Source:
    """Open a run's training data, without the samples that data.hold_out keeps for evaluation."""
    source = open_as(settings.data.train, settings.data)
    return split(source, settings.data.hold_out, settings.run.seed)[0] if settings.data.hold_out else source


def data_name(address: str) -> str:
    """The name that the source of a data path has, without opening it."""
    return "+".join(_part_name(part) for part, _ in parts_of(address))


def _part_name(address: str) -> str:
    """The name of one part of a data path, for records: the file's name without its ending, or a pattern's folder."""
    if by_name.is_name(address):
        return address
    path = Path(without_query(address)).absolute()
    while not is_there(path) and (STARS.search(path.name) or "{" in path.name):
        path = path.parent
    endings = "|".join(re.escape(suffix) for kind in KINDS for suffix in kind.suffixes)
    return re.sub(rf"({endings})$", "", path.name, flags=re.IGNORECASE)


def _open_one(address: str, options: OpenOptions) -> Source:
    if by_name.is_labelled(address):
        raise UserError(f"{address}: has labels and no captions; give it as --evaluation.zero_shot {address}")
    folder = by_name.resolve(address)
    path, name = folder or Path(address), _part_name(address)
    if folder:  # its files are ours: the user's columns and keys are for other data
        options = OpenOptions(limits=options.limits, retrieval=options.retrieval)
    if is_remote(address):
        source = _open_remote(name, [address], options)
    elif is_there(path) and path.is_dir():
        source = _open_folder(name, path, options)
    else:
        source = _open_files(name, files_of(str(path)), options)
    if len(source) == 0:
        first = f"; its first fault: {source.faults[0].reason}, {source.faults[0].where}" if source.faults else ""
        raise UserError(f"{without_query(address)}: has no samples{first}; give a file or folder with image-text pairs")
    return source


def _open_remote(name: str, addresses: list[str], options: OpenOptions) -> Source:
    for url in (url for address in addresses for url in expand_braces(address)):
        check_protocol(url)
        public = without_query(url)
        if reason := _not_fetched.get():
            raise UserError(f"{public}: is not fetched, because {reason}")
        kind = kind_of(public)
        if (kind and not kind.remote) or public.lower().endswith(PACKED_SUFFIXES):
            raise UserError(
                f"{public}: only tar shards can be remote; fetch it and give the local file, or convert "
                "that to shards with neuclip data convert and upload them"
            )
    return RemoteTarSource(name, list_shards(addresses, options.limits), options.caption_key, options.limits)


def _open_files(name: str, files: list[Path], options: OpenOptions) -> Source:
    first = files[0]
    kind = kind_of(first.name)
    if kind is None:
        if first.name.lower().endswith(PACKED_SUFFIXES):
            raise UserError(f"{first}: this kind of archive is not supported; unpack it, or make a .tar or .tar.gz")
        known = ", ".join(suffix for kind in KINDS for suffix in kind.suffixes)
        raise UserError(f"{first}: unknown kind of data; known are {known}, and folders")
    if other := [file for file in files if not file.name.lower().endswith(kind.suffixes)]:
        ending = next(suffix for suffix in kind.suffixes if first.name.lower().endswith(suffix))
        raise UserError(
            f"{other[0]}: is of another kind than {first}; give one kind ('{first.with_name(f'*{ending}')}'), or "
            "several separated by commas"
        )
    if len(files) > 1 and not kind.several_files:
        raise UserError(f"{first}: is one of {len(files)} files; separate them with commas: {first},{files[1]}")
    return kind.open(name, files, options)


def _open_folder(name: str, folder: Path, options: OpenOptions) -> Source:
    """Open a folder by its content: shards, else a saved data set, else Parquet files with images, else images."""
    if options.retrieval and is_retrieval_set(folder):
        marked = dataset_type(folder) != ""
        folder = folder / "test" if marked and (folder / "test").is_dir() else folder
        # A marked folder with the shards directly in it (the layout has them in `test`) needs no shard count.
        if is_there(folder / SHARD_COUNT) or (any(folder.glob("*.tar")) and not is_there(folder / DATASET_TYPE)):
            numbered_shards(folder)
    if shards := files_in(folder, SHARD_SUFFIXES):
        _refuse_unfinished(folder)
        return _open_shards(name, shards, options)
    if is_saved_dataset(folder):
        return open_saved_dataset(name, folder, options.columns)
    tables = files_in(folder, (".parquet",))
    if tables and holds_images(tables[0], options.columns):
        return open_parquet(name, tables, options.columns)
    if annotations := coco_captions(folder):
        raise UserError(
            f"{folder}: its captions are in {annotations[-1].parent}; give one of the files there, such as "
            f"{annotations[0]}"
        )
    _refuse_several_folders(folder)
    if images := open_folder(name, folder, options.columns, lines=is_retrieval_set(folder)):
        return images
    if tables:
        return open_parquet(name, tables, options.columns)  # raises UserError: the images are not in the tables
    near = files_in(folder, (".csv", ".tsv", *PACKED_SUFFIXES)) or sorted(folder.glob("captions_*.json"))
    hint = f"; did you mean {near[0]}?" if near else "; expected files such as 00000.tar, or a.jpg and a.txt"
    raise UserError(f"{folder}: no tar shards, no Parquet files and no images in this folder{hint}")


def _refuse_unfinished(folder: Path) -> None:
    """Raise UserError if a conversion into this folder has not written all its shards."""
    state = folder / CONVERSION
    if not is_there(state):
        return
    with reading(state, "convert the data again into a new folder, or remove this file if all shards are there"):
        begun = json.loads(read_regular(state))
        missing = -(-begun["count"] // max(1, begun["shard_size"])) - sum(1 for _ in folder.glob("[0-9]*.tar"))
    if missing > 0:
        raise UserError(
            f"{folder}: is an unfinished conversion, {missing:,} shards are missing; "
            "run the same neuclip data convert again to continue it"
        )


def _refuse_several_folders(folder: Path) -> None:
    """Raise UserError if a folder of images has several parts, such as train and test. Folders with other names may be
    classes or authors, and together are one part."""
    entries = [entry for entry in folder.iterdir() if entry.name[0] != "."]
    files = [f"{entry.name}/image" if is_part(entry.name) else "image" for entry in entries if entry.is_dir()]
    files += ["image" for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES)]
    refuse_several_parts(str(folder), files)
