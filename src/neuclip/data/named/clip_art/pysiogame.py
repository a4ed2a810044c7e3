"""The cartoons of pysioGame: one thing or action each, with its word."""

from __future__ import annotations

from pathlib import Path

from neuclip.data.named.clip_art.item import Item, Listing, clean

FOLDER = "usr/share/games/pysiogame/res/images/art4apps"
LICENCE = "CC-BY-SA (Art4Apps, by the package's CREDITS)"


def list_items(package: Path) -> Listing:
    """One item per picture: the file name is the caption, the folder the category."""
    root = package / FOLDER
    listing = Listing()
    for file in sorted(root.rglob("*.jpg")):
        key = file.relative_to(root).as_posix()
        about = {"file": key, "category": spelled(file.parent.name), "license": LICENCE}
        listing.items.append(Item(key, file, spelled(file.stem), about))
    return listing


def spelled(name: str) -> str:
    """
    >>> spelled("clothes_n_accessories")
    'clothes and accessories'
    """
    return clean(" ".join("and" if word == "n" else word for word in name.split("_")))
