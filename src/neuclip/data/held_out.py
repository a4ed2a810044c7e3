"""What a run is measured on, opened before it starts: pairs for retrieval, sets with answers."""

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

NAMED = re.compile(r"([^=/\\:?*{},]*)=(.*)", re.DOTALL)  # a name holds nothing that an address needs before its '='
TASK_TABLES = (".json", ".csv", ".tsv", ".jsonl", ".parquet")
FIRST_TEXTS = 100  # looked at for several lines
COLUMN_SETTINGS = ("image_column", "caption_column", "caption_key")

TaskData = ZeroShotTask | Source | Puzzles  # to classify, to retrieve from, to solve


def held_out_addresses(settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Addresses for retrieval and for zero-shot. `auto` means the test parts of a data set by name; other data have
    none. What data.hold_out keeps is measured too, unless `none` is given."""
    name, evaluation = settings.data.train, settings.evaluation
    retrieval, zero_shot = evaluation.retrieval, evaluation.zero_shot
    own_retrieval, own_zero_shot = by_name.held_out(name) if name in by_name.PARTS else ((), ())
    kept = (f"{data_name(name)}{HELD_OUT_SUFFIX}",) if settings.data.hold_out else ()
    if retrieval == ("auto",):
        retrieval = (*own_retrieval, *kept)
    elif retrieval and not any(address.endswith(HELD_OUT_SUFFIX) for address in retrieval):
        retrieval = (*retrieval, *kept)
    if zero_shot == ("auto",):
        zero_shot = own_zero_shot
    return retrieval, zero_shot


def named(address: str) -> tuple[str, str]:
    """The name under which figures show a held-out set, and its address: NAME=ADDRESS gives both. Without a name it is
    the address, without the query of a signed URL. A path that is there is never cut.

    >>> named("flickr=wds_flickr30k"), named("s3://bucket/x.tar?id=1")
    (('flickr', 'wds_flickr30k'), ('s3://bucket/x.tar', 's3://bucket/x.tar?id=1'))
    """
    match = NAMED.fullmatch(address)
    if match is None or _is_path(address):
        return without_queries(address), address
    name, path = match[1].strip(), match[2].strip()
    if not (name and path):
        missing = "address behind" if name else "name before"
        raise UserError(f"{without_queries(address)}: no {missing} '='; give NAME=ADDRESS, or the address alone")
    return name, path


def _is_path(address: str) -> bool:
    """Whether something is there under this address, or matches it: folders are called `part=0` too."""
    first = expand_braces(between_commas(address)[0])[0]
    return is_there(Path(address)) or is_there(Path(first)) or bool(glob.glob(first))  # noqa: PTH207


@dataclass(frozen=True)
class HeldOutSets:
    """Opened once: a missing file is found before training, not after.

    The keys are the names that figures and files of a run show.
    """

    retrieval: dict[str, Source]
    zero_shot: dict[str, ZeroShotTask]

    @classmethod
    def open(cls, settings: Settings) -> HeldOutSets:
        """Those of settings.evaluation; tables and shards are read as the training data unless it says otherwise."""
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
    """`names`: of each address."""
    counts = Counter(names.values())
    if twice := [address for address, name in names.items() if counts[name] > 1]:
        first, second = (without_queries(named(address)[1]) for address in twice[:2])
        raise UserError(
            f"{names[twice[0]]}: is the name of two held-out sets, {first} and {second}; give each a name of its own: "
            f"NAME={first}"
        )


def open_retrieval(address: str, settings: Settings) -> Source:
    """A retrieval set, with or without a name before it: one sample per image, which has all its captions."""
    _, address = named(address)
    data, own = settings.data, settings.evaluation
    if address.endswith(HELD_OUT_SUFFIX) and not is_there(Path(address)):
        if not data.hold_out or address != (kept := f"{data_name(data.train)}{HELD_OUT_SUFFIX}"):
            remedy = f"give {kept}" if data.hold_out else "give --data.hold_out 1000 when you train"
            raise UserError(f"{address}: there is no held-out set of this name; {remedy}")
        source = group_by_image(split(open_as(data.train, data), data.hold_out, settings.run.seed)[1])
        _print_several_lines(address, source)
        return source
    chosen = {name: value for name in COLUMN_SETTINGS if (value := getattr(own, name))}
    try:
        source = group_by_image(open_as(address, replace(data, **chosen), retrieval=True))
        _check_captions(address, source)
        _print_several_lines(address, source)
        return source
    except UserError as error:
        raise UserError(re.sub(rf"--data\.({'|'.join(COLUMN_SETTINGS)})", r"--evaluation.\1", str(error))) from error


def _check_captions(address: str, source: Source) -> None:
    """A wrong caption key leaves nothing to measure, which would otherwise be found after training; some images without
    a caption are left out of the figures, and counted there."""
    _, counts = fingerprint(source)
    if not counts.without:
        return
    if counts.captions:
        print_once(
            f"{without_queries(address)}: {counts.without:,} of {plural(counts.samples, 'image')} have no caption and "
            "are skipped; give each of them one, or remove them"
        )
        return
    try:
        source[0]
        reason = "first of all " + source.where(0)
    except BadSample as bad:
        reason = f"{bad.reason}, {bad.where}"
    remedy = "it is a set for zero-shot" if is_there(Path(address) / CLASSNAMES) else "give data with captions"
    raise UserError(f"{without_queries(address)}: no sample has a caption ({reason}); {remedy}")


def _print_several_lines(address: str, source: Source) -> None:
    """Texts of several lines may be several captions; nothing but a mark tells."""
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
            f"lines and are read as one caption each; if every line is a caption, write the word {RETRIEVAL} into the "
            f"file {DATASET_TYPE} beside the images or shards"
        )


def open_task(task: Task, folder: Path) -> TaskData:
    """The data of one of DataComp's tasks, in the layout of its kind. Raises UserError where a part is missing or
    broken. Retrieval sets are read with default settings: those of a run are about its own data."""
    if task.kind == "classification":
        return ZeroShotTask.open(folder, name=task.name)
    if task.kind == "puzzles":
        return read_puzzles(folder)
    return open_retrieval(str(_shards_or_table(folder)), Settings())


def has_shards(folder: Path) -> bool:
    return (folder / "test").is_dir() and any((folder / "test").glob("*.tar"))


def _shards_or_table(folder: Path) -> Path:
    """The folder itself if it has shards or captions.csv; else its only table, such as Karpathy's beside the images.
    Shards must be marked: every line of a text would be one caption together with the next."""
    if has_shards(folder):
        if not is_retrieval_set(folder):
            raise UserError(f"{folder / DATASET_TYPE}: does not say {RETRIEVAL}; write this word into it")
        return folder
    if not folder.is_dir() or find_captions_file(folder):
        return folder
    tables = [file for file in folder.iterdir() if file.suffix.lower() in TASK_TABLES]
    return tables[0] if len(tables) == 1 else folder


def source_of(data: TaskData) -> Source:
    """Its images."""
    return data if isinstance(data, Source) else data.source
