"""Opens a run's held-out data before it starts: pairs for retrieval, and sets with labels for zero-shot."""

from __future__ import annotations

import glob
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from neuclip.data import by_name
from neuclip.data.locations import DATASET_TYPE, RETRIEVAL, expand_braces, is_retrieval_set, is_there
from neuclip.data.mixture import HELD_OUT_SUFFIX, group_by_image, split
from neuclip.data.open import data_name, open_as
from neuclip.data.source import BadSample, Source, fingerprint, print_once
from neuclip.data.tables.folder import find_captions_file
from neuclip.data.task_sets import CLASSNAMES, Puzzles, ZeroShotTask, read_puzzles
from neuclip.errors import UserError
from neuclip.formatting import plural
from neuclip.secrets import between_commas, without_queries
from neuclip.settings.sections import Settings
from neuclip.tasks import Task

NAMED = re.compile(r"([^=/\\:?*{},]*)=(.*)", re.DOTALL)  # NAME=DATA; a name has no character of paths, URLs or patterns
TASK_TABLES = (".json", ".csv", ".tsv", ".jsonl", ".parquet")
FIRST_TEXTS = 100  # texts that are searched for line breaks
COLUMN_SETTINGS = ("image_column", "caption_column", "caption_key")

TaskData = ZeroShotTask | Source | Puzzles  # for classification, for retrieval, for puzzles


