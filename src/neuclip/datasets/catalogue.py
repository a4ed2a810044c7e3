"""The data sets that have a name: what `neuclip data list` shows and `neuclip data prepare` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from neuclip.datasets.fetching import Package


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """How a set is called, what it holds, and how it is made.

    `build` is given a folder of its own, and after a kill the same folder again: it goes on there, or starts clean.
    """

    name: str
    about: str  # one line: what, how many pairs
    needs: str  # "npm, 104 MB"
    licence: str
    parts: tuple[str, ...]  # folders of the built set; the first is what the bare name means
    packages: tuple[Package, ...]  # none: made from what is installed, without being asked
    version: Callable[[], str]  # changes whenever the built files would
    build: Callable[[Path], None]
    minutes: int = 1  # of a build on two cores, for the message

    @property
    def time_needed(self) -> str:
        return f"about {self.minutes} minute{'' if self.minutes == 1 else 's'}"


@cache
def catalogue() -> dict[str, DataSet]:
    """All sets by name, in the order of the list."""
    from neuclip.datasets.iconify.spec import SET as ICONIFY
    from neuclip.datasets.icons.spec import ICONS
    from neuclip.datasets.labelled.spec import SETS as LABELLED

    return {data_set.name: data_set for data_set in (ICONS, ICONIFY, *LABELLED)}
