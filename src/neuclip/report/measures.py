"""Measures: the flat keys of an evaluation, `DATASET.METRIC`, with readable names, chance levels, tables and charts.

The report, the terminal and the model card show the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from neuclip.formatting import UNKNOWN, format_count, format_number, percent, plural, times_chance
from neuclip.report.charts import Chart, Line, column, group_lines
from neuclip.report.contents import Figures, finite
from neuclip.report.page import Cell, Table

# By direction: its name for readers, the queries, and the candidates.
DIRECTIONS = {
    "image_to_text": ("image to text", "images", "captions"),
    "text_to_image": ("text to image", "captions", "images"),
    "image_to_different_text": ("image to text, different captions", "images", "different_captions"),
    "different_text_to_image": ("text to image, different captions", "different_captions", "images"),
}
RECALL = re.compile(rf"({'|'.join(DIRECTIONS)})_recall_at_(\d{{1,9}})")
ACCURACIES = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "mean_per_class": "accuracy, mean per class"}
DEFINITION = (
    "Recall@k: share of images with one of their captions among the k nearest captions, and share of captions with "
    "their image among the k nearest images"
)
DIFFERENT_DEFINITION = "different captions: equal captions count once, and every image with the caption is right"
MEAN_RECALL = "recall_at_1"  # in experiments: over different captions if captions repeat
ERROR_KEY, BATCH_ERROR_KEY = "normalizer_error.method", "normalizer_error.minibatch"  # in evaluation.jsonl


@dataclass(frozen=True)
class Measure:
    """A metric on a data set: `dataset` and `metric` as in the files, `words` for readers."""

    dataset: str
    metric: str
    words: str
    main: bool = True  # shown first, on the terminal and in LaTeX
    percent: bool = True
    better: int = 1  # 1: higher is better; -1: lower is better; 0: not a score

    @property
    def key(self) -> str:
        """The key in a line of evaluation.jsonl."""
        return ERROR_KEY if self == NORMALIZER_ERROR else f"{self.dataset}.{self.metric}"

    @property
    def of_retrieval(self) -> bool:
        """Whether it is recall among all captions; recall among different captions is not in every set."""
        return self.metric.startswith(("image_to_text_recall", "text_to_image_recall"))

    def text(self, value: float | None) -> str:
        return percent(value) if self.percent else format_number(value, keep_zeros=True)


NORMALIZER_ERROR = Measure("training data", "normalizer_error", "normalizer error", percent=False, better=-1)
CALIBRATION = Measure("training data", "calibration", "calibration", main=False, percent=False, better=0)
SPEED = Measure("training", "samples_per_second", "samples per second", main=False, percent=False, better=0)


def find_measures(figures: Figures) -> dict[Measure, float]:
    """Recall, accuracy and normalizer error of one evaluation, in the order of its keys.

    >>> [one.words for one in find_measures({"a.image_to_text_recall_at_5": 0.1, "b.top1": 0.4, "b.images": 9})]
    ['image to text recall@5', 'top-1 accuracy']
    """
    measures: dict[Measure, float] = {}
    for key, value in figures.items():
        dataset, _, metric = key.rpartition(".")
        if match := RECALL.fullmatch(metric):
            direction, comma, different = DIRECTIONS[match[1]][0].partition(",")
            words = f"{direction} recall@{match[2]}{comma}{different}"
            measures[Measure(dataset, metric, words, main=match[2] == "1")] = value
        elif metric in ACCURACIES:
            measures[Measure(dataset, metric, ACCURACIES[metric], main=metric == "top1")] = value
        elif metric == MEAN_RECALL:
            measures[Measure(dataset, metric, "recall@1, mean of both directions")] = value
        elif key == ERROR_KEY:
            measures[NORMALIZER_ERROR] = value
    return measures


def chance(measure: Measure, figures: Figures) -> float | None:
    """The chance level; None if it is unknown."""
    if "_recall_" in measure.metric:
        return figures.get(measure.key.replace("_recall_at_", "_chance_at_"))
    return figures.get(f"{measure.dataset}.chance") if measure.metric in ("top1", "mean_per_class") else None


def datasets(figures: Iterable[str], pattern: str) -> list[str]:
    """The data sets with a metric that matches `pattern`, in the order of the keys."""
    parts = (key.rpartition(".") for key in figures)
    return list(dict.fromkeys(dataset for dataset, dot, metric in parts if dot and re.fullmatch(pattern, metric)))


def size(dataset: str, figures: Figures) -> str:
    """'1,000 images, 5,000 captions, 5 per image', '261 images, 9 classes'; unknown counts are left out."""
    images, captions, classes, skipped = (
        figures.get(f"{dataset}.{name}") for name in ("images", "captions", "classes", "skipped")
    )
    parts = [
        plural(images, "image") if images is not None else "",
        plural(captions, "caption") if captions is not None else "",
        f"{captions / images:.3g} per image" if images and captions else "",
        plural(classes, "class", "classes") if classes is not None else "",
        f"{format_count(skipped)} skipped" if skipped else "",
    ]
    return ", ".join(filter(None, parts))


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each name without the folder that all of them share: 'b' and 'c' for a/b and a/c."""
    folder = names[0][: names[0].rfind("/") + 1] if len(names) > 1 else ""
    shared = folder if all(name.startswith(folder) for name in names) else ""
    return {name: name.removeprefix(shared) for name in names}


