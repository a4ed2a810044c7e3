"""Compares runs: groups them by settings, checks that they were measured alike, and takes paired differences over
seeds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from neuclip import files
from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.report.contents import RunContents, as_mapping, finite, read_contents
from neuclip.report.measures import CALIBRATION, NORMALIZER_ERROR, SPEED, Measure, chance, datasets, find_measures, size
from neuclip.tasks import GROUPS, Average, averages, tasks

RUN_SPECIFIC = ("run.seed", "run.name", "run.folder")  # runs that differ only in these settings form one group
GENERIC_STEMS = ("tasks", "results", "eval_results")  # files of these names are called by their folder's name
SEED_AT_END = re.compile(r"([-_. ]+(seed|s))?[-_. ]*\d*$")
AVERAGES = ("datacomp", "imagenet", "retrieval")  # the averages that the paper reports
CONFIDENCE = 0.95
MOST_NAMES = 4  # listed in one sentence
TRAINING_DATA = NORMALIZER_ERROR.dataset


@dataclass(frozen=True)
class Member:
    """One run, or one file of task results."""

    name: str
    path: Path
    run: RunContents | None = None
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by key, as `averages` takes them

    @property
    def settings(self) -> dict[str, Any]:
        """The settings without seed, name and folder; empty for a file of results."""
        known = self.run.settings if self.run else {}
        return {name: value for name, value in known.items() if name not in RUN_SPECIFIC}

    @property
    def seed(self) -> int | None:
        return self.run.settings.get("run.seed") if self.run else None

    @property
    def finished(self) -> bool:
        return self.run is None or self.run.finished

    @cached_property
    def figures(self) -> dict[Measure, float]:
        """All final figures: of the last evaluation, the tasks, calibration and speed."""
        of_tasks = {measure: value for measure, (value, _) in self.task_figures.items()}
        if self.run is None:
            return of_tasks
        rest = {CALIBRATION: self.run.calibration, SPEED: self.run.number("samples_per_second")}
        known = {measure: value for measure, value in rest.items() if value is not None}
        return find_measures(self.run.final) | known | of_tasks

    @cached_property
    def averages(self) -> list[Average]:
        return [average for average in averages(self.tasks.values()) if average.group in AVERAGES]

    @cached_property
    def task_figures(self) -> dict[Measure, tuple[float, float | None]]:
        """The value and the chance level of the complete averages, then of the tasks."""
        of_groups = {
            Measure(one.name, "average", f"mean of {one.members} tasks"): (one.value, one.chance)
            for one in self.averages
            if one.value is not None
        }
        return of_groups | {
            task_measure(key): (line["metrics"]["main_metric"], line["meta"].get("chance"))
            for key, line in self.tasks.items()
        }

    def chance(self, measure: Measure) -> float | None:
        """The chance level; None if it is unknown."""
        if measure in self.task_figures:
            return self.task_figures[measure][1]
        return chance(measure, self.run.final) if self.run else None

    @property
    def conditions(self) -> dict[str, str]:
        """The data or eps that each data set, task or measure was measured with. Figures are compared only if all
        members agree."""
        facts = {
            task_measure(key).dataset: f"data {line['meta']['data'][:8]}"
            for key, line in self.tasks.items()
            if "data" in line["meta"]
        }
        if self.run:
            final, setting = self.run.final, self.run.settings.get
            facts |= {name: size(name, final) for name in datasets(final, ".*_recall_at_1|top1")}
            # A fingerprint, because the same data may have two paths. With data.hold_out the path is used: the
            # fingerprint differs, because each seed trains on another part of the data.
            sha256 = "" if setting("data.hold_out") else self.run.environment.get("data.sha256")
            facts[TRAINING_DATA] = f"fingerprint {str(sha256)[:8]}" if sha256 else str(setting("data.train", ""))
            if (eps := self.run.number("normalizer_error.eps")) is not None:
                facts[NORMALIZER_ERROR.words] = f"eps {eps:g}"
        return {name: fact for name, fact in facts.items() if fact}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, sorted by seed."""

    name: str
    members: Sequence[Member]

    @property
    def counted(self) -> Sequence[Member]:
        """The members in means and curves: the finished runs, or all runs if none has finished."""
        return [member for member in self.members if member.finished] or self.members

    @property
    def runs(self) -> list[RunContents]:
        return [member.run for member in self.counted if member.run]

    def values(self, measure: Measure) -> list[float]:
        return [member.figures[measure] for member in self.counted if measure in member.figures]

    def by_seed(self, measure: Measure) -> dict[int | None, float]:
        """The values by seed. A seed that two runs have is left out, because neither is the partner of another group's
        run."""
        seeds = [member.seed for member in self.counted]
        return {
            one.seed: one.figures[measure]
            for one in self.counted
            if measure in one.figures and seeds.count(one.seed) == 1
        }


