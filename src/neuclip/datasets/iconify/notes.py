"""README.md and BUILD.json of the built set: what is in it, whose art it is, and what the licences ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuclip.datasets.fetching import Package
from neuclip.datasets.iconify.collections import IconifyCollection
from neuclip.datasets.splitting import PARTS, Pair
from neuclip.datasets.writing import drawing_versions, ids_digests
from neuclip.files import write_text
from neuclip.records import write_json

WHAT_LICENCES_ASK = (
    (("MIT", "ISC", "BSD"), "keep the copyright line and the text of the licence with the images"),
    (("Apache",), "the same, and say that the drawings were rendered at a small size"),
    (("CC-BY-SA",), "name the author and the licence, say what was changed, and keep what you make under this licence"),
    (("CC-BY",), "name the author and the licence, and say what was changed"),
    (("OFL",), "keep the copyright line and the licence; not to be sold by themselves as a font"),
    (("GPL", "MPL"), "pass them on under the same licence, and say where the drawings (the source) are"),
    (("CC0", "Unlicense"), "nothing"),
)


Parts = Mapping[str, Sequence[Pair[IconifyCollection]]]
Counts = Mapping[str, int]


def write_notes(folder: Path, package: Package, parts: Parts, counts: Counts, dropped: Counts) -> None:
    """`counts`: what became of the visible icons; `dropped`: how many drawn ones are in no part, by reason."""
    write_text(folder / "README.md", readme(package, parts, counts, dropped))
    write_json(
        folder / "BUILD.json",
        {
            "packages": {package.name: package.version} | drawing_versions(),
            "icons": dict(counts),
            "dropped": dict(dropped),
            "pairs": {part: len(pairs) for part, pairs in parts.items()},
            "families": {part: len({pair.collection.family for pair in pairs}) for part, pairs in parts.items()},
            "licences": dict(_licences(parts).most_common()),
            "ids_sha256": ids_digests(parts),
        },
    )


def readme(package: Package, parts: Parts, counts: Counts, dropped: Counts) -> str:
    """The whole text; no date in it: two builds give the same."""
    return "\n".join(
        [
            "# iconify",
            "",
            f"Icons and emoji of {package.name} {package.version} (npm), 64 x 64 pixels on white, each with the words",
            "of its name. Made by `neuclip data prepare iconify`.",
            "",
            *_table(("part", "pairs", "different captions", "families"), _part_rows(parts)),
            "",
            "`new-concepts`: names with one of 100 held-out words, in no training pair. `new-drawings`: the name is",
            "trained on in drawings of other families, this family's are held out. Of the sizes and styles of a tested",
            "drawing one is kept; none of them is trained on. Test images with a near duplicate in train are dropped.",
            "A family is one origin: versions, styles and forks of a collection count as one.",
            "",
            f"Of the visible icons {counts['brands']:,} more brand marks beside those of the category Logos and",
            f"{counts['unnamed']:,} whose name says nothing were left out; {counts['blank']:,} showed nothing.",
            f"{counts['drawn']:,} were drawn. Dropped of these:",
            "",
            *(f"- {reason}: {number:,}" for reason, number in dropped.items()),
            "",
            "## Licences",
            "",
            "The art keeps the licence of its collection; each sample's JSON names it. Before you pass images on,",
            "see what it asks (in short, and no legal advice):",
            "",
            *_table(("licence", "pairs", "asks you to"), _licence_rows(parts)),
            "",
            "## Collections",
            "",
            *_table(("set", "pairs", "licence", "title", "author"), _collection_rows(parts)),
            "",
        ]
    )


def what_it_asks(licence: str) -> str:
    for beginnings, asks in WHAT_LICENCES_ASK:
        if licence.startswith(beginnings):
            return asks
    return "see the collection's home page"


def _part_rows(parts: Parts) -> list[Sequence[str]]:
    return [
        (
            part,
            f"{len(parts[part]):,}",
            f"{len({pair.caption for pair in parts[part]}):,}",
            f"{len({pair.collection.family for pair in parts[part]}):,}",
        )
        for part in PARTS
    ]


def _licences(parts: Parts) -> Counter[str]:
    return Counter(pair.collection.licence for pairs in parts.values() for pair in pairs)


def _licence_rows(parts: Parts) -> list[Sequence[str]]:
    return [(licence, f"{number:,}", what_it_asks(licence)) for licence, number in _licences(parts).most_common()]


def _collection_rows(parts: Parts) -> list[Sequence[str]]:
    counts = Counter(pair.collection for pairs in parts.values() for pair in pairs)
    return [
        (one.name, f"{number:,}", one.licence, one.title, f"[{one.author}]({one.home})" if one.home else one.author)
        for one, number in sorted(counts.items(), key=lambda item: item[0].name)
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
