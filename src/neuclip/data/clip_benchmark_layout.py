"""CLIP_benchmark's layout of test sets, which hub copies have. In a retrieval set every line of a text is a caption.

SET/dataset_type.txt    the word retrieval; absent in a classification set
SET/test/nshards.txt    the number of shards
SET/test/0.tar ...      images, each with a `txt` member (one caption per line) or a `cls` member (its label)
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


def numbered_shards(folder: Path) -> list[Path]:
    """0.tar, 1.tar ... as many as nshards.txt says. Raises UserError unless exactly these are in the folder: half a set
    would give other figures."""
    stated, shards = folder / SHARD_COUNT, [path for path in folder.glob("*.tar") if not path.name.startswith(".")]
    if not stated.is_file():
        raise UserError(
            f"{stated}: no such file, and without it nobody knows whether shards are missing; copy the set again, or "
            f"write the number of shards into it ({len(shards)} are there)"
        )
    text = stated.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdecimal() or not 0 < int(text[:9]) == int(text):
        raise UserError(f"{stated}: {text[:40]!r} is not a number of shards; write how many tar files there are")
    numbered = [folder / f"{number}.tar" for number in range(int(text))]
    if missing := next((path for path in numbered if not path.is_file()), None):
        raise UserError(f"{missing}: missing, though {stated} says {text} shards; copy it again")
    if further := sorted({*shards} - {*numbered}):
        raise UserError(
            f"{further[0]}: is not among the {text} shards that {stated} counts; correct the number, or remove the file"
        )
    return numbered


def _is_marked(folder: Path) -> bool:
    mark = folder / DATASET_TYPE
    return mark.is_file() and mark.read_text(encoding="utf-8", errors="replace").strip().lower() == RETRIEVAL
