"""The files of icons-30k: shards of every part, zero-shot tasks, ATTRIBUTION.md and BUILD.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from neuclip.datasets.emoji import Emoji, emoji_by_hex
from neuclip.datasets.icons.sources import Source, installed_versions
from neuclip.datasets.splitting import NEW_CONCEPTS, NEW_DRAWINGS, Pair, without_words
from neuclip.datasets.writing import Images, drawing_versions, ids_digests, shuffle, write_part, write_zero_shot_folder
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


IconPair = Pair[Source]
Parts = Mapping[str, Sequence[IconPair]]


class LabelledImage(NamedTuple):
    png: bytes
    class_name: str


def write_icons(folder: Path, pairs: Sequence[IconPair], images: Images, *, hide: Set[str]) -> None:
    """Write the shards of one part; keywords with a word of `hide` are left out."""
    write_part(folder, pairs, images, lambda pair: (pair.names.captions, sample_facts(pair, hide)))


def sample_facts(pair: IconPair, hide: Set[str]) -> dict[str, Any]:
    """What a sample's JSON says."""
    source, emoji = pair.collection, emoji_of(pair)
    return {
        "source": source.name,
        "family": source.family,
        "hex" if emoji else "stem": pair.names.name,
        "tags": without_words(emoji.tags, hide) if emoji else [],
        "group": emoji.group if emoji else None,
        "subgroup": emoji.subgroup if emoji else None,
        "license": source.licence,
    }


def emoji_of(pair: IconPair) -> Emoji | None:
    return None if pair.collection.kind == "archive" else emoji_by_hex()[pair.names.name]


def write_zero_shot(folder: Path, parts: Parts, names: Sequence[str], images: Images) -> None:
    """Three tasks: Unicode group and subgroup of the test emoji, and the name of a new drawing among all names."""
    emoji = [(images.png(pair), emoji_of(pair)) for pair in shuffle([*parts[NEW_DRAWINGS], *parts[NEW_CONCEPTS]])]
    groups = [LabelledImage(png, row.group.replace("-", " and ")) for png, row in emoji if row]
    subgroups = [LabelledImage(png, row.subgroup.replace("-", " ")) for png, row in emoji if row]
    drawings = [LabelledImage(images.png(pair), pair.caption) for pair in shuffle(parts[NEW_DRAWINGS])]
    write_task(folder / "groups", groups)
    write_task(folder / "subgroups", frequent_classes(subgroups))
    write_task(folder / "names", drawings, names)


def frequent_classes(images: Sequence[LabelledImage]) -> list[LabelledImage]:
    """The images whose class has enough of them."""
    counts = Counter(image.class_name for image in images)
    return [image for image in images if counts[image.class_name] >= FEWEST_IMAGES]


def write_task(folder: Path, images: Sequence[LabelledImage], class_names: Sequence[str] | None = None) -> None:
    """Write one task; without `class_names` the classes are those that occur, in alphabetical order."""
    names = sorted(class_names or {image.class_name for image in images})
    label = {name: number for number, name in enumerate(names)}
    write_zero_shot_folder(folder, ((image.png, label[image.class_name]) for image in images), names, TEMPLATES)


def write_notes(folder: Path, sources: Sequence[Source], parts: Parts) -> None:
    """ATTRIBUTION.md for people; BUILD.json tells whether two builds are the same."""
    import resvg_py  # only a set that was just drawn with it needs its version

    versions = installed_versions()
    (folder / "ATTRIBUTION.md").write_text(attribution(sources, versions), encoding="utf-8")
    families = {part: Counter(pair.collection.family for pair in pairs) for part, pairs in parts.items()}
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
