"""The entry of iconify in the catalogue of data sets. Nothing heavy is imported before it is built."""

from __future__ import annotations

from pathlib import Path

from neuclip.datasets.catalogue import DataSet
from neuclip.datasets.fetching import Package, fetched
from neuclip.datasets.icons.rasteriser import rasteriser_and_version

BUILDER_VERSION = 1  # raise it whenever the same package would give other files
PACKAGE = Package("npm", "@iconify/json", "2.2.535", 104)


def version() -> str:
    return f"builder {BUILDER_VERSION}, {PACKAGE.name} {PACKAGE.version}, {rasteriser_and_version()}"


def build(folder: Path) -> None:
    from neuclip.datasets.iconify.build import build_set

    build_set(folder, PACKAGE, fetched(PACKAGE) / "package")


SET = DataSet(
    name="iconify",
    about="296,185 icons and emoji of 217 collections with their names",
    needs="npm, 104 MB, and pip install 'neuclip[demo]'",
    licence="of each collection: MIT, Apache-2.0, CC-BY-4.0 and others",
    parts=("train", "new-drawings", "new-concepts"),
    packages=(PACKAGE,),
    version=version,
    build=build,
    minutes=9,
)
