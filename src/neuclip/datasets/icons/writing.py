"""The files of a built set: shards of every split, zero-shot tasks, ATTRIBUTION.md and BUILD.json."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from neuclip.data.tar.writing import Entry, write_shards
from neuclip.datasets.build_notes import drawing_versions, ids_digest
from neuclip.datasets.icons.attribution import attribution
from neuclip.datasets.icons.packages import Source, installed_versions
from neuclip.datasets.icons.pair import Pair
from neuclip.datasets.icons.split import trainable_tags
from neuclip.datasets.icons.zero_shot import Labelled, frequent_classes, group_words, subgroup_words, write_task
from neuclip.progress import track
from neuclip.records import write_json


def write_split(folder: Path, pairs: Sequence[Pair], *, hide: Set[str]) -> None:
    """Write the shards of one split; keywords with a word of `hide` are left out."""
    ordered = track(mixed(pairs), f"writing {folder.name}", len(pairs), "pairs")
    write_shards(folder, _entries(ordered, hide))


def mixed(pairs: Sequence[Pair]) -> list[Pair]:
    """In an order that looks random and is always the same.

    As listed, the first shard would hold nothing but emoji and the last nothing but strokes; a reader that opens one
    shard, or takes the first thousand pairs, must see a fair mixture.
    """
    return sorted(pairs, key=lambda pair: hashlib.sha256(pair.drawing.id.encode()).digest())


def _entries(pairs: Iterator[Pair], hide: Set[str]) -> Iterator[Entry]:
    for index, pair in enumerate(pairs):
        about = json.dumps(describe(pair, index, hide), ensure_ascii=False).encode()
        yield ("png", pair.drawn.png), ("txt", pair.caption.encode()), ("json", about)


def describe(pair: Pair, index: int, hide: Set[str]) -> dict[str, Any]:
    """What a sample's JSON says."""
    drawing, emoji = pair.drawing, pair.drawing.emoji
    return {
        "source": drawing.source.name,
        "family": drawing.source.family,
        "hex" if emoji else "stem": drawing.key,
        "tags": trainable_tags(emoji.tags, hide) if emoji else [],
        "group": emoji.group if emoji else None,
        "subgroup": emoji.subgroup if emoji else None,
        "license": drawing.source.licence,
        "index": index,
    }


def write_zero_shot(
    folder: Path, new_drawings: Sequence[Pair], new_concepts: Sequence[Pair], names: Sequence[str]
) -> None:
    """Three tasks: Unicode group and subgroup of the test emoji, and the name of a new drawing among all names."""
    emoji = [(pair, pair.drawing.emoji) for pair in mixed([*new_drawings, *new_concepts]) if pair.drawing.emoji]
    groups = [Labelled(pair.drawn.png, group_words(row.group)) for pair, row in emoji if row]
    subgroups = [Labelled(pair.drawn.png, subgroup_words(row.subgroup)) for pair, row in emoji if row]
    write_task(folder / "groups", groups)
    write_task(folder / "subgroups", frequent_classes(subgroups))
    write_task(folder / "names", [Labelled(pair.drawn.png, pair.caption) for pair in mixed(new_drawings)], names)


def write_notes(folder: Path, sources: Sequence[Source], splits: Mapping[str, Sequence[Pair]]) -> None:
    """ATTRIBUTION.md for people, BUILD.json for those who want to know whether two builds are the same."""
    versions = installed_versions()
    (folder / "ATTRIBUTION.md").write_text(attribution(sources, versions), encoding="utf-8")
    write_json(
        folder / "BUILD.json",
        {
            "packages": versions | drawing_versions(),
            "resvg": resvg_version(),
            "pairs": {split: len(pairs) for split, pairs in splits.items()},
            "families": {split: _family_counts(pairs) for split, pairs in splits.items()},
            "ids_sha256": {split: ids_digest(pair.drawing.id for pair in pairs) for split, pairs in splits.items()},
        },
    )


def resvg_version() -> str:
    import resvg_py  # only a set that was just drawn with it asks

    return str(resvg_py.__resvg_version__)


def _family_counts(pairs: Sequence[Pair]) -> dict[str, int]:
    return dict(sorted(Counter(pair.drawing.source.family for pair in pairs).items()))
