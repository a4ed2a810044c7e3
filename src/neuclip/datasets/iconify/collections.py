"""Reading @iconify/json: which collections are used, their families, and the icons of each as SVG documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip.datasets.collection import Collection
from neuclip.errors import RunFailed

BRAND_CATEGORY = re.compile(r"brands?|logos?|brands? / logos?|brand logos", re.IGNORECASE)
BRAND_NAME = re.compile(r"(brand|logo)-.+|.+-logo(-.+)?")
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
DEFAULT_SIDE = 16  # iconify's, for icons and collections that say none
DEEPEST_ALIAS = 8  # an alias may name an alias; a cycle must end
# Versions, styles and forks of one origin. A drawing that is held out for testing is held out in its whole family.
# Forks were found by their authors' words and by counting equal images between collections.
FAMILIES = {
    "material": ("mdi", "mdi-light", "ic", "material-symbols", "material-symbols-light", "zmdi", "eos-icons"),
    "fluent": ("fluent", "fluent-color", "fluent-mdl2"),
    "fluent-emoji": ("fluent-emoji", "fluent-emoji-flat", "fluent-emoji-high-contrast"),
    "noto": ("noto", "noto-v1"),
    "emojione": ("emojione", "emojione-monotone", "emojione-v1"),
    "font-awesome": ("fa", "fa-solid", "fa-regular", "fa6-solid", "fa6-regular", "fa7-solid", "fa7-regular", "la"),
    "boxicons": ("boxicons", "bx", "bxs"),
    "heroicons": ("heroicons", "heroicons-outline", "heroicons-solid", "sidekickicons"),
    "feather": ("lucide", "lucide-lab", "feather", "vadivam", "meteor-icons"),
    "solar": ("solar", "reicon"),
    "icon-park": ("icon-park", "icon-park-outline", "icon-park-solid", "icon-park-twotone"),
    "pepicons": ("pepicons", "pepicons-pop", "pepicons-print", "pepicons-pencil"),
    "unicons": ("uil", "uim", "uit", "uis"),
    "glyphs": ("glyphs", "glyphs-poly"),
    "devicon": ("devicon", "devicon-plain"),
    "ionicons": ("ion", "famicons"),
    "mono-icons": ("mi", "mono-icons"),
    "maki": ("maki", "temaki", "pinhead"),
    "icons8": ("icons8", "wpf", "flat-color-icons"),
    "wordpress": ("wordpress", "dashicons", "gridicons"),
    "coreui": ("cil", "cif"),
    "streamline": ("guidance", "covid"),  # and all that begin with the name
}
_FAMILY = {prefix: family for family, prefixes in FAMILIES.items() for prefix in prefixes}


@dataclass(frozen=True, kw_only=True)
class IconifyCollection(Collection):
    """One icon set as collections.json describes it."""

    title: str
    author: str
    home: str
    category: str
    palette: bool  # True: colours of its own; False: one colour, drawn in black
    file: Path


@dataclass(frozen=True)
class Icon:
    """One visible icon. `aliases` are further names of the very same drawing."""

    name: str
    svg: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Icons:
    """The icons of a collection, and what is known of their names."""

    icons: tuple[Icon, ...]  # sorted by name
    names: frozenset[str]  # of all icons and aliases, hidden ones too
    prefixes: tuple[str, ...]  # words of style that the collection puts before its names
    suffixes: tuple[str, ...]  # and behind them; "" says that there are names without any
    brands: int  # brand marks, left out


def family_of(prefix: str) -> str:
    """The family of a collection; most are a family of their own.

    >>> family_of("fa6-solid"), family_of("streamline-flex-color"), family_of("tabler")
    ('font-awesome', 'streamline', 'tabler')
    """
    if prefix == "streamline" or prefix.startswith("streamline-"):
        return "streamline"
    return _FAMILY.get(prefix, prefix)


def read_collections(package: Path) -> list[IconifyCollection]:
    """The collections to draw, in the package's order: no logos, no licence that forbids commercial use."""
    described = _read(package / "collections.json")
    collections = [_collection(package, prefix, about) for prefix, about in described.items()]
    return [
        collection
        for collection in collections
        # Font Awesome's old brand marks are filed under Archive.
        if collection.category != "Logos" and "-NC" not in collection.licence and not _is_brands(collection.name)
    ]


def read_icons(collection: IconifyCollection) -> Icons:
    """All visible icons that are no brand marks, whose names describe nothing that is seen."""
    content = _read(collection.file)
    icons, aliases = content["icons"], content.get("aliases", {})
    brands = {
        name
        for category, members in content.get("categories", {}).items()
        if BRAND_CATEGORY.fullmatch(category)
        for name in members
    }
    visible = sorted(name for name, icon in icons.items() if not icon.get("hidden"))
    kept = [name for name in visible if name not in brands and not BRAND_NAME.fullmatch(name)]
    further = _names_by_icon(aliases)
    return Icons(
        icons=tuple(Icon(name, _svg(content, icons[name]), tuple(further.get(name, ()))) for name in kept),
        names=frozenset(icons) | frozenset(aliases),
        prefixes=tuple(content.get("prefixes", ())),
        suffixes=tuple(content.get("suffixes", ())),
        brands=len(visible) - len(kept),
    )


def _is_brands(prefix: str) -> bool:
    return prefix.endswith("-brands")


def _collection(package: Path, prefix: str, about: dict[str, Any]) -> IconifyCollection:
    licence = about.get("license", {})
    author = about.get("author", {})
    return IconifyCollection(
        name=prefix,
        family=family_of(prefix),
        title=about["name"],
        author=author.get("name", ""),
        home=author.get("url", ""),
        licence=licence.get("spdx") or licence.get("title", "unknown"),
        category=about.get("category", ""),
        palette=bool(about.get("palette")),
        expected=int(about.get("total", 0)),
        file=package / "json" / f"{prefix}.json",
    )


def _names_by_icon(aliases: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """The aliases of every icon, sorted; flipped and turned ones are other drawings and are left out."""
    names: dict[str, list[str]] = {}
    for name in sorted(aliases):
        parent, steps = name, 0
        while parent in aliases and set(aliases[parent]) == {"parent"} and steps < DEEPEST_ALIAS:
            parent, steps = aliases[parent]["parent"], steps + 1
        if parent not in aliases and not BRAND_NAME.fullmatch(name):
            names.setdefault(parent, []).append(name)
    return names


def _svg(content: dict[str, Any], icon: dict[str, Any]) -> str:
    left, top, width, height = _frame(content, icon)
    return f'{HEAD} viewBox="{left} {top} {width} {height}">{icon["body"]}</svg>'


def _frame(content: dict[str, Any], icon: dict[str, Any]) -> Iterator[float]:
    defaults = {"left": 0, "top": 0, "width": DEFAULT_SIDE, "height": DEFAULT_SIDE}
    return (icon.get(side, content.get(side, default)) for side, default in defaults.items())


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise RunFailed(
            f"{file}: cannot be read ({problem}); delete the package's folder and prepare iconify again"
        ) from problem
