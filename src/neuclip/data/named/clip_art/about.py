"""tuxpaint, pysiogame and openclipart as the catalogue knows them. Nothing heavy is imported before they are built."""

from __future__ import annotations

from pathlib import Path

from neuclip.data.named.catalogue import DataSet
from neuclip.data.named.fetching import Package
from neuclip.data.named.icons.rasteriser import rasteriser_and_version

BUILDER_VERSION = 1  # raise it whenever the same packages would give other files

# Without versions: apt offers the one of its Debian release, and BUILD.json says which it was.
STAMPS = Package("debian", "tuxpaint-stamps-default", "", 161)
CARTOONS = Package("debian", "pysiogame", "", 16)
DRAWINGS = Package("debian", "openclipart-svg", "", 25)


def version() -> str:
    return f"builder {BUILDER_VERSION}, {rasteriser_and_version()}"


def build_tuxpaint(folder: Path) -> None:
    from neuclip.data.named.clip_art.build import build
    from neuclip.data.named.clip_art.tuxpaint import list_items

    build(folder, TUXPAINT.name, STAMPS, list_items, TUXPAINT.parts)


def build_pysiogame(folder: Path) -> None:
    from neuclip.data.named.clip_art.build import build
    from neuclip.data.named.clip_art.pysiogame import list_items

    build(folder, PYSIOGAME.name, CARTOONS, list_items, PYSIOGAME.parts)


def build_openclipart(folder: Path) -> None:
    from neuclip.data.named.clip_art.build import build
    from neuclip.data.named.clip_art.openclipart import list_items

    build(folder, OPENCLIPART.name, DRAWINGS, list_items, OPENCLIPART.parts)


TUXPAINT = DataSet(
    name="tuxpaint",
    about="stamps of Tux Paint with sentences in many languages, about 950 pairs, for testing",
    needs="apt-get, 161 MB, and pip install 'neuclip[demo]'",
    licence="GPL-2.0-or-later",
    parts=("test",),
    packages=(STAMPS,),
    version=version,
    build=build_tuxpaint,
)
PYSIOGAME = DataSet(
    name="pysiogame",
    about="cartoons of things and actions with their words, about 580 pairs, for testing",
    needs="apt-get, 16 MB, and pip install 'neuclip[demo]'",
    licence="CC-BY-SA (Art4Apps)",
    parts=("test",),
    packages=(CARTOONS,),
    version=version,
    build=build_pysiogame,
)
OPENCLIPART = DataSet(
    name="openclipart",
    about="drawings of the Open Clip Art Library with names and tags, about 3,800 pairs",
    needs="apt-get, 25 MB, and pip install 'neuclip[demo]'",
    licence="public domain",
    parts=("train", "test"),
    packages=(DRAWINGS,),
    version=version,
    build=build_openclipart,
    minutes=2,
)

SETS = (TUXPAINT, PYSIOGAME, OPENCLIPART)
