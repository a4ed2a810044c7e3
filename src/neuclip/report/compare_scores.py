"""The figures of a comparison: final ones with their spread over seeds, and the samples needed to reach them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

from neuclip.report.compare_inputs import Group, Member, TaskResult, held_out_sets
from neuclip.report.compare_notices import different_eps, different_held_out, different_tasks
from neuclip.report.contents import number
from neuclip.report.evaluations import Evaluation
from neuclip.report.plotting import Point, mean_curve
from neuclip.tasks import GROUPS, Task, tasks

DIRECTION_WORDS = {
    "image_to_text": "image to text recall@{}",
    "text_to_image": "text to image recall@{}",
    "image_to_different_text": "image to text recall@{} over different captions",
    "different_text_to_image": "text to image recall@{} over different captions",
}
RECALL = re.compile(rf"({'|'.join(DIRECTION_WORDS)})_recall_at_(\d{{1,9}})")
ZERO_SHOT_WORDS = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "mean_per_class": "accuracy, mean per class"}
AVERAGES = ("datacomp", "imagenet", "retrieval")  # those of the paper
ERROR = "normalizer_error"
FEWEST_RUNS = 3  # of a group to be compared: of equal methods with two runs each, one in five is "best" by chance


@dataclass(frozen=True)
class Measure:
    """Something that was measured: `dataset` and `metric` as in the files, `words` for readers."""

    dataset: str
    metric: str
    words: str
    in_percent: bool = True
    better: Literal["higher", "lower", ""] = "higher"
    main: bool = True  # shown on the terminal and in LaTeX
    of_task: bool = False  # from a file of task results


NORMALIZER_ERROR = Measure("training data", ERROR, "normalizer error", in_percent=False, better="lower")
CALIBRATION = Measure("training data", "calibration", "calibration", in_percent=False, better="", main=False)
SPEED = Measure("training", "samples_per_second", "samples per second", in_percent=False, better="", main=False)


@dataclass(frozen=True)
class Spread:
    """The values of one group, one per counted run that has the figure."""

    values: list[float]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def deviation(self) -> float | None:
        """Of a sample (n - 1); None of a single value."""
        return stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Score:
    """One measure of all groups: None where it was not measured. `best` is the index of a group, or None."""

    measure: Measure
    chance: float | None
    spreads: list[Spread | None]
    best: int | None


@dataclass(frozen=True)
class Reach:
    """When a group reached a score: at its first evaluation at or above it, None if never."""

    samples: float | None
    share: float | None  # of its budget
    at_first: bool  # it may have been there earlier
    evaluations: int


@dataclass(frozen=True)
class Target:
    """The final score of one group, and what each group, itself included, needed to reach it."""

    measure: Measure
    group: Group
    score: float
    reached: list[Reach | None]


def evaluation_figures(evaluation: Evaluation) -> dict[Measure, float]:
    """Recall of each retrieval set and accuracy of each zero-shot task."""
    figures: dict[Measure, float] = {}
    for one in evaluation.retrieval:
        for metric, value in one.metrics.items():
            if (match := RECALL.fullmatch(metric)) and value is not None:
                words = DIRECTION_WORDS[match[1]].format(match[2])
                figures[Measure(one.name, metric, words, main=match[2] == "1")] = value
    for one in evaluation.zero_shot:
        for metric, words in ZERO_SHOT_WORDS.items():
            if (value := one[metric]) is not None:
                figures[Measure(one.name, metric, words, main=metric == "top1")] = value
    return figures


def chance_of(measure: Measure, member: Member) -> float | None:
    """What guessing gives; None where it is not known."""
    if measure.of_task:
        # An average is there only where all its tasks are.
        ours = [task for task in tasks() if task.name == measure.dataset or measure.dataset in group_names(task)]
        chances = [chance for task in ours if (chance := task_chance(task, member)) is not None]
        return mean(chances) if chances and len(chances) == len(ours) else None
    metric = measure.metric.replace("_recall_", "_chance_") if "_recall_" in measure.metric else "chance"
    known = measure.in_percent and measure.metric != "top5"
    return next((one[metric] for one in held_out_sets(member) if known and one.name == measure.dataset), None)


def group_names(task: Task) -> list[str]:
    return [GROUPS[group] for group in task.groups]


def task_chance(task: Task, member: Member) -> float | None:
    """As it was computed with the result; files of other programs have none."""
    result = member.tasks.get(task.key)
    return number(result.meta.get("chance")) if result else None


def final_figures(member: Member) -> dict[Measure, float]:
    """Everything that was measured at the end of a run, or stands in a file of results."""
    figures = evaluation_figures(member.evaluations[-1]) if member.evaluations else {}
    if run := member.contents:
        speed = number(run.summary.get("samples_per_second"))
        errors = error_points(member)
        rest = {NORMALIZER_ERROR: errors[-1][1] if errors else None, CALIBRATION: run.calibration, SPEED: speed}
        figures |= {measure: value for measure, value in rest.items() if value is not None}
    return figures | task_figures(member.tasks)


def error_points(member: Member) -> list[Point]:
    """The error of the method's log-normalizers over samples; none of a method that has no normalizer (SigLIP)."""
    if member.contents is None:
        return []
    last, _ = member.contents.normalizer_errors
    measured = [(evaluation.samples, evaluation.others.get(f"{ERROR}.method")) for evaluation in member.evaluations]
    points = {samples: value for samples, value in measured if samples is not None and value is not None}
    if last is not None:
        points[member.contents.samples_seen] = last
    return sorted(points.items())


