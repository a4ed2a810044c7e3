"""What is compared: runs and files of task results, and the groups of runs that differ in nothing but their seed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.report.contents import RunContents, as_dict, number, read_contents
from neuclip.report.evaluations import Evaluation, HeldOutSet, all_evaluations
from neuclip.report.tables import flatten

OF_ONE_RUN = ("run.seed", "run.name", "run.folder")  # runs that differ in nothing else are one group
SAYS_NOTHING = ("tasks", "results", "eval_results")  # names of files: then the folder's name is better
SEED_AT_END = re.compile(r"([-_. ]+(seed|s))?[-_. ]*\d*$")


@dataclass(frozen=True)
class TaskResult:
    """The main metric of one task. DataComp's own files say nothing about how it was measured: `meta` is empty."""

    value: float
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """One run, or one file of task results."""

    name: str
    path: Path
    contents: RunContents | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    tasks: dict[str, TaskResult] = field(default_factory=dict)  # by key
    notices: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, str]:
        """By dotted name, as text, without those that belong to one run; empty for a file of results."""
        values = dict(flatten(self.contents.settings)) if self.contents else {}
        return {name: value for name, value in values.items() if name not in OF_ONE_RUN}

    @property
    def seed(self) -> str:
        seed = self.contents.setting("run", "seed") if self.contents else None
        return "" if seed is None else str(seed)

    @property
    def finished(self) -> bool:
        return self.contents is None or self.contents.finished

    @property
    def budget(self) -> float | None:
        return (self.contents.samples_planned or self.contents.samples_seen) if self.contents else None


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, ordered by it. The letter marks its curves and columns."""

    letter: str
    name: str
    members: list[Member]

    @property
    def label(self) -> str:
        return f"{self.letter} {self.name}"

    @property
    def counted(self) -> list[Member]:
        """Whose final figures enter the mean: the finished runs, or all where none has finished."""
        return [member for member in self.members if member.finished] or self.members

    @property
    def runs(self) -> list[RunContents]:
        return [member.contents for member in self.members if member.contents]


def read_member(path: Path) -> Member:
    """A run's folder, or a file with a task result per line; UserError if it is neither."""
    if path.is_file():
        name = path.resolve().parent.name if path.stem in SAYS_NOTHING else path.stem
        return Member(name, path, tasks=read_task_results(path))
    contents = read_contents(RunFolder(path))
    notices = [f"{file} could not be read; its figures are missing" for file in contents.unreadable]
    tasks: dict[str, TaskResult] = {}
    if RunFolder(path).tasks.is_file():
        try:
            tasks = read_task_results(RunFolder(path).tasks)
        except UserError as error:
            notices.append(str(error))
    return Member(contents.name, path, contents, all_evaluations(contents), tasks, notices)


def read_task_results(path: Path) -> dict[str, TaskResult]:
    """By the key of the task; of a task that is there twice, the later one. DataComp's own files, whose fairness tasks
    have no main metric, are read as well."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; give a file that `neuclip eval --tasks` wrote") from None
    results: dict[str, TaskResult] = {}
    for place, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            result = json.loads(line)
            key, metric = result["key"], result["metrics"]["main_metric"]
        except (ValueError, RecursionError, KeyError, TypeError):
            if place == len(lines) and results:
                continue  # cut off by a kill
            raise UserError(
                f'{path} line {place} is not a task result ({{"key": ..., "metrics": {{"main_metric": ...}}}}); '
                "give the folder of a run, or a file that `neuclip eval --tasks` wrote"
            ) from None
        if (value := number(metric)) is not None:
            results[str(key)] = TaskResult(value, as_dict(result.get("meta")))
    if not results:
        raise UserError(f"{path} holds no task result; give a file that `neuclip eval --tasks` wrote")
    return results


def group_members(members: Iterable[Member]) -> list[Group]:
    """In the order in which the first member of each group was given."""
    by_settings: dict[str, list[Member]] = {}
    for member in with_different_names(list(members)):
        key = json.dumps(member.settings, sort_keys=True) if member.settings else str(member.path)
        by_settings.setdefault(key, []).append(member)
    groups = [sorted(ours, key=seed_order) for ours in by_settings.values()]
    names = [group_name(ours) for ours in groups]
    names = [ours[0].name if names.count(name) > 1 else name for name, ours in zip(names, groups, strict=True)]
    return [Group(letters(index), name, ours) for index, (name, ours) in enumerate(zip(names, groups, strict=True))]


def with_different_names(members: list[Member]) -> list[Member]:
    """Runs of the same name in different folders carry their path."""
    names = [member.name for member in members]
    return [replace(one, name=str(one.path)) if names.count(one.name) > 1 else one for one in members]


def seed_order(member: Member) -> tuple[float, str]:
    return (number(int(member.seed)) or 0.0) if member.seed.isdecimal() else 0.0, member.name


def group_name(members: Sequence[Member]) -> str:
    """What the names have in common: 'clip' for clip-1 and clip-2, or clip-seed1 and clip-seed2."""
    if len(members) == 1:
        return members[0].name
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*(member.name for member in members), strict=False))
    shared = SEED_AT_END.sub("", "".join(column[0] for column in columns))
    return shared or f"{members[0].name} and {len(members) - 1} more"


def letters(index: int) -> str:
    """A to Z, then AA, AB, ..."""
    rest, last = divmod(index, len(ascii_uppercase))
    return (letters(rest - 1) if rest else "") + ascii_uppercase[last]


def different_settings(groups: Sequence[Group]) -> dict[str, list[str | None]]:
    """Settings in which the groups differ, with the value of each group: None where a method has no such setting, or
    the group no settings at all. Settings that all of them have come first."""
    settings = [group.members[0].settings for group in groups]
    known = [ours for ours in settings if ours]
    names = dict.fromkeys(name for ours in known for name in ours)
    found = {
        name: [ours.get(name) for ours in settings] for name in names if len({ours.get(name) for ours in known}) > 1
    }
    return dict(sorted(found.items(), key=lambda item: any(name is None for name in item[1])))


def held_out_sets(member: Member) -> list[HeldOutSet]:
    """Those of the last evaluation."""
    return [*member.evaluations[-1].retrieval, *member.evaluations[-1].zero_shot] if member.evaluations else []