def held_out_addresses(settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The data paths for retrieval and for zero-shot. `auto` means the evaluation parts of a data set by name; other
    data have none. The samples that data.hold_out keeps from training are added for retrieval unless it is `none`."""
    name, evaluation = settings.data.train, settings.evaluation
    retrieval, zero_shot = evaluation.retrieval, evaluation.zero_shot
    auto_retrieval, auto_zero_shot = by_name.held_out(name) if name in by_name.PARTS else ((), ())
    kept = (f"{data_name(name)}{HELD_OUT_SUFFIX}",) if settings.data.hold_out else ()
    if retrieval == ("auto",):
        retrieval = (*auto_retrieval, *kept)
    elif retrieval and not any(address.endswith(HELD_OUT_SUFFIX) for address in retrieval):
        retrieval = (*retrieval, *kept)
    if zero_shot == ("auto",):
        zero_shot = auto_zero_shot
    return retrieval, zero_shot


def named(address: str) -> tuple[str, str]:
    """The name of a held-out set in results, and its data path. NAME=DATA gives both; otherwise the name is the data
    path without the query of a signed URL. An existing path is never split at its '='.

    >>> named("flickr=wds_flickr30k"), named("s3://bucket/x.tar?id=1")
    (('flickr', 'wds_flickr30k'), ('s3://bucket/x.tar', 's3://bucket/x.tar?id=1'))
    """
    match = NAMED.fullmatch(address)
    if match is None or _is_path(address):
        return without_queries(address), address
    name, path = match[1].strip(), match[2].strip()
    if not (name and path):
        missing = "data path after" if name else "name before"
        raise UserError(f"{without_queries(address)}: no {missing} '='; give NAME=DATA, or only the data path")
    return name, path


def _is_path(address: str) -> bool:
    """Whether a file or folder of this name exists or matches it: a folder may be called `part=0`."""
    first = expand_braces(between_commas(address)[0])[0]
    return is_there(Path(address)) or is_there(Path(first)) or bool(glob.glob(first))  # noqa: PTH207


@dataclass(frozen=True)
class HeldOutSets:
    """A run's held-out sets, opened before training, so that a missing file is found early.

    The keys are the names of the sets in results and files of the run.
    """

    retrieval: dict[str, Source]
    zero_shot: dict[str, ZeroShotTask]

    @classmethod
    def open(cls, settings: Settings) -> HeldOutSets:
        """Open the sets of settings.evaluation. Columns and caption keys default to those of the training data."""
        retrieval, zero_shot = (
            {address: named(address)[0] for address in addresses}
            for addresses in (settings.evaluation.retrieval, settings.evaluation.zero_shot)
        )
        _refuse_equal_names(retrieval | zero_shot)
        return cls(
            {name: open_retrieval(address, settings) for address, name in retrieval.items()},
            {name: ZeroShotTask.open(named(address)[1], name=name) for address, name in zero_shot.items()},
        )


def _refuse_equal_names(names: dict[str, str]) -> None:
    """Raise UserError if two sets have the same name. `names` maps data paths to names."""
    counts = Counter(names.values())
    if duplicates := [address for address, name in names.items() if counts[name] > 1]:
        first, second = (without_queries(named(address)[1]) for address in duplicates[:2])
        raise UserError(
            f"{names[duplicates[0]]}: is the name of two held-out sets, {first} and {second}; give each its own name: "
            f"NAME={first}"
        )


def open_retrieval(address: str, settings: Settings) -> Source:
    """Open a retrieval set, given as DATA or NAME=DATA: one sample per image, with all its captions."""
    _, address = named(address)
    data, evaluation = settings.data, settings.evaluation
    if address.endswith(HELD_OUT_SUFFIX) and not is_there(Path(address)):
        if not data.hold_out or address != (kept := f"{data_name(data.train)}{HELD_OUT_SUFFIX}"):
            remedy = f"give {kept}" if data.hold_out else "give --data.hold_out 1000 when you train"
            raise UserError(f"{address}: there is no held-out set with this name; {remedy}")
        source = group_by_image(split(open_as(data.train, data), data.hold_out, settings.run.seed)[1])
        _print_several_lines(address, source)
        return source
    chosen = {name: value for name in COLUMN_SETTINGS if (value := getattr(evaluation, name))}
    try:
        source = group_by_image(open_as(address, replace(data, **chosen), retrieval=True))
        _check_captions(address, source)
        _print_several_lines(address, source)
        return source
    except UserError as error:
        raise UserError(re.sub(rf"--data\.({'|'.join(COLUMN_SETTINGS)})", r"--evaluation.\1", str(error))) from error


def _check_captions(address: str, source: Source) -> None:
    """Raise UserError if no sample has a caption, for example because of a wrong caption key: otherwise this would be
    noticed only after training. If some images have none, print that they are skipped."""
    _, counts = fingerprint(source)
    if not counts.without:
        return
    if counts.captions:
        print_once(
            f"{without_queries(address)}: {counts.without:,} of {plural(counts.samples, 'image')} have no caption and "
            "are skipped; add captions, or remove these images"
        )
        return
    try:
        source[0]
        reason = "first: " + source.where(0)
    except BadSample as bad:
        reason = f"{bad.reason}, {bad.where}"
    is_zero_shot = is_there(Path(address) / CLASSNAMES)
    remedy = "it is a zero-shot set, for --evaluation.zero_shot" if is_zero_shot else "give data with captions"
    raise UserError(f"{without_queries(address)}: no sample has a caption ({reason}); {remedy}")


def _print_several_lines(address: str, source: Source) -> None:
    """Print a hint if texts have several lines: they may be several captions, which only dataset_type.txt can tell."""
    if source.shard_ends is not None or not {"tar", "folder"} & set(source.kind.split("+")):
        return
    count = 0
    for id in range(min(FIRST_TEXTS, len(source))):
        try:
            count += any("\n" in caption for caption in source[id].captions)
        except BadSample:
            continue
    if count:
        print_once(
            f"{without_queries(address)}: the texts of {count:,} of the first {plural(id + 1, 'image')} have several "
            f"lines and are read as one caption each; if every line is a caption, write the word {RETRIEVAL} to a "
            f"file {DATASET_TYPE} beside the images or shards"
        )


def open_task(task: Task, folder: Path) -> TaskData:
    """Open the data of one of DataComp's tasks. Raises UserError if something is missing or broken. Retrieval sets are
    read with default settings, because the settings of a run describe its own data."""
    if task.kind == "classification":
        return ZeroShotTask.open(folder, name=task.name)
    if task.kind == "puzzles":
        return read_puzzles(folder)
    return open_retrieval(str(_shards_or_table(folder)), Settings())


def has_shards(folder: Path) -> bool:
    return (folder / "test").is_dir() and any((folder / "test").glob("*.tar"))


def _shards_or_table(folder: Path) -> Path:
    """The folder itself if it has shards or captions.csv; else its only table, such as Karpathy's beside the images.
    Shards must be marked as a retrieval set: otherwise all lines of a text would be read as one caption."""
    if has_shards(folder):
        if not is_retrieval_set(folder):
            raise UserError(f"{folder / DATASET_TYPE}: does not say {RETRIEVAL}; write this word into it")
        return folder
    if not folder.is_dir() or find_captions_file(folder):
        return folder
    tables = [file for file in folder.iterdir() if file.suffix.lower() in TASK_TABLES]
    return tables[0] if len(tables) == 1 else folder


def source_of(data: TaskData) -> Source:
    """The source of a task's images."""
    return data if isinstance(data, Source) else data.source