def task_figures(results: Mapping[str, TaskResult]) -> dict[Measure, float]:
    """The averages that are complete, then the tasks in DataComp's order, then tasks that it does not have."""
    figures = {}
    for group in AVERAGES:
        members = [task for task in tasks() if group in task.groups]
        if all(is_whole(task, results) for task in members):
            average = Measure(GROUPS[group], "average", f"mean of {len(members)} tasks", of_task=True)
            figures[average] = mean(results[task.key].value for task in members)
    known = {task.key: task for task in tasks()}
    for key in sorted(results, key=lambda key: [*known].index(key) if key in known else len(known)):
        task = known.get(key)
        metric = task.metric if task else "main_metric"
        measure = Measure(task.name if task else key, metric, metric.replace("_", " "), of_task=True)
        figures[measure] = results[key].value
    return figures


def is_whole(task: Task, results: Mapping[str, TaskResult]) -> bool:
    """Whether the task was measured, and on all of its images as far as the result says."""
    return task.key in results and task.is_whole(number(results[task.key].meta.get("items", task.size)) or 0)


def incomplete_averages(groups: Sequence[Group]) -> list[str]:
    """'Datacomp Average needs all 38 tasks: A has 31.', for each average that some member has tasks of."""
    sentences = []
    for name in AVERAGES:
        ours = [task for task in tasks() if name in task.groups]
        members = [member for group in groups for member in group.counted]
        counts = {member.name: sum(is_whole(task, member.tasks) for task in ours) for member in members}
        found = [f"{member} has {count}" for member, count in counts.items() if 0 < count < len(ours)]
        if found:
            sentences.append(f"{GROUPS[name]} needs all {len(ours)} tasks in full: {', '.join(found)}.")
    return sentences


def final_scores(groups: Sequence[Group]) -> list[Score]:
    """Every measure that any group has, held-out sets first."""
    figures = [[final_figures(member) for member in group.counted] for group in groups]
    measures = dict.fromkeys(measure for ours in figures for member in ours for measure in member)
    incomparable = incomparable_data(groups)
    scores = []
    for measure in sorted(measures, key=measure_order):
        values = [[member[measure] for member in ours if measure in member] for ours in figures]
        spreads = [Spread(ours) if ours else None for ours in values]
        comparable = measure.dataset not in incomparable
        chances = [chance_of(measure, member) for group in groups for member in group.counted]
        chance = next((one for one in chances if one is not None and comparable), None)
        best = best_group(spreads, measure.better) if comparable else None
        scores.append(Score(measure, chance, spreads, best))
    return scores