class Difference(NamedTuple):
    """The mean of paired differences and its interval."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """Groups of runs. Differences are to the first group, or to the one that `against` names. `measure`
    (DATASET.METRIC) is the measure that was chosen before training: then only this figure gets a verdict."""

    groups: Sequence[Group]
    against: str = ""
    measure: str = ""

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if self.against and self.against not in names:
            raise UserError(f"no group {self.against!r} to compare with; the groups are {', '.join(names)}")
        keys = [measure.key for measure in self.measures]
        if self.measure and self.measure not in keys:
            raise UserError(f"no figure {self.measure!r}; the figures are {', '.join(keys)}")

    @property
    def baseline(self) -> Group:
        return next((group for group in self.groups if group.name == self.against), self.groups[0])

    @property
    def title(self) -> str:
        return some_names([group.name for group in self.groups])

    @cached_property
    def measures(self) -> list[Measure]:
        """All measures: held-out sets and tasks first, then the normalizer error, then those that are not scores."""
        measures = dict.fromkeys(one for group in self.groups for member in group.counted for one in member.figures)
        return sorted(measures, key=lambda one: (one.better == 0, one == NORMALIZER_ERROR))

    @cached_property
    def different(self) -> dict[str, dict[str, list[str]]]:
        """The conditions in which members disagree: for each value the names of the members that have it."""
        conditions: dict[str, dict[str, list[str]]] = {}
        for member in (member for group in self.groups for member in group.members):
            for what, value in member.conditions.items():
                conditions.setdefault(what, {}).setdefault(value, []).append(member.name)
        return {what: by_value for what, by_value in conditions.items() if len(by_value) > 1}

    def is_comparable(self, measure: Measure) -> bool:
        """Whether all members measured it in the same way; for an average, all of its tasks."""
        members = [task.name for task in tasks() if measure.dataset in map(GROUPS.get, task.groups)]
        return not any(name in self.different for name in (measure.dataset, measure.words, *members))

    def difference(self, group: Group, measure: Measure) -> Difference | None:
        """The difference to the baseline: paired over the seeds that both have, with a Student's t interval that is
        corrected for the number of groups (Bonferroni). None with fewer than two such seeds, or if the measure cannot
        be compared."""
        ours, theirs = group.by_seed(measure), self.baseline.by_seed(measure)
        gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        if group is self.baseline or len(gaps) < 2 or not measure.better or not self.is_comparable(measure):
            return None
        level = 1 - (1 - CONFIDENCE) / (len(self.groups) - 1)
        half = t_quantile((1 + level) / 2, len(gaps) - 1) * stdev(gaps) / math.sqrt(len(gaps))
        return Difference(mean(gaps), mean(gaps) - half, mean(gaps) + half, len(gaps))

    def gets_verdict(self, measure: Measure) -> bool:
        return not self.measure or measure.key == self.measure

    def notices(self) -> Iterator[str]:
        """Warnings that a reader should see before the figures, the most important first."""
        different = dict(self.different)
        if data := different.pop(TRAINING_DATA, None):
            yield (
                "The runs were trained on different data, which may explain every difference below "
                f"({who_has_what(data)})."
            )
        by_members: dict[str, list[str]] = {}  # one sentence for all tasks that differ between the same members
        for what, by_value in different.items():
            by_members.setdefault(" / ".join(map(some_names, by_value.values())), []).append(what)
        for who, names in by_members.items():
            verb, who = ("was", who_has_what(different[names[0]])) if len(names) == 1 else ("were", who)
            yield (
                f"{some_names(names)} {verb} not measured in the same way in all runs ({who}): these figures cannot be "
                "compared."
            )
        for group in self.groups:
            yield from group_notices(group)


def some_names(names: Sequence[str]) -> str:
    """'a, b, c, d and 3 more'"""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def who_has_what(by_value: Mapping[str, Sequence[str]]) -> str:
    """'eps 1e-09 in a-1; eps 1e-06 in a-2, b-1'"""
    return "; ".join(f"{value} in {some_names(names)}" for value, names in by_value.items())


def group_notices(group: Group) -> Iterator[str]:
    """Warnings about unfinished runs, incomplete averages and repeated seeds."""
    for member in group.members:
        if not member.finished and member.run:
            left_out = ", and it is left out of means and curves" if member not in group.counted else ""
            seen, planned = member.run.samples_seen, member.run.samples_planned
            yield f"{member.name} has not finished: {seen:,.0f} of {planned:,.0f} samples seen{left_out}."
        for average in member.averages:
            if average.lacking:
                complete = average.members - len(average.lacking)
                yield f"{average.name} needs all {average.members} tasks in full: {member.name} has {complete}."
    seeds = [member.seed for member in group.members if member.run]
    if repeated := sorted({str(seed) for seed in seeds if seeds.count(seed) > 1}):
        yield (
            f"{group.name} has seed {', '.join(repeated)} more than once: its standard deviation is not that over "
            "different seeds."
        )


def t_quantile(probability: float, freedom: int) -> float:
    """A quantile of Student's t, by bisection of its distribution function (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(t_quantile(0.975, 2), 3), round(t_quantile(0.975, 7), 3)
    (4.303, 2.365)
    """

    def below(t: float) -> float:
        angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
        term = total = (math.cos(angle) if freedom > 1 else 0.0) if odd else 1.0
        for power in range(2 + odd, freedom - 1, 2):
            term *= math.cos(angle) ** 2 * (power - 1) / power
            total += term
        part = math.sin(angle) * total
        return 0.5 + ((angle + part) / math.pi if odd else part / 2)

    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return low


# Reading runs and results


def compare(paths: Sequence[Path], *, against: str = "", measure: str = "") -> Comparison:
    """Read runs and files of task results; runs that differ only in their seed become one group.

    >>> compare([Path("runs/clip"), Path("runs/neuclip")]).title  # doctest: +SKIP
    'clip, neuclip'
    """
    resolved = [path.resolve() for path in paths]
    for path, real_path in zip(paths, resolved, strict=True):
        if resolved.count(real_path) > 1:
            raise UserError(f"{path} is given twice; give each run once")
    return Comparison(group_members([read_member(path) for path in paths]), against, measure)


def read_member(path: Path) -> Member:
    """Read a run's folder, or a file with one task result per line. Raises UserError for anything else."""
    if path.is_file():
        name = path.resolve().parent.name if path.stem in GENERIC_STEMS else path.stem
        return Member(name, path, tasks=read_tasks(path))
    run = read_contents(RunFolder(path))
    return Member(run.name, path, run, read_tasks(run.folder.tasks) if run.folder.tasks.is_file() else {})


