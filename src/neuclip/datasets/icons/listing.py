"""Every drawing of a source, before it is drawn: what it is called, and how to draw it."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from neuclip.datasets.captions import emoji_caption, plain_caption
from neuclip.datasets.drawing import Drawable, Glyph
from neuclip.datasets.drawn import Listing, Names
from neuclip.datasets.emoji import Emoji, emoji_by_hex, hex_key
from neuclip.datasets.icons.sources import Source, art_path

STYLE_WORDS = frozenset(["outline", "outlined", "filled", "fill", "variant", "alt", "solid"])
STYLE_WORD_SETS = ("mdi", "tabler")  # the sets that write the style into the name of a drawing


def list_drawings(source: Source) -> Listing:
    """All drawings of an installed source: files in the order of their names, glyphs in the order of the table.

    An emoji is named by its hex code points, an icon by the stem of its file.
    """
    list_files = {"emoji files": _emoji_files, "emoji font": _glyphs, "archive": _archive_icons}
    path = art_path(source)
    return Listing(list(list_files[source.kind](source, path)) if path else [])


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


def _emoji_files(_: Source, folder: Path) -> Iterator[tuple[Names, Drawable]]:
    by_hex = dict(emoji_by_hex())
    for file in sorted(folder.glob("*.svg")):
        # Removed from the table, because a vendor may spell the same emoji twice.
        emoji = by_hex.pop(hex_key(file.stem), None)
        if emoji:
            yield _names(emoji), file.read_text(encoding="utf-8")


def _glyphs(source: Source, font_file: Path) -> Iterator[tuple[Names, Drawable]]:
    for emoji in emoji_by_hex().values():
        # The monochrome font has no flags: it shows two letters in a box.
        if not (source.name == "notomono" and emoji.group == "flags"):
            yield _names(emoji), Glyph(emoji.characters, str(font_file), source.font_family)


def _names(emoji: Emoji) -> Names:
    return Names(emoji.hex, (emoji_caption(emoji.name),))


def _archive_icons(source: Source, file: Path) -> Iterator[tuple[Names, Drawable]]:
    icon_set = source.name.partition("-")[0]
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            path = PurePosixPath(name)
            if path.suffix != ".svg" or str(path.parent) != (source.style_folder or "."):
                continue
            stem = path.stem.removesuffix(source.suffix)
            if not is_brand(icon_set, stem):
                yield Names(stem, (icon_caption(icon_set, stem),)), archive.read(name).decode("utf-8")
