"""What is compared: runs and files of task results, and the groups of runs that differ in nothing but their seed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from string import ascii_uppercase

from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.report.contents import RunContents, as_dict, number, read_contents
from neuclip.report.evaluations import Evaluation, HeldOutSet, all_evaluations
from neuclip.report.tables import flatten

TASKS = "tasks.jsonl"  # in the folder of a run
OF_ONE_RUN = ("run.seed", "run.name", "run.folder")  # runs that differ in nothing else are one group
SAYS_NOTHING = ("tasks", "results", "eval_results")  # names of files: then the folder's name is better
SEED_AT_END = re.compile(r"([-_. ]+(seed|s))?[-_. ]*\d*$")


@dataclass(frozen=True)
class Member:
    """One run, or one file of task results."""

    name: str
    path: Path
    contents: RunContents | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    tasks: dict[str, float] = field(default_factory=dict)  # main metric by key
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
    tasks: dict[str, float] = {}
    if (path / TASKS).is_file():
        try:
            tasks = read_task_results(path / TASKS)
        except UserError as error:
            notices.append(str(error))
    return Member(contents.name, path, contents, all_evaluations(contents), tasks, notices)


def read_task_results(path: Path) -> dict[str, float]:
    """The main metric of each task, by its key; of a task that is there twice, the later one. DataComp's own files,
    whose fairness tasks have no main metric, are read as well."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; give a file that `neuclip eval --tasks` wrote") from None
    results: dict[str, float] = {}
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
            results[str(key)] = value
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


def all_notices(groups: Sequence[Group]) -> list[str]:
    """What a reader must know before comparing: other data, other measurements, unfinished and repeated runs."""
    notices = [*data_notices(groups), *held_out_notices(groups), *eps_notices(groups)]
    for group in groups:
        for member in group.members:
            notices += [f"{member.name}: {text}." for text in member.notices]
            if not member.finished and member.contents:
                seen, planned = member.contents.samples_seen, member.contents.samples_planned
                of_planned = f" of {planned:,.0f}" if planned else ""
                left_out = ", and it is left out of the mean" if member not in group.counted else ""
                notices.append(f"{member.name} has not finished: {seen:,.0f}{of_planned} samples seen{left_out}.")
        seeds = [member.seed for member in group.members if member.seed]
        if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            notices.append(
                f"{group.name} has seed {', '.join(repeated)} more than once: its spread is not that of seeds."
            )
    return notices


def data_notices(groups: Sequence[Group]) -> list[str]:
    """By the fingerprint where it is known, as the same data may lie in two places; otherwise by the address."""
    trained = [group for group in groups if group.runs]
    for one in trained[1:]:
        if not same_data(trained[0], one):
            addresses = "; ".join(f"{group.letter}: {data_of(group)}" for group in trained)
            return [f"The runs were trained on different data, which may explain every difference below ({addresses})."]
    return []


def same_data(one: Group, other: Group) -> bool:
    hashes, others = fingerprints(one), fingerprints(other)
    return bool(hashes & others) if hashes and others else data_of(one) == data_of(other)


def fingerprints(group: Group) -> set[str]:
    """One per seed where part of the data is held out, as the seed chooses it."""
    found = (as_dict(run.environment.get("data")).get("sha256") for run in group.runs)
    return {text for text in found if isinstance(text, str)}


def data_of(group: Group) -> str:
    return group.members[0].settings.get("data.train", "unknown")


def held_out_notices(groups: Sequence[Group]) -> list[str]:
    return [
        f"{name} is not the same set in all runs ({'; '.join(sizes)}): its figures cannot be compared."
        for name, sizes in different_held_out(groups).items()
    ]


def different_held_out(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Held-out sets of one name and several sizes, which are different sets: each size, and a run that has it."""
    sizes: dict[str, dict[str, str]] = {}
    for member in (member for group in groups for member in group.members):
        for one in held_out_sets(member):
            counts = {noun: one[noun] for noun in ("images", "captions", "classes")}
            size = ", ".join(f"{count:,.0f} {noun}" for noun, count in counts.items() if count is not None)
            sizes.setdefault(one.name, {}).setdefault(size, member.name)
    return {
        name: [f"{size} in {member}" for size, member in by_size.items()]
        for name, by_size in sizes.items()
        if len(by_size) > 1
    }


def held_out_sets(member: Member) -> list[HeldOutSet]:
    """Those of the last evaluation."""
    return [*member.evaluations[-1].retrieval, *member.evaluations[-1].zero_shot] if member.evaluations else []


def eps_notices(groups: Sequence[Group]) -> list[str]:
    by_eps = different_eps(groups)
    values = ", ".join(f"{eps:g} in {letter}" for eps, letter in by_eps.items())
    sentence = (
        f"The normalizer errors were measured with different eps ({values}) and cannot be compared; "
        "`neuclip error RUN...` measures several runs with one eps."
    )
    return [sentence] if by_eps else []


def different_eps(groups: Sequence[Group]) -> dict[float, str]:
    """Each eps of the normalizer error, with the letter of a group that has it; empty if all have the same."""
    by_eps: dict[float, str] = {}
    for group in groups:
        for run in group.runs:
            if (eps := number(as_dict(run.summary.get("normalizer_error")).get("eps"))) is not None:
                by_eps.setdefault(eps, group.letter)
    return by_eps if len(by_eps) > 1 else {}