def evaluation_tables(figures: Mapping[str, object], before: Figures | None = None) -> list[Table]:
    """The tables of one evaluation that have rows: the change since the evaluation `before`, retrieval, and zero-shot
    classification. `figures` are flat, as in evaluation.jsonl.

    >>> [table.caption for table in evaluation_tables({"a.image_to_text_recall_at_1": 0.1, "b.top1": 0.4})]
    ['Retrieval', 'Zero-shot classification']
    """
    known = finite(figures)
    tables = (change_table(known, before or {}), retrieval_table(known), zero_shot_table(known))
    return [table for table in tables if table.rows]


def change_table(figures: Figures, before: Figures) -> Table:
    """Recall@1 and top-1 accuracy before and after training, if both were measured."""
    rows = [
        [one.dataset, one.words, percent(old), percent(new), f"{100 * (new - old):+.1f}".replace("-", "−")]
        for one, new in find_measures(figures).items()
        if one.main and (one.of_retrieval or one.metric == "top1") and (old := before.get(one.key)) is not None
    ]
    return Table("Before and after training", ["held-out set", "figure", "before", "after", "points"], rows, 2)


def retrieval_table(figures: Figures) -> Table:
    """One row per held-out set and direction, each recall with its chance below it."""
    sets = datasets(figures, RECALL.pattern)
    depths = sorted({int(match[2]) for key in figures if (match := RECALL.fullmatch(key.rpartition(".")[2]))})
    rows = [
        row for dataset in sets for direction in DIRECTIONS if (row := recall_row(dataset, direction, depths, figures))
    ]
    head = ["held-out set", "direction", "over chance", *(f"recall@{k}" for k in depths), "median rank"]
    different = any("different" in key for key in figures if "_recall_at_" in key)
    notes = [
        f"{DEFINITION}{f'; {DIFFERENT_DEFINITION}' if different else ''}.",
        "; ".join(f"{dataset}: {known}" for dataset in sets if (known := size(dataset, figures))),
    ]
    return Table("Retrieval", head, rows, 2, notes)


def recall_row(dataset: str, direction: str, depths: Sequence[int], figures: Figures) -> list[str | Cell]:
    """A row of the retrieval table; empty if this direction was not measured."""
    words, _, searched = DIRECTIONS[direction]

    def figure(metric: str) -> float | None:
        return figures.get(f"{dataset}.{metric}")

    recalls = [(figure(f"{direction}_recall_at_{k}"), figure(f"{direction}_chance_at_{k}")) for k in depths]
    if all(recall is None for recall, _ in recalls):
        return []
    cells = [
        Cell(percent(recall), f"chance {percent(guess)}" if guess is not None else "") for recall, guess in recalls
    ]
    among = figure(searched)
    rank = Cell(format_count(figure(f"{direction}_median_rank")), f"of {format_count(among)}" if among else "")
    return [dataset, words, over_chance(*recalls[0]), *cells, rank]


def zero_shot_table(figures: Figures) -> Table:
    """One row per classification task."""

    def row(task: str) -> list[str | Cell]:
        def figure(metric: str) -> float | None:
            return figures.get(f"{task}.{metric}")

        shares = [percent(figure(name)) for name in ("top5", "mean_per_class", "chance", "largest_class")]
        counts = [format_count(figure(name)) for name in ("classes", "images")]
        return [task, percent(figure("top1")), over_chance(figure("top1"), figure("chance")), *shares, *counts]

    tasks = datasets(figures, "top1")
    head = ["task", "top-1", "over chance", "top-5", "mean per class", "chance", "largest class", "classes", "images"]
    skipped = {task: figures.get(f"{task}.skipped") for task in tasks}
    note = "; ".join(f"{task}: {format_count(count)} skipped" for task, count in skipped.items() if count)
    return Table("Zero-shot classification", head, [row(task) for task in tasks], notes=[note] if note else [])


def over_chance(value: float | None, guess: float | None) -> str:
    """'34x'; a dash if chance is unknown."""
    return times_chance(value, guess).removesuffix(" chance") or UNKNOWN


def measure_chart(measure: Measure, groups: Mapping[str, Sequence[Sequence[Figures]]], name: str = "") -> Chart:
    """A chart of one score over the evaluations of all runs, by group. `name`: a shorter name for the data set."""
    words = {"top1": "Top-1", "image_to_text_recall_at_1": "Recall@1"}.get(measure.metric, measure.words.capitalize())
    title, unit = f"{words} on {name or measure.dataset}", measure.words
    return Chart(title=title, unit=unit, lines=evaluation_lines(measure.key, groups), percent=True, dots=True)


def error_chart(lines: Sequence[Line]) -> Chart:
    """The normalizer error over the evaluations."""
    return Chart(
        title="Normalizer error",
        unit="squared error of its logarithm",
        lines=lines,
        note="Against the exact normalizers over the whole training set: 0 is exact.",
        log=True,
        dots=True,
    )


def evaluation_lines(key: str, groups: Mapping[str, Sequence[Sequence[Figures]]]) -> list[Line]:
    """One line per group whose evaluations have `key`."""
    return group_lines({group: [column(run, key) for run in runs] for group, runs in groups.items()})
