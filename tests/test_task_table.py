"""The table of DataComp's 38 tasks, and averages against 121 published rows: what is not complete has none."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from neuclip.errors import UserError
from neuclip.tasks import GROUPS, averages, choose_tasks, find_task, tasks

PUBLISHED = Path(__file__).parent / "evaluation" / "published_results.txt"
FIRST = "imagenet1k"  # in the published order; the others follow as in DataComp's list


def test_the_table_has_the_counts_of_datacomps_list():
    assert len(tasks()) == 38 and sum(task.size for task in tasks()) == 697_369
    metrics = Counter(task.metric for task in tasks())
    assert metrics["acc1"] == 27 and metrics["mean_per_class_recall"] == 4 and metrics["mean_recall@1"] == 2
    assert sorted(metrics.values()) == [1, 1, 1, 1, 1, 2, 4, 27]
    assert Counter(task.kind for task in tasks()) == {"classification": 35, "retrieval": 2, "puzzles": 1}


def test_groups_have_their_published_number_of_tasks_and_a_title():
    published = {"datacomp": 38, "imagenet": 7, "retrieval": 2, "vtab": 13, "imagenet_shifts": 6}
    assert {group: len(choose_tasks(group)) for group in published} == published
    assert {group for task in tasks() for group in task.groups} == set(GROUPS)


def test_every_word_means_one_task():
    words = {word: task for task in tasks() for word in (task.key, task.name, task.name.lower(), *task.folders)}
    assert all(find_task(word) is task for word, task in words.items())
    assert not {word.lower() for word in words} & set(GROUPS)


def test_a_folder_is_found_under_the_name_of_a_clone(tmp_path):
    textures = find_task("dtd")
    assert textures.find_folder(tmp_path) is None
    for name in ("wds_vtab-dtd", "wds_vtab-dtd_test"):  # the second goes first where both are there
        (tmp_path / name).mkdir()
        assert textures.find_folder(tmp_path) == tmp_path / name


def test_tasks_and_groups_are_chosen_once_and_in_the_order_of_the_list():
    names = [task.name for task in choose_tasks("retrieval, Stanford Cars,Flickr")]
    assert names == ["Stanford Cars", "Flickr", "MSCOCO"]


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="no task 'imagenet-v2'; did you mean imagenetv2"):
        find_task("imagenet-v2")
    with pytest.raises(UserError, match="no task 'xyz'; neuclip data get --list"):
        choose_tasks("dtd,xyz")


def published() -> dict[str, tuple[float, list[dict]]]:
    """Printed average and lines of results of each model."""
    keys = [FIRST, *(task.key for task in tasks() if task.key != FIRST)]
    rows = {}
    for text in PUBLISHED.read_text().splitlines():
        if not text.startswith("#"):
            model, weights, average, *values = text.split()
            metrics = [{"main_metric": int(one) / 1e4} for one in values]
            lines = [{"key": key, "metrics": one} for key, one in zip(keys, metrics, strict=True)]
            rows[f"{model} {weights}"] = int(average) / 1e4, lines
    return rows


def test_the_average_of_every_published_row_is_reproduced():
    assert len(published()) == 121
    for name, (printed, lines) in published().items():
        assert averages(lines)[0].value == pytest.approx(printed, abs=1e-4), name


# From the same table, computed apart from this code: 7, 2, 6, 13 and 3 tasks.
GROUP_MEANS = {
    "ViT-B-32 openai": (0.506386, 0.545600, 0.485250, 0.526323, 0.501233),
    "ViT-B-16 openai": (0.576743, 0.574650, 0.558967, 0.546115, 0.526967),
    "ViT-B-32 datacomp_xl_s13b_b90k": (0.571514, 0.576900, 0.551483, 0.577469, 0.537733),
    "ViT-B-16 datacomp_l_s1b_b8k": (0.525457, 0.523650, 0.507867, 0.545623, 0.497933),
    "RN50 cc12m": (0.296143, 0.412350, 0.285650, 0.314492, 0.402500),
}


def test_groups_have_the_members_of_the_paper_and_of_datacomp():
    rows = published()
    for model, means in GROUP_MEANS.items():
        groups = averages(rows[model][1])[1:]
        assert [group.value for group in groups] == pytest.approx(means, abs=1e-6)
    names = ("ImageNet & Variants", "Retrieval", "ImageNet distribution shifts", "VTAB")
    assert tuple(group.name for group in groups) == (*names, "Retrieval with WinoGAViL (DataComp)")


def measured() -> list[dict]:
    return [{"key": task.key, "metrics": {"main_metric": 0.5}, "meta": {"chance": 0.1}} for task in tasks()]


def test_an_average_over_fewer_tasks_has_no_value():
    whole, short = averages(measured())[0], averages(measured()[:-1])[0]
    assert (whole.value, whole.chance) == (0.5, pytest.approx(0.1))
    assert (short.value, short.chance, short.measured, short.members) == (None, None, 37, 38)
    assert short.lacking == (f"{tasks()[-1].name}: not measured",)
    assert [average.group for average in averages(measured()[1:2])] == ["datacomp"] and averages([]) == []


@pytest.mark.parametrize(
    ("meta", "lacks"),
    [
        ({"items": 9_000}, "measured on 9,000 of 10,000"),
        ({"items": 9_999}, ""),
        ({"items": 60_000}, "measured on 60,000 of 10,000"),
        ({"classes": 9}, "measured with 9 class names, it has 10"),
        ({"templates": "default"}, "measured with default prompts"),
        ({}, "has no acc1"),
    ],
)
def test_a_task_that_was_measured_otherwise_than_by_everybody_completes_no_average(meta, lacks):
    lines = measured()
    lines[1] = {"key": "cifar10", "metrics": {"main_metric": 0.5 if meta else None}, "meta": meta}
    average = averages(lines)[0]
    assert average.lacking == ((f"CIFAR-10: {lacks}",) if lacks else ())
    assert average.value == (None if lacks else 0.5)
