"""ATTRIBUTION.md: whose art the images show, and what its licence asks of those who pass it on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neuclip.datasets.icons.packages import Source

HEAD = """# Where the images of icons-30k come from

Every image is a 64 x 64 rendering of a drawing from one of these packages; its JSON names source and licence.

"""
FOOT = """
Names, groups and keywords of the emoji: Unicode CLDR (Unicode-3.0), by way of emojibase (MIT).

OpenMoji is share-alike: whoever publishes images made from it must name OpenMoji and keep them under CC-BY-SA-4.0.
Twemoji and Font Awesome (CC-BY-4.0) must be named, with a note that the drawings were rendered at a small size.
"""


def attribution(sources: Iterable[Source], versions: Mapping[str, str]) -> str:
    """One line per package, in the order of the sources."""
    lines = {
        source.package: f"- {source.art}: {source.licence}, {source.home} (PyPI {source.package} "
        f"{versions.get(source.package, 'of unknown version')})\n"
        for source in sources
    }
    return HEAD + "".join(lines.values()) + FOOT
