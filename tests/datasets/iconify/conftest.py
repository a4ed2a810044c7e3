"""A package in iconify's format, small enough to draw in a second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuclip.datasets.fetching import Package
from neuclip.datasets.iconify.build import build

PACKAGE = Package("npm", "@iconify/json", "0.0.1", 1)
MIT = {"title": "MIT", "spdx": "MIT"}
SHAPES = {
    "house": '<path fill="currentColor" d="M12 3L2 12h3v8h14v-8h3z"/>',
    "key": '<path d="M3 9h10v2H3zM16 4h4v14h-4z"/>',
    "bell": '<circle cx="12" cy="9" r="6"/><path d="M4 17h16v2H4z"/>',
    "cat": '<path d="M4 20L4 3l5 5h6l5-5v17z"/>',
    "leaf": '<path fill="#2a2" d="M4 20C4 8 12 4 20 4c0 12-6 16-16 16"/>',
    "drop": '<path fill="#24c" d="M12 2l6 11a7 7 0 1 1-12 0z"/>',
    "sun": '<circle cx="12" cy="12" r="5"/><path d="M11 0h2v4h-2zM11 20h2v4h-2zM0 11h4v2H0zM20 11h4v2h-4z"/>',
    "moon": '<path d="M9 2a10 10 0 1 0 13 13A9 9 0 0 1 9 2"/>',
}


def moved(body: str, by: int) -> str:
    """The same drawing by another family: turned and smaller."""
    return f'<g transform="rotate({7 * by} 12 12) scale(.{95 - 6 * by})">{body}</g>' if by else body


def add_collection(package: Path, prefix: str, icons: dict, about: dict | None = None, **more) -> None:
    """Write json/PREFIX.json and its entry in collections.json."""
    (package / "json").mkdir(parents=True, exist_ok=True)
    listing = package / "collections.json"
    collections = json.loads(listing.read_text()) if listing.exists() else {}
    collections[prefix] = {
        "name": prefix.title(),
        "total": len(icons),
        "author": {"name": f"Author of {prefix}", "url": f"https://{prefix}.example"},
        "license": MIT,
        "category": "UI 24px",
        "palette": False,
    } | (about or {})
    listing.write_text(json.dumps(collections))
    content = {"prefix": prefix, "width": 24, "height": 24, "icons": icons} | more
    (package / "json" / f"{prefix}.json").write_text(json.dumps(content))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return make_package(tmp_path / "package")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set built from the package, for tests that only look at it."""
    folder = tmp_path_factory.mktemp("iconify")
    build(folder / "set", PACKAGE, make_package(folder / "package"), processes=1)
    return folder / "set"


def make_package(folder: Path) -> Path:
    """Four families that draw the same eight things; and what must be left out."""
    for by, prefix in enumerate(("alpha", "beta", "gamma", "delta")):
        icons = {name: {"body": moved(body, by)} for name, body in SHAPES.items()}
        if prefix == "alpha":
            icons["key-fill"] = {"body": SHAPES["key"] + '<path d="M0 0h4v4z"/>'}
            icons["brand-acme"] = {"body": SHAPES["house"]}
            icons["empty"] = {"body": ""}
            icons["42"] = {"body": SHAPES["sun"]}
            icons["secret"] = {"body": SHAPES["sun"], "hidden": True}
            icons["copy-of-the-house"] = {"body": SHAPES["house"]}
            icons["feline"] = {"body": SHAPES["cat"].replace("M4 20", "M4 19.9")}
        aliases = {"home": {"parent": "house"}, "mirrored": {"parent": "key", "hFlip": True}}
        add_collection(folder, prefix, icons, aliases=aliases if prefix == "alpha" else {})
    add_collection(folder, "marks", {"acme": {"body": SHAPES["sun"]}}, {"category": "Logos"})
    add_collection(folder, "bought", {"sun": {"body": SHAPES["sun"]}}, {"license": {"spdx": "CC-BY-NC-4.0"}})
    add_collection(folder, "fa-brands", {"acme": {"body": SHAPES["sun"]}})
    return folder
