"""Every drawing of a source, before it is drawn: what it shows, what it is called, and how to draw it."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from neuclip.datasets.captions import emoji_caption, plain_caption
from neuclip.datasets.drawing import Drawable, Glyph
from neuclip.datasets.emoji import Emoji, hex_key
from neuclip.datasets.icons.sources import Source, art_path

STYLE_WORDS = frozenset(["outline", "outlined", "filled", "fill", "variant", "alt", "solid"])
STYLE_WORD_SETS = ("mdi", "tabler")  # the sets that write the style into the name of a drawing


@dataclass(frozen=True)
class Drawing:
    """One drawing with its caption. `key` is the hex code points of an emoji or the stem of an icon's file."""

    source: Source
    key: str
    caption: str
    image: Drawable
    emoji: Emoji | None = None


def list_drawings(source: Source, emoji: list[Emoji]) -> list[Drawing]:
    """All drawings of an installed source: files in the order of their names, glyphs in the order of the table."""
    path = art_path(source)
    if path is None:
        return []
    if source.kind == "emoji files":
        return list(_emoji_files(source, path, emoji))
    if source.kind == "emoji font":
        return list(_glyphs(source, path, emoji))
    return list(_archive_icons(source, path))


def icon_caption(icon_set: str, stem: str) -> str:
    """The caption of an icon, from the stem of its file; `icon_set` is the source without its style.

    >>> icon_caption("tabler", "mood-happy"), icon_caption("mdi", "account-box-outline")
    ('face happy', 'account box')
    """
    words = plain_caption(re.sub(r"[-_\s]+", " ", stem)).split()
    if icon_set in STYLE_WORD_SETS:
        words = [word for word in words if word not in STYLE_WORDS] or words
    if icon_set == "tabler" and len(words) > 1:
        if words[0] == "mood":
            words[0] = "face"
        elif words[0] == "device":
            words = words[1:]
    return " ".join(words)


def is_brand(icon_set: str, stem: str) -> bool:
    """Brand marks are left out: they are trade marks, and their names describe nothing that is seen."""
    return (icon_set == "tabler" and stem.startswith("brand-")) or (icon_set == "phosphor" and stem.endswith("-logo"))


def _emoji_files(source: Source, folder: Path, emoji: list[Emoji]) -> Iterator[Drawing]:
    by_hex = {row.hex: row for row in emoji}
    for file in sorted(folder.glob("*.svg")):
        # Removed from the table, because a vendor may spell the same emoji twice.
        row = by_hex.pop(hex_key(file.stem), None)
        if row:
            yield Drawing(source, row.hex, emoji_caption(row.name), file.read_text(encoding="utf-8"), row)


def _glyphs(source: Source, font_file: Path, emoji: list[Emoji]) -> Iterator[Drawing]:
    for row in emoji:
        # The monochrome font has no flags: it shows two letters in a box.
        if source.name == "notomono" and row.group == "flags":
            continue
        glyph = Glyph(row.characters, str(font_file), source.font_family)
        yield Drawing(source, row.hex, emoji_caption(row.name), glyph, row)


def _archive_icons(source: Source, file: Path) -> Iterator[Drawing]:
    icon_set = source.name.partition("-")[0]
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            path = PurePosixPath(name)
            if path.suffix != ".svg" or str(path.parent) != (source.style_folder or "."):
                continue
            stem = path.stem.removesuffix(source.suffix)
            if not is_brand(icon_set, stem):
                yield Drawing(source, stem, icon_caption(icon_set, stem), archive.read(name).decode("utf-8"))