def read_tasks(path: Path) -> dict[str, dict[str, Any]]:
    """The task results in a file, by key of the task, in DataComp's order. If a task is in the file twice, the later
    result counts. DataComp's own files are accepted, although their fairness tasks have no main metric."""
    remedy = "give the folder of a run, or a file that `neuclip eval --tasks` wrote"
    with files.reading(path, remedy):
        lines = files.read_regular(path).decode().splitlines()
    results: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            result = task_result(json.loads(line))
        except (ValueError, RecursionError, KeyError):
            if number == len(lines) and results:
                continue  # the process was killed while it wrote this line
            shape = '{"key": ..., "metrics": {"main_metric": ...}}'
            raise UserError(f"{path} line {number} is not a task result ({shape}); {remedy}") from None
        if result["metrics"]:
            results[result["key"]] = result
    if not results:
        raise UserError(f"{path} contains no task result; {remedy}")
    order = [task.key for task in tasks()]
    return dict(sorted(results.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def task_result(line: Any) -> dict[str, Any]:
    """The parts of a result that a comparison needs; `metrics` is empty if the main metric is null. Raises ValueError
    or KeyError for anything but a task result."""
    main, meta = as_mapping(as_mapping(line)["metrics"])["main_metric"], as_mapping(line.get("meta", {}))
    texts = {name: str(meta[name]) for name in ("data", "templates") if name in meta}
    return {"key": str(line["key"]), "metrics": finite({"main_metric": main}), "meta": finite(meta) | texts}


def task_measure(key: str) -> Measure:
    """The main metric of a task, under DataComp's name for the task. An unknown task is called by its key."""
    name, metric = next(((one.name, one.metric) for one in tasks() if one.key == key), (key, "main_metric"))
    return Measure(name, metric, metric.replace("_", " "))


def group_members(members: Sequence[Member]) -> list[Group]:
    """Group the members by their settings, in the order of the first member of each group."""
    names = [member.name for member in members]
    by_settings: dict[str, list[Member]] = {}
    for member in members:
        if names.count(member.name) > 1:  # in different folders
            member = replace(member, name=str(member.path))
        key = json.dumps(member.settings, sort_keys=True) if member.settings else str(member.path)
        by_settings.setdefault(key, []).append(member)
    groups = [sorted(alike, key=lambda one: (one.seed or 0, one.name)) for alike in by_settings.values()]
    titles = [group_name(group) for group in groups]
    return [
        Group(group[0].name if titles.count(title) > 1 else title, group)
        for title, group in zip(titles, groups, strict=True)
    ]


def group_name(members: Sequence[Member]) -> str:
    """The common part of the names: 'clip' for clip-1 and clip-2, or for clip-seed1 and clip-seed2."""
    if len(members) == 1:
        return members[0].name
    names = [member.run.name if member.run else member.name for member in members]
    columns = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = SEED_AT_END.sub("", "".join(letters[0] for letters in columns))
    return shared or f"{members[0].name} and {len(members) - 1} more"
