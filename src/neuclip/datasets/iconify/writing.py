"""The shards of every part: png, txt and json of each pair, in a fixed mixed order."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from neuclip.data.tar.writing import Entry, write_shards
from neuclip.datasets.iconify.drawing import Drawings
from neuclip.datasets.iconify.splitting import Pair
from neuclip.datasets.icons.split import trainable_tags
from neuclip.progress import track


def write_part(folder: Path, pairs: Sequence[Pair], drawings: Sequence[Drawings], *, hide: Set[str]) -> None:
    """Write the shards of one part; captions of aliases that hold a word of `hide` are left out.

    A folder that is there is whole: it was written under another name and moved.
    """
    if folder.exists():
        return
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    ordered = track(mixed(pairs), f"writing {folder.name}", len(pairs), "pairs")
    write_shards(unfinished, _entries(ordered, drawings, hide))
    unfinished.rename(folder)


def mixed(pairs: Sequence[Pair]) -> list[Pair]:
    """In an order that looks random and is always the same: the first thousand pairs are a fair mixture."""
    return sorted(pairs, key=lambda pair: hashlib.sha256(pair.id.encode()).digest())


def describe(pair: Pair, captions: Sequence[str], index: int) -> dict[str, Any]:
    """What a sample's JSON says. Several captions stand there, one alone in a `txt`, as in any set of shards."""
    about = {
        "set": pair.collection.prefix,
        "name": pair.row.name,
        "style": pair.row.style,
        "family": pair.family,
        "category": pair.collection.category,
        "license": pair.collection.licence,
        "palette": pair.collection.palette,
        "index": index,
    }
    return {"caption": list(captions)} | about if len(captions) > 1 else about


def _entries(pairs: Iterator[Pair], drawings: Sequence[Drawings], hide: Set[str]) -> Iterator[Entry]:
    # In memory, a few hundred megabytes: the order jumps from file to file.
    images = [of_one.images() for of_one in drawings]
    for index, pair in enumerate(pairs):
        number, row = pair.place
        content, ends = images[number]
        png = content[ends[row - 1] if row else 0 : ends[row]].tobytes()
        captions = [pair.caption, *trainable_tags(pair.row.captions[1:], hide)]
        text = [("txt", pair.caption.encode())] if len(captions) == 1 else []
        about = json.dumps(describe(pair, captions, index), ensure_ascii=False).encode()
        yield [("png", png), *text, ("json", about)]