def incomparable_data(groups: Sequence[Group]) -> set[str]:
    """The `dataset` of measures that were not measured in the same way everywhere, and averages over such tasks."""
    keys = different_tasks(groups)
    affected = [task for task in tasks() if task.key in keys]
    averages = {name for task in affected for name in group_names(task)}
    errors = {NORMALIZER_ERROR.dataset} if different_eps(groups) else set()
    return {*different_held_out(groups), *keys, *(task.name for task in affected), *averages, *errors}


def measure_order(measure: Measure) -> int:
    """Held-out figures, the normalizer error, what is no score, tasks; the order in which they came otherwise."""
    return 3 if measure.of_task else 2 if not measure.better else 1 if measure.metric == ERROR else 0


def best_group(spreads: Sequence[Spread | None], better: str) -> int | None:
    """The group whose mean is better than every other's by more than both standard deviations together; None if there
    is none, or if any group has fewer than FEWEST_RUNS runs."""
    measured = [(index, spread) for index, spread in enumerate(spreads) if spread is not None]
    if len(measured) < 2 or not better or any(len(spread.values) < FEWEST_RUNS for _, spread in measured):
        return None
    sign = 1 if better == "higher" else -1
    index, leader = max(measured, key=lambda one: sign * one[1].mean)
    for _, other in ((place, spread) for place, spread in measured if place != index):
        if not sign * (leader.mean - other.mean) > stdev(leader.values) + stdev(other.values):
            return None
    return index


def score_points(measure: Measure, member: Member) -> list[Point]:
    """A measure over samples seen."""
    return [
        (evaluation.samples, figures[measure])
        for evaluation in member.evaluations
        if evaluation.samples is not None and measure in (figures := evaluation_figures(evaluation))
    ]


def curve_measures(groups: Sequence[Group]) -> list[Measure]:
    """Recall@1 from image to text on each set; top-1 accuracy where there is no retrieval."""
    members = [member for group in groups for member in group.members]
    measures = dict.fromkeys(
        measure for member in members for evaluation in member.evaluations for measure in evaluation_figures(evaluation)
    )
    recalls = [measure for measure in measures if measure.metric == "image_to_text_recall_at_1"]
    return recalls or [measure for measure in measures if measure.metric == "top1"]


def all_targets(groups: Sequence[Group]) -> list[Target]:
    """For each measure of the curves: what every group needed to reach the final mean of each. Nothing of one group."""
    targets = []
    for measure in curve_measures(groups):
        curves = [mean_curve([score_points(measure, member) for member in group.counted]) for group in groups]
        if sum(map(bool, curves)) < 2 or measure.dataset in different_held_out(groups):
            continue
        for group, curve in zip(groups, curves, strict=True):
            if curve:
                score = curve[-1][1]
                reached = [reach(ours, other, score) for other, ours in zip(groups, curves, strict=True)]
                targets.append(Target(measure, group, score, reached))
    return targets


def reach(curve: Sequence[Point], group: Group, score: float) -> Reach | None:
    """The first evaluation at or above the score: nothing is interpolated. None where there is no evaluation."""
    if not curve:
        return None
    samples = next((samples for samples, value in curve if value >= score), None)
    budget = max((member.budget or 0.0 for member in group.counted), default=0.0)
    share = samples / budget if samples is not None and budget else None
    return Reach(samples, share, samples == curve[0][0], len(curve))


def rare_evaluations(targets: Iterable[Target], groups: Sequence[Group], fewest: int = 5) -> list[str]:
    """Groups whose answer is coarse."""
    by_count: dict[int, dict[str, None]] = {}
    for target in targets:
        for group, reached in zip(groups, target.reached, strict=True):
            if reached and reached.evaluations < fewest:
                by_count.setdefault(reached.evaluations, {})[group.label] = None
    return [
        f"Evaluated only {'once' if count == 1 else f'{count} times'}: {', '.join(labels)}. A smaller evaluation.every "
        "gives a finer answer."
        for count, labels in by_count.items()
    ]
