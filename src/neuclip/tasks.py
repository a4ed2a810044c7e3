"""DataComp's 38 evaluation tasks (names, metrics, data), and the averages over groups of them.

Imports no torch and reads no file except the table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from neuclip.errors import UserError, nearest
from neuclip.files import cache_folder

Kind = Literal["classification", "retrieval", "puzzles"]

GROUPS = {
    "datacomp": "Datacomp Average",
    "imagenet": "ImageNet & Variants",
    "retrieval": "Retrieval",
    "imagenet_shifts": "ImageNet distribution shifts",
    "vtab": "VTAB",
    "datacomp_retrieval": "Retrieval with WinoGAViL (DataComp)",
    "wilds": "WILDS",
    "fairness": "Fairness",
}
REPORTED = ("datacomp", "imagenet", "retrieval", "imagenet_shifts", "vtab", "datacomp_retrieval")
DEFAULT_PROMPTS = "default"  # in a line of results, in place of the hash of the task's own templates
WHOLE = 0.99  # share of a task's items that must be evaluated: a few images that do not decode change little


@dataclass(frozen=True)
class Task:
    """One row of the table. `key` and `name` are the same as in DataComp's own result files."""

    key: str  # vtab/dtd
    name: str  # Describable Textures
    kind: Kind
    metric: str  # the main metric, which averages are computed from
    size: int  # number of images; for WinoGAViL number of puzzles
    classes: int | None  # only for classification
    groups: tuple[str, ...]  # keys of GROUPS
    folder: str  # name in the root folder of all sets
    copies: tuple[str, ...]  # data sets of the Hugging Face hub in the local layout; the one DataComp uses comes first
    metadata: tuple[str, ...]  # columns of the `npy` members; a set may have one more at the end

    @property
    def folders(self) -> tuple[str, ...]:
        """Accepted names of the task's folder: the usual one, and the names of clones of the hub's copies."""
        clones = [copy.rpartition("/")[2] for copy in self.copies]
        return tuple(dict.fromkeys([self.folder, *clones, self.folder.removesuffix("_test")]))

    def is_whole(self, items: float) -> bool:
        """Whether this number of items is nearly the task's own. Otherwise results are not comparable with others'."""
        return WHOLE * self.size <= items <= self.size / WHOLE

    def find_folder(self, root: Path) -> Path | None:
        """The task's folder in the root folder of all sets; None if it is missing."""
        return next((root / name for name in self.folders if (root / name).is_dir()), None)


@cache
def tasks() -> tuple[Task, ...]:
    """All 38 tasks, in the order of DataComp's list."""
    table = resources.files("neuclip").joinpath("tasks.json").read_text(encoding="utf-8")
    return tuple(json.loads(table, object_hook=_task))


def _task(row: dict[str, Any]) -> Task:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Task(**fields)


def find_task(name: str) -> Task:
    """The task with this key, name or folder, ignoring case. Raises UserError that proposes the nearest one.

    >>> find_task("imagenet-a").metric, find_task("wds_vtab-dtd_test").name
    ('acc1', 'Describable Textures')
    """
    known = {word.lower(): task for task in reversed(tasks()) for word in _words(task)}
    if name.lower() not in known:
        near = nearest(name.lower(), [*GROUPS, *known])
        raise UserError(f"no task {name!r}; {f'did you mean {near}?' if near else 'neuclip data get --list shows all'}")
    return known[name.lower()]


def choose_tasks(names: str) -> tuple[Task, ...]:
    """The tasks that a list of tasks and groups, separated by commas, names: each once, in the order of the table.

    >>> len(choose_tasks("datacomp")), [task.name for task in choose_tasks("retrieval,cars")]
    (38, ['Stanford Cars', 'Flickr', 'MSCOCO'])
    """
    chosen: set[str] = set()
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name.lower() in GROUPS:
            chosen |= {task.key for task in tasks() if name.lower() in task.groups}
        else:
            chosen.add(find_task(name).key)
    return tuple(task for task in tasks() if task.key in chosen)


def default_root() -> Path:
    """The root folder of evaluation sets if the user gives none."""
    return cache_folder() / "evaluation-sets"


def _words(task: Task) -> tuple[str, ...]:
    """The words by which a user may name a task. The last part of its key is enough: `dtd` for `vtab/dtd`."""
    return (task.key, task.key.rpartition("/")[2], task.name, *task.folders)


@dataclass(frozen=True)
class Average:
    """The average of one group. `value` is None while tasks of the group are missing; `lacking` says which and why."""

    group: str
    name: str
    value: float | None
    chance: float | None
    measured: int
    members: int
    lacking: tuple[str, ...]


def averages(lines: Iterable[Mapping[str, Any]]) -> list[Average]:
    """The averages of all reported groups of which a task was evaluated, from the main metrics in `lines` of results.

    >>> [average] = averages([{"key": "cifar10", "metrics": {"main_metric": 0.9}}])
    >>> average.name, average.value, average.measured, average.lacking[0]
    ('Datacomp Average', None, 1, 'Caltech-101: not measured')
    """
    by_key = {line["key"]: line for line in lines}
    groups = {group: [task for task in tasks() if group in task.groups] for group in REPORTED}
    return [
        _average(group, members, by_key)
        for group, members in groups.items()
        if any(task.key in by_key for task in members)
    ]


def _average(group: str, members: list[Task], by_key: Mapping[str, Mapping[str, Any]]) -> Average:
    lacking = {task.name: why for task in members if (why := _why_not_averaged(task, by_key.get(task.key)))}
    lines = [by_key[task.key] for task in members if task.key in by_key]
    values = [line["metrics"].get("main_metric") for line in lines]
    chances = [line.get("meta", {}).get("chance") for line in lines]
    return Average(
        group,
        GROUPS[group],
        None if lacking else sum(values) / len(values),
        None if lacking or None in chances else sum(chances) / len(chances),
        len(lines),
        len(members),
        tuple(f"{name}: {why}" for name, why in lacking.items()),
    )


def _why_not_averaged(task: Task, line: Mapping[str, Any] | None) -> str:
    """The reason why a task cannot be averaged, or '' if it can."""
    if line is None:
        return "not measured"
    if line["metrics"].get("main_metric") is None:
        return f"has no {task.metric}"
    meta = line.get("meta", {})
    items, classes = meta.get("items", task.size), meta.get("classes", task.classes)
    if not task.is_whole(items):
        return f"measured on {items:,} of {task.size:,}"
    if classes != task.classes:
        return f"measured with {classes:,} class names, it has {task.classes:,}"
    return "measured with default prompts" if meta.get("templates") == DEFAULT_PROMPTS else ""
