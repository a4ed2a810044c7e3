"""Every drawing of a source, before it is drawn: what it shows, what it is called, and how to draw it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from neuclip.datasets.icons.captions import emoji_caption, icon_caption, is_brand
from neuclip.datasets.icons.drawing import Glyph
from neuclip.datasets.icons.emoji_table import Emoji, hex_key
from neuclip.datasets.icons.packages import Source, art_path


@dataclass(frozen=True)
class Drawing:
    """One drawing with its caption. `key` is the hex code points of an emoji or the stem of an icon's file."""

    source: Source
    key: str
    caption: str
    image: str | Glyph
    emoji: Emoji | None = None

    @property
    def id(self) -> str:
        return f"{self.source.name}/{self.key}"


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


def _emoji_files(source: Source, folder: Path, emoji: list[Emoji]) -> Iterator[Drawing]:
    by_hex = {row.hex: row for row in emoji}
    for file in sorted(folder.glob("*.svg")):
        # Taken out of the table, so that a vendor's second spelling of the same emoji is not drawn again.
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
