"""What the catalogue knows of icons-30k; what draws is imported when it is built."""

from __future__ import annotations

import shutil
from pathlib import Path

from neuclip.data.machine import available_cores
from neuclip.datasets.catalogue import DataSet
from neuclip.datasets.icons.packages import installed_versions

MOST_PROCESSES = 8
BUILDER_VERSION = 1  # raise it whenever the same packages would give other files


def version() -> str:
    """Changes with the packages and with the builder, so that changed drawings never mix with old ones."""
    return "\n".join([f"builder {BUILDER_VERSION}", *(f"{k} {v}" for k, v in sorted(installed_versions().items()))])


def build_clean(folder: Path) -> None:
    """Start from nothing and leave nothing half done: the whole build takes a minute or two."""
    from neuclip.datasets.icons.build import build

    shutil.rmtree(folder, ignore_errors=True)
    try:
        build(folder, processes=min(MOST_PROCESSES, available_cores()))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


ICONS = DataSet(
    name="icons-30k",
    about="30,110 icons and emoji with their names",
    needs="pip install 'neuclip[demo]'",
    licence="by source, see ATTRIBUTION.md",
    parts=("train", "new-drawings", "new-concepts", "zero-shot/groups", "zero-shot/subgroups", "zero-shot/names"),
    packages=(),
    version=version,
    build=build_clean,
    minutes=3,
)
