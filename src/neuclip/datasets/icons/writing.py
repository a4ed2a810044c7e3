"""The files of icons-30k: shards of every part, zero-shot tasks, ATTRIBUTION.md and BUILD.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from neuclip.data.tar.writing import Entry
from neuclip.datasets.drawing import Drawn
from neuclip.datasets.icons.listing import Drawing
from neuclip.datasets.icons.sources import Source, installed_versions
from neuclip.datasets.splitting import Pair, without_words
from neuclip.datasets.writing import drawing_versions, ids_digests, shuffle, write_part, write_zero_shot_folder
from neuclip.records import write_json

TEMPLATES = (
    "{c}",
    "a picture of {c}.",
    "an icon of {c}.",
    "a drawing of {c}.",
    "a small image of {c}.",
)
FEWEST_IMAGES = 5  # a subgroup with fewer test images has no accuracy worth reporting
ATTRIBUTION_HEAD = """# Where the images of icons-30k come from

Every image is a 64 x 64 rendering of a drawing from one of these packages; its JSON names source and licence.

"""
ATTRIBUTION_FOOT = """
Names, groups and keywords of the emoji: Unicode CLDR (Unicode-3.0), by way of emojibase (MIT).

OpenMoji is share-alike: whoever publishes images made from it must name OpenMoji and keep them under CC-BY-SA-4.0.
Twemoji and Font Awesome (CC-BY-4.0) must be named, with a note that the drawings were rendered at a small size.
"""


@dataclass(frozen=True)
class IconPair(Pair):
    """A drawing together with its image."""

    drawing: Drawing
    drawn: Drawn


class LabelledImage(NamedTuple):
    png: bytes
    class_name: str


def write_icons(folder: Path, pairs: Sequence[IconPair], *, hide: Set[str]) -> None:
    """Write the shards of one part; keywords with a word of `hide` are left out."""

    def entry(pair: IconPair, index: int) -> Entry:
        facts = json.dumps(sample_facts(pair, index, hide), ensure_ascii=False).encode()
        return ("png", pair.drawn.png), ("txt", pair.caption.encode()), ("json", facts)

    write_part(folder, pairs, entry)


def sample_facts(pair: IconPair, index: int, hide: Set[str]) -> dict[str, Any]:
    """What a sample's JSON says."""
    drawing, emoji = pair.drawing, pair.drawing.emoji
    return {
        "source": drawing.source.name,
        "family": drawing.source.family,
        "hex" if emoji else "stem": drawing.key,
        "tags": without_words(emoji.tags, hide) if emoji else [],
        "group": emoji.group if emoji else None,
        "subgroup": emoji.subgroup if emoji else None,
        "license": drawing.source.licence,
        "index": index,
    }


def write_zero_shot(
    folder: Path, new_drawings: Sequence[IconPair], new_concepts: Sequence[IconPair], names: Sequence[str]
) -> None:
    """Three tasks: Unicode group and subgroup of the test emoji, and the name of a new drawing among all names."""
    emoji = [(pair.drawn.png, pair.drawing.emoji) for pair in shuffle([*new_drawings, *new_concepts])]
    groups = [LabelledImage(png, row.group.replace("-", " and ")) for png, row in emoji if row]
    subgroups = [LabelledImage(png, row.subgroup.replace("-", " ")) for png, row in emoji if row]
    write_task(folder / "groups", groups)
    write_task(folder / "subgroups", frequent_classes(subgroups))
    write_task(folder / "names", [LabelledImage(pair.drawn.png, pair.caption) for pair in shuffle(new_drawings)], names)


def frequent_classes(images: Sequence[LabelledImage]) -> list[LabelledImage]:
    """The images whose class has enough of them."""
    counts = Counter(image.class_name for image in images)
    return [image for image in images if counts[image.class_name] >= FEWEST_IMAGES]


def write_task(folder: Path, images: Sequence[LabelledImage], class_names: Sequence[str] | None = None) -> None:
    """Write one task; without `class_names` the classes are those that occur, in alphabetical order."""
    names = sorted(class_names or {image.class_name for image in images})
    label = {name: number for number, name in enumerate(names)}
    write_zero_shot_folder(folder, ((image.png, label[image.class_name]) for image in images), names, TEMPLATES)


def write_notes(folder: Path, sources: Sequence[Source], parts: Mapping[str, Sequence[IconPair]]) -> None:
    """ATTRIBUTION.md for people; BUILD.json tells whether two builds are the same."""
    import resvg_py  # only a set that was just drawn with it needs its version

    versions = installed_versions()
    (folder / "ATTRIBUTION.md").write_text(attribution(sources, versions), encoding="utf-8")
    families = {part: Counter(pair.family for pair in pairs) for part, pairs in parts.items()}
    write_json(
        folder / "BUILD.json",
        {
            "packages": versions | drawing_versions(),
            "resvg": str(resvg_py.__resvg_version__),
            "pairs": {part: len(pairs) for part, pairs in parts.items()},
            "families": {part: dict(sorted(counts.items())) for part, counts in families.items()},
            "ids_sha256": ids_digests(parts),
        },
    )


def attribution(sources: Iterable[Source], versions: Mapping[str, str]) -> str:
    """Whose art the images show, and what its licence asks of those who pass it on: one line per package."""
    lines = {
        source.package: f"- {source.art}: {source.licence}, {source.home} (PyPI {source.package} "
        f"{versions.get(source.package, 'of unknown version')})\n"
        for source in sources
    }
    return ATTRIBUTION_HEAD + "".join(lines.values()) + ATTRIBUTION_FOOT
