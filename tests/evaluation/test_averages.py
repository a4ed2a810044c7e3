"""Averages against 121 published rows, and what is not complete has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip.evaluation.averages import averages
from neuclip.tasks import tasks

PUBLISHED = Path(__file__).parent / "published_results.txt"
FIRST = "imagenet1k"  # in the published order; the others follow as in DataComp's list


def published() -> list[tuple[str, float, list[dict]]]:
    """Name, printed average and lines of results of each model."""
    keys = [FIRST, *(task.key for task in tasks() if task.key != FIRST)]
    rows = []
    for text in PUBLISHED.read_text().splitlines():
        if text.startswith("#"):
            continue
        model, weights, average, *values = text.split()
        lines = [
            {"key": key, "metrics": {"main_metric": int(one) / 1e4}} for key, one in zip(keys, values, strict=True)
        ]
        rows.append((f"{model} {weights}", int(average) / 1e4, lines))
    return rows


def named(lines: list[dict]) -> dict[str, float | None]:
    return {average.name: average.value for average in averages(lines)}


def test_the_average_of_every_published_row_is_reproduced():
    rows = published()
    assert len(rows) == 121
    for name, printed, lines in rows:
        assert named(lines)["Datacomp Average"] == pytest.approx(printed, abs=1e-4), name


# From the same table, computed apart from this code: 7, 6, 13, 2 and 3 tasks.
GROUP_MEANS = {
    "ViT-B-32 openai": (0.506386, 0.485250, 0.526323, 0.545600, 0.501233),
    "ViT-B-16 openai": (0.576743, 0.558967, 0.546115, 0.574650, 0.526967),
    "ViT-B-32 datacomp_xl_s13b_b90k": (0.571514, 0.551483, 0.577469, 0.576900, 0.537733),
    "ViT-B-16 datacomp_l_s1b_b8k": (0.525457, 0.507867, 0.545623, 0.523650, 0.497933),
    "RN50 cc12m": (0.296143, 0.285650, 0.314492, 0.412350, 0.402500),
}


@pytest.mark.parametrize("model", GROUP_MEANS)
def test_groups_have_the_members_of_the_paper_and_of_datacomp(model):
    lines = next(lines for name, _, lines in published() if name == model)
    groups = ("ImageNet & Variants", "ImageNet distribution shifts", "VTAB", "Retrieval")
    found = named(lines)
    values = [found[name] for name in (*groups, "Retrieval with WinoGAViL (DataComp)")]
    assert values == pytest.approx(GROUP_MEANS[model], abs=1e-6)


def line(key: str, **metrics: float | None) -> dict:
    return {"key": key, "metrics": {"main_metric": 0.5, **metrics}, "meta": {"chance": 0.1}}


def test_an_average_over_fewer_tasks_has_no_value():
    lines = [line(task.key) for task in tasks()]
    assert averages(lines)[0].value == 0.5 and averages(lines)[0].chance == pytest.approx(0.1)
    short = averages(lines[:-1])[0]
    assert (short.value, short.chance, short.measured, short.members) == (None, None, 37, 38)
    assert short.lacking == (f"{tasks()[-1].name}: not measured",)
    assert [average.group for average in averages([line("cifar10")])] == ["datacomp"]
    assert averages([]) == []


def test_a_task_measured_on_a_part_of_its_images_does_not_complete_an_average():
    lines = [line(task.key) for task in tasks()]
    lines[1]["meta"]["items"] = 9_000  # CIFAR-10 has 10,000
    short = averages(lines)[0]
    assert (short.value, short.lacking) == (None, ("CIFAR-10: measured on 9,000 of 10,000",))
    lines[1]["meta"]["items"] = 9_999
    assert averages(lines)[0].value == 0.5
    lines[1]["meta"]["items"] = 60_000
    assert averages(lines)[0].lacking == ("CIFAR-10: measured on 60,000 of 10,000",)
    lines[1]["meta"] = {"classes": 9}
    assert averages(lines)[0].lacking == ("CIFAR-10: measured with 9 class names, it has 10",)
    lines[1]["meta"] = {"templates": "default"}
    assert averages(lines)[0].lacking == ("CIFAR-10: measured with default prompts",)
    lines[1]["metrics"]["main_metric"] = None
    assert averages(lines)[0].lacking == ("CIFAR-10: has no acc1",)


def test_beside_the_average_stand_the_figures_it_is_mistaken_for():
    lines = {task.key: line(task.key, acc1=0.7) for task in tasks()}
    lines["wilds/fmow"] = line("wilds/fmow", acc1=0.6, main_metric=0.0, acc_worst_region_without_other=0.19)
    clevr = "vtab/clevr_closest_object_distance"
    lines[clevr] = line(clevr, acc1=0.2, main_metric=0.2, acc1_blank_classnames_keep=0.3)
    found = named(list(lines.values()))
    faithful = (36 * 0.5 + 0.2) / 38
    assert found["Datacomp Average"] == pytest.approx(faithful)
    assert found["FMoW without the region Other"] == pytest.approx(faithful + 0.19 / 38)
    assert found["FMoW over all regions"] == pytest.approx(faithful + 0.6 / 38)
    assert found["CLEVR Distance with its empty class name"] == pytest.approx(faithful + 0.1 / 38)
    assert found["acc1 for every classification task"] == pytest.approx((33 * 0.7 + 0.6 + 0.2 + 3 * 0.5) / 38)


def test_both_ways_of_counting_have_an_average_and_the_one_that_was_chosen_is_not_repeated():
    clevr = "vtab/clevr_closest_object_distance"
    ways = {"datacomp": (0.0, 0.2), "correct": (0.19, 0.3)}
    names = {way: f"as --compat {way} counts" for way in ways}
    for chosen, other in (("datacomp", "correct"), ("correct", "datacomp")):
        lines = {task.key: line(task.key, acc1=0.7) for task in tasks()}
        regions = {"acc_worst_region": 0.0, "acc_worst_region_without_other": 0.19}
        lines["wilds/fmow"] = line("wilds/fmow", main_metric=ways[chosen][0], **regions)
        blank = {"acc1_blank_classnames_drop": 0.2, "acc1_blank_classnames_keep": 0.3}
        lines[clevr] = line(clevr, main_metric=ways[chosen][1], **blank)
        found = named(list(lines.values()))
        assert found["Datacomp Average"] == pytest.approx((36 * 0.5 + sum(ways[chosen])) / 38)
        assert found[names[other]] == pytest.approx((36 * 0.5 + sum(ways[other])) / 38)
        assert names[chosen] not in found
