"""The files of a built set: shards of pairs, zero-shot folders, and what BUILD.json says of every set."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuclip.data.convert import Entry, write_shards, write_tar
from neuclip.datasets.drawn import AnyCollection, DrawnCollection
from neuclip.datasets.rasteriser import RASTERISER
from neuclip.datasets.splitting import Pair
from neuclip.progress import track

Sample = tuple[Sequence[str], dict[str, Any]]  # captions, and the facts of its JSON


class Images:
    """The PNG files of drawn collections, in memory: the order of a part jumps from collection to collection."""

    def __init__(self, drawn: Sequence[DrawnCollection[AnyCollection]]):
        self.images = [one.images() for one in drawn]

    def png(self, pair: Pair[AnyCollection]) -> bytes:
        number, row = pair.place
        content, ends = self.images[number]
        return bytes(content[ends[row - 1] if row else 0 : ends[row]].tobytes())


def write_part(
    folder: Path,
    pairs: Sequence[Pair[AnyCollection]],
    images: Images,
    describe: Callable[[Pair[AnyCollection]], Sample],
) -> None:
    """Write the shards of one part: png and json of every pair, and a txt where it has one caption.

    A folder that is there is whole: it was written under another name and moved.
    """
    if folder.exists():
        return
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    ordered = track(shuffle(pairs), f"writing {folder.name}", len(pairs), "pairs")
    write_shards(unfinished, (_entry(images.png(pair), *describe(pair), index) for index, pair in enumerate(ordered)))
    unfinished.rename(folder)


def _entry(png: bytes, captions: Sequence[str], facts: dict[str, Any], index: int) -> Entry:
    """Several captions are in the JSON, a single one is in a txt, as in any set of shards."""
    text = [("txt", captions[0].encode())] if len(captions) == 1 else []
    listed = {"caption": list(captions)} if len(captions) > 1 else {}
    facts = {**listed, **facts, "index": index}
    return [("png", png), *text, ("json", json.dumps(facts, ensure_ascii=False).encode())]


def shuffle(pairs: Sequence[Pair[AnyCollection]]) -> list[Pair[AnyCollection]]:
    """An order that looks random and is always the same.

    As listed, the first shard would hold nothing but emoji and the last nothing but strokes; a reader that opens one
    shard, or takes the first thousand pairs, must see a fair mixture.
    """
    return sorted(pairs, key=lambda pair: hashlib.sha256(pair.id.encode()).digest())


def write_zero_shot_folder(
    folder: Path, images: Iterable[tuple[bytes, int]], class_names: Sequence[str], templates: Sequence[str]
) -> None:
    """Write the layout of CLIP_benchmark's webdataset classification sets.

    classnames.txt (line = label), the templates, and test/0.tar with (png, label) in the given order.
    """
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in class_names), encoding="utf-8")
    (folder / "zeroshot_classification_templates.txt").write_text("".join(f"{line}\n" for line in templates))
    (folder / "test" / "nshards.txt").write_text("1\n")
    members = ((("png", png), ("cls", str(label).encode())) for png, label in images)
    write_tar(folder / "test" / "0.tar", enumerate(members))


def drawing_versions() -> dict[str, str]:
    """Versions of the packages whose code decides about pixels."""
    return {name: importlib.metadata.version(name) for name in (RASTERISER, "pillow", "numpy")}


def ids_digests(parts: Mapping[str, Sequence[Pair[AnyCollection]]]) -> dict[str, str]:
    """Of every part, sha256 of the sorted ids, joined by newlines."""
    joined = {part: "\n".join(sorted(pair.id for pair in pairs)) for part, pairs in parts.items()}
    return {part: hashlib.sha256(ids.encode()).hexdigest() for part, ids in joined.items()}
