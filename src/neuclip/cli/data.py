"""`neuclip data`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuclip.cli.flags import Command, Flag, wants_help
from neuclip.errors import AskedWrongly
from neuclip.settings.nearest import proposal

FLAGS_OF = {
    "convert": {"shard_size", "data.image_column", "data.caption_column", "data.caption_key"},
    "index": {"data.caption_key", "verify"},
}
DESCRIPTIONS = {"icons-30k": "30 thousand icons and emoji with their names, drawn at 64 x 64"}

COMMAND = Command(
    usage="data list | data prepare NAME | data convert SOURCE FOLDER | data index DATA",
    about="""Lists the built-in data sets, or prepares one and prints its folder.
They are made once, from installed packages and without any download; `neuclip train` prepares what it needs itself.
`convert` writes any data as tar shards into a new folder; after a break the same call goes on where it was.
`index` reads tar shards once and notes where each sample lies; training does it by itself where it was not done.""",
    flags=(
        Flag("shard-size", int, "convert: samples per shard (default 5000)"),
        Flag("data.image_column", str, "convert: column of a table that holds pictures or their paths"),
        Flag("data.caption_column", str, "convert: column of captions; several between commas"),
        Flag("data.caption_key", str, "convert, index: key of the captions in a shard's json members"),
        Flag("verify", bool, "index: read all shards again and compare; what differs is said, and corrected"),
    ),
    examples=(
        "neuclip data prepare icons-30k",
        "neuclip data convert pairs.csv shards --shard-size 10000",
    ),
    most=3,
)


def run(arguments: Sequence[str]) -> int:
    if wants_help(arguments):
        print(COMMAND.help(), end="")
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
        return list_data()
    if action == "prepare" and len(names) == 1:
        return prepare(names[0])
    if action in ("list", "prepare"):
        wanted = "no name" if action == "list" else "the name of a data set"
        raise AskedWrongly(f"data {action} takes {wanted}; give neuclip {COMMAND.usage}")
    raise AskedWrongly(f"no action {action!r} of data; {proposal(action, ['list', 'prepare', 'convert', 'index'])}")


def list_data() -> int:
    from neuclip.data.builtin import builtin_names, cache_folder

    for name in builtin_names():
        built = sorted(cache_folder().glob(f"{name}-*/"))
        print(f"{name}  {DESCRIPTIONS[name]} ({f'built: {built[-1]}' if built else 'not built yet'})")
    return 0


def prepare(name: str) -> int:
    from neuclip.data.builtin import builtin_folder, builtin_names

    if name not in builtin_names():
        raise AskedWrongly(f"no built-in data set {name!r}; {proposal(name, list(builtin_names()))}")
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
    from neuclip.data.indexing import index_report, opened_shards, verified

    sources = opened_shards(address, flags.get("data.caption_key", ""))
    for source in sources:
        for line in index_report(source):
            print(line)
    if not flags.get("verify"):
        return 0
    wrong = [line for source in sources for line in verified(source)]
    for line in wrong:
        print(f"{line}; indexed again")
    print(f"verified: {f'{len(wrong)} shards did not fit their index' if wrong else 'all shards fit their index'}")
    return 1 if wrong else 0
