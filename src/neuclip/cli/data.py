"""`neuclip data`"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.tables import print_json
from neuclip.errors import UserError, proposal
from neuclip.formatting import byte_size, plural
from neuclip.progress import waiting
from neuclip.secrets import without_queries
from neuclip.tasks import Task, choose_tasks

if TYPE_CHECKING:
    from neuclip.data.evaluation_sets import HubCopy

CAPTION_KEY = Flag("data.caption_key", str, "key of the captions in a shard's json members")

COMMAND = Command(
    usage="data get TASK... | data convert SOURCE FOLDER | data index DATA",
    about="""Evaluation sets, and your own data as tar shards.
Each action has its own help: neuclip data convert --help""",
    flags=(),
    examples=(
        "neuclip data get imagenet --to sets",
        "neuclip data convert pairs.csv shards --shard-size 10000",
    ),
)

GET = Command(
    usage="data get TASK... [--to ROOT] [--yes] | data get --list",
    about="""Downloads evaluation sets of DataComp's 38 tasks from the Hugging Face hub into one folder.
TASK is a task, a group (imagenet, retrieval, vtab) or datacomp. Sets that are on this disk need no copy: put them, or
links to them, into the folder under the names that --list shows; class folders, Karpathy's captions with images and
WinoGAViL's table with images are read as they are. If interrupted, run the command again to continue. Exits with 1
when a task could not be got.""",
    flags=(
        Flag("to", str, "folder of all sets [default: evaluation-sets in the cache folder]"),
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
    action = arguments[0]
    if action in ACTIONS:
        return ACTIONS[action][0].help()
    each = [f"neuclip {one.usage}\n{one.about}\n{one.flags_help()}" for one, _ in ACTIONS.values()]
    return COMMAND.help("\n".join(each))


def get(*arguments: Any) -> int:
    """Prints the folder of each set that is there; what could not be got goes to stderr."""
    *names, flags = arguments
    with waiting("loading torch"):
        from neuclip.data.evaluation_sets import default_root, get_sets

    root = Path(flags.get("to") or default_root())
    if flags.get("list"):
        return list_tasks(choose_tasks(",".join(names) or "datacomp"), root, flags.get(JSON.name, False))
    tasks = choose_tasks(",".join(names))
    if not tasks:
        raise UserError("data get needs a task; give datacomp for all, or one that neuclip data get --list shows")
    got = get_sets(tasks, root, lambda copies: _agree(copies, root, flags.get("yes", False)))
    if flags.get(JSON.name):
        print_json([asdict(one) | {"task": one.task.key, "folder": one.folder and str(one.folder)} for one in got])
        return 0 if all(one.folder for one in got) else 1
    for one in got:
        if one.folder is None:
            print(f"{one.task.name}: {one.status}", file=sys.stderr)
            continue
        counts = ", ".join(f"{number:,} {what}" for what, number in one.counts.items())
        print(f"{one.task.name}: {one.status}, {counts}", *one.notes, sep="; warning: ", file=sys.stderr)
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


def _agree(copies: Sequence[HubCopy], root: Path, yes: bool) -> None:
    """Gigabytes are downloaded only when somebody wants them."""
    for copy in copies:
        print(f"{copy.task.name}: {byte_size(copy.bytes)}, {copy.repository}", file=sys.stderr)
    download = f"{byte_size(sum(copy.bytes for copy in copies))} into {root}"
    if yes:
        print(f"downloading {download}", file=sys.stderr)
    elif not sys.stdin.isatty():
        raise UserError(f"downloading {download} needs a yes; give --yes")
    elif input(f"download {download}? [y/N] ").strip().lower() not in ("y", "yes"):
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
    "get": (GET, get),
    "convert": (CONVERT, convert_data),
    "index": (INDEX, index),
}
