"""Retrieval sets in CLIP_benchmark's layout: a file says so, and then every line of a text is a caption.

SET/dataset_type.txt    the word retrieval
SET/test/nshards.txt    the number of shards
SET/test/0.tar ...      images, each with a `txt` member: one caption per line
"""

from __future__ import annotations

from pathlib import Path

from neuclip.data.splits import is_part
from neuclip.errors import UserError

DATASET_TYPE, RETRIEVAL = "dataset_type.txt", "retrieval"
SHARD_COUNT = "nshards.txt"
TEST = "test"


def is_retrieval_set(folder: Path) -> bool:
    """Whether the folder is marked as a retrieval set, or is a part (`test`) of one that is."""
    folder = folder.absolute()
    return _is_marked(folder) or (is_part(folder.name) and _is_marked(folder.parent))


def evaluated_part(folder: Path) -> Path:
    """The folder with the test data of a retrieval set; of its `test` folder, and of data without parts, itself."""
    return folder / TEST if _is_marked(folder) and (folder / TEST).is_dir() else folder


def split_lines(text: bytes) -> tuple[bytes, ...]:
    """At line feeds alone, as the layout is defined: `bytes.splitlines` would cut at a carriage return as well."""
    return tuple(text.split(b"\n"))


def check_shard_count(folder: Path) -> None:
    """Raises UserError unless the shards in the folder are those that its nshards.txt counts: half a set would give
    other figures. Only a folder that is marked itself, which is not the layout's, may do without the count."""
    stated, shards = folder / SHARD_COUNT, [path for path in folder.glob("*.tar") if not path.name.startswith(".")]
    if not stated.is_file():
        if _is_marked(folder):
            return
        raise UserError(
            f"{stated}: no such file, and without it nobody knows whether shards are missing; copy the set again, or "
            f"write the number of shards into it ({len(shards)} are there)"
        )
    text = stated.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"{stated}: {text[:40]!r} is not a number of shards; write how many tar files there are")
    for number in range(int(text)):
        if not (folder / f"{number}.tar").is_file():
            raise UserError(f"{folder / f'{number}.tar'}: missing, though {stated} says {text} shards; copy it again")
    if len(shards) > int(text):
        raise UserError(
            f"{stated}: says {text} shards, and {len(shards)} are there; correct the number, or remove the others"
        )


def _is_marked(folder: Path) -> bool:
    mark = folder / DATASET_TYPE
    return mark.is_file() and mark.read_text(encoding="utf-8", errors="replace").strip().lower() == RETRIEVAL
