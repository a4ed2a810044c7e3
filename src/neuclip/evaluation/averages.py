"""Averages over groups of DataComp's tasks, from lines of results. An average has a value only when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neuclip.evaluation.metrics import mean
from neuclip.evaluation.tasks import BLANK, WITHOUT_OTHER, WORST_REGION
from neuclip.tasks import GROUPS, Task, tasks

Metrics = Mapping[str, float | None]

DEFAULT_PROMPTS = "default"  # instead of the hash of a task's own templates
REPORTED = ("datacomp", "imagenet", "retrieval", "imagenet_shifts", "vtab", "datacomp_retrieval")


FMOW, CLEVR = "wilds/fmow", "vtab/clevr_closest_object_distance"


def _instead(others: Mapping[str, str]) -> Callable[[Task, Metrics], float | None]:
    """The main metric of every task but these, which have another."""
    return lambda task, metrics: metrics.get(others.get(task.key, "main_metric"))


def _acc1(task: Task, metrics: Metrics) -> float | None:
    return metrics.get("acc1" if task.kind == "classification" else "main_metric")


# The same average with what a reader may take for it, or would rather have.
VARIANTS: dict[str, Callable[[Task, Metrics], float | None]] = {
    "acc1 for every classification task": _acc1,
    "FMoW without the region Other": _instead({FMOW: WITHOUT_OTHER}),
    "FMoW over all regions": _instead({FMOW: "acc1"}),
    "CLEVR Distance with its empty class name": _instead({CLEVR: f"{BLANK}keep"}),
    "as --compat datacomp counts": _instead({FMOW: WORST_REGION, CLEVR: f"{BLANK}drop"}),
    "as --compat correct counts": _instead({FMOW: WITHOUT_OTHER, CLEVR: f"{BLANK}keep"}),
}


@dataclass(frozen=True)
class Average:
    """`value` is None while tasks of the group are missing; `lacking` says which, and why."""

    group: str
    name: str
    value: float | None
    chance: float | None
    measured: int
    members: int
    lacking: tuple[str, ...]


def averages(lines: Iterable[Mapping[str, Any]]) -> list[Average]:
    """Of all reported groups from which a task was measured; the Datacomp Average also in variants that differ."""
    by_key = {line["key"]: line for line in lines}
    found = []
    for group in REPORTED:
        members = [task for task in tasks() if group in task.groups]
        if any(task.key in by_key for task in members):
            found.append(_average(group, GROUPS[group], members, by_key, lambda _, metrics: metrics.get("main_metric")))
            if group == "datacomp" and found[-1].value is not None:
                variants = [_average(group, name, members, by_key, choose) for name, choose in VARIANTS.items()]
                found += [variant for variant in variants if variant.value not in (None, found[-1].value)]
    return found


def _average(
    group: str,
    name: str,
    members: list[Task],
    by_key: Mapping[str, Mapping[str, Any]],
    choose: Callable[[Task, Metrics], float | None],
) -> Average:
    lacking = {task.name: why for task in members if (why := _what_lacks(task, by_key.get(task.key)))}
    lines = [by_key[task.key] for task in members if task.key in by_key]
    values = [choose(task, by_key[task.key]["metrics"]) for task in members if task.key in by_key]
    chances = [line.get("meta", {}).get("chance") for line in lines]
    return Average(
        group,
        name,
        None if lacking or None in values else mean(values),  # type: ignore[arg-type]
        None if lacking or None in chances else mean(chances),
        len(lines),
        len(members),
        tuple(f"{name}: {why}" for name, why in lacking.items()),
    )


def _what_lacks(task: Task, line: Mapping[str, Any] | None) -> str:
    """Why a task cannot be averaged; "" if it can."""
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
