"""`neuclip data get | convert | index`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from neuclip.cli.command import print_json
from neuclip.errors import UserError
from neuclip.formatting import byte_size, plural
from neuclip.progress import waiting
from neuclip.secrets import without_queries
from neuclip.tasks import Task, choose_tasks, default_root

if TYPE_CHECKING:
    from neuclip.data.evaluation_sets import HubCopy, SetStatus


def get(*names: str, to: str = "", yes: bool = False, list: bool = False, json: bool = False) -> int:
    """neuclip data get TASK... [--to ROOT] [--yes] | neuclip data get --list

    Downloads the evaluation sets of DataComp's 38 tasks from the Hugging Face hub into one folder. TASK is the name of
    a task, a group (imagenet, retrieval, vtab) or datacomp for all tasks. If interrupted, run the command again to
    continue. Exits with 1 if a task is not available.
    You need not download a set that you already have. Put it, or a link to it, into the folder under the name that
    --list shows. Folders of classes, Karpathy's captions with images and WinoGAViL's table with images are read
    directly.

    --to: folder for all sets [default: evaluation-sets in the cache folder]
    --yes: download without asking first
    --list: list the tasks, and show which of them are in the folder

    neuclip data get imagenet --to sets
    neuclip data get vtab --list
    """
    root = Path(to or default_root())
    if list:
        return list_tasks(choose_tasks(",".join(names) or "datacomp"), root, as_json=json)
    tasks = choose_tasks(",".join(names))
    if not tasks:
        raise UserError("data get needs a task; give datacomp for all, or one that neuclip data get --list shows")
    with waiting("loading torch"):
        from neuclip.data.evaluation_sets import get_sets

    sets = get_sets(tasks, root, lambda copies: confirm(copies, root, yes=yes))
    if json:
        print_json([asdict(one) | {"task": one.task.key, "folder": one.folder and str(one.folder)} for one in sets])
    else:
        print_sets(sets)
    return 0 if all(one.folder for one in sets) else 1


def print_sets(sets: Sequence[SetStatus]) -> None:
    """Print the folder of each available set; counts, warnings and failures go to stderr."""
    for one in sets:
        if one.folder is None:
            print(f"{one.task.name}: {one.status}", file=sys.stderr)
            continue
        counts = ", ".join(f"{number:,} {what}" for what, number in one.counts.items())
        print(f"{one.task.name}: {one.status}, {counts}", *one.notes, sep="; warning: ", file=sys.stderr)
        print(one.folder)


def list_tasks(tasks: Sequence[Task], root: Path, *, as_json: bool) -> int:
    folders = {task.key: task.find_folder(root) for task in tasks}
    if as_json:
        return print_json([asdict(task) | {"folder": (path := folders[task.key]) and str(path)} for task in tasks])
    for task in tasks:
        unit = "puzzles" if task.kind == "puzzles" else "images"
        classes = f"{task.classes:,} classes" if task.classes else ""
        there = "there" if folders[task.key] else "–"
        print(f"{task.name:24}{task.size:>8,} {unit:8}{classes:>14}  {there:6}{task.folder}")
    print(f"{sum(map(bool, folders.values()))} of {len(tasks)} in {root}", file=sys.stderr)
    return 0


def confirm(copies: Sequence[HubCopy], root: Path, *, yes: bool) -> None:
    """Print the size of each download and ask whether to start; raise a UserError if the user does not agree."""
    for copy in copies:
        print(f"{copy.task.name}: {byte_size(copy.bytes)}, {copy.repository}", file=sys.stderr)
    what = f"{byte_size(sum(copy.bytes for copy in copies))} into {root}"
    if yes:
        print(f"downloading {what}", file=sys.stderr)
    elif not sys.stdin.isatty():
        raise UserError(f"downloading {what} must be confirmed, but stdin is not a terminal; give --yes")
    elif input(f"download {what}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("nothing was downloaded; give --yes, or fewer tasks")


def convert(
    source: str,
    folder: str,
    *,
    shard_size: int = 5000,
    data_image_column: str = "",
    data_caption_column: str = "",
    data_caption_key: str = "",
    json: bool = False,
) -> int:
    """neuclip data convert SOURCE FOLDER [--shard-size N ...]

    Writes image-text data of any supported kind as tar shards into a new folder, and prints the folder's path. Samples
    that cannot be read are skipped and listed in skipped.jsonl in the folder. Existing files are never overwritten. If
    interrupted, run the command again to continue.

    --shard-size: samples per shard
    --data.image_column: tables: column of images or image paths; default: detected by name
    --data.caption_column: tables: caption columns, separated by commas; default: detected by name
    --data.caption_key: shards: key of the captions in json members

    neuclip data convert pairs.csv shards --shard-size 10000
    """
    with waiting("loading torch"):
        from neuclip.data import convert as converting
        from neuclip.data.open import open_source

    converting.refuse_inside(source, Path(folder))
    opened = open_source(
        source,
        image_column=data_image_column,
        caption_column=data_caption_column,
        caption_key=data_caption_key,
    )
    done = converting.convert(opened, Path(folder), shard_size)
    listed = Path(folder) / converting.SKIPPED if done.skipped else None
    if json:
        left_out = {"left_out": dict(done.skipped.most_common()), "left_out_list": listed and str(listed)}
        return print_json({"folder": folder, "samples": done.samples, "shards": done.shards} | left_out)
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in done.skipped.most_common())
    skipped = f"; skipped {done.skipped.total():,}, listed in {listed}: {reasons}" if listed else ""
    print(f"{plural(done.samples, 'sample')} in {plural(done.shards, 'shard')}{skipped}", file=sys.stderr)
    print(done.folder)
    return 0


def index(data: str, *, data_caption_key: str = "", json: bool = False) -> int:
    """neuclip data index DATA [--data.caption_key TEXT]

    Reads tar shards once, stores the position of each sample in an index file, and reports the number of samples and
    all faults. Training does the same for shards that have no index or have changed since. To index shards again,
    delete their .index.npz files.

    --data.caption_key: shards: key of the captions in json members

    neuclip data index 'shards/{00000..00019}.tar'
    """
    with waiting("loading torch"):
        from neuclip.data.faults import by_reason
        from neuclip.data.mixture import Mixture
        from neuclip.data.open import open_source
        from neuclip.data.source import fingerprint
        from neuclip.data.tar.source import TarSource

    opened = open_source(data, caption_key=data_caption_key)
    parts = opened.parts if isinstance(opened, Mixture) else [opened]
    sources = [part for part in parts if isinstance(part, TarSource)]
    if not sources:
        raise UserError(f"{without_queries(data)} contains no tar shards; other data need no index")
    reports = []
    for part in sources:
        counts = fingerprint(part)[1]
        facts = {"name": part.name, "samples": len(part), "shards": len(part.shards), "index": str(part.joined)}
        faults = dict(by_reason(part.faults).most_common())
        reports.append(facts | {"without_caption": counts.without, "faults": faults})
        if json:
            continue
        print(f"{part.name}: {counts} in {plural(len(part.shards), 'shard')}; index: {part.joined}")
        for fault in part.faults:
            print(f"{fault.reason}{f' ({fault.times:,})' if fault.times > 1 else ''}: {fault.where}")
    return print_json({"sources": reports}) if json else 0
