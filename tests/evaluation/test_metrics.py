"""The metrics of DataComp's tasks against its own evaluators, scikit-learn, published chance and random guesses."""

from __future__ import annotations

import itertools

import pytest
import torch

from neuclip.evaluation.classification import (
    Predictions,
    group_shares,
    macro_f1,
    mean_per_class_recall,
    share,
    worst_group,
)
from neuclip.evaluation.tasks import (
    best_candidates,
    chance_of,
    classification_metrics,
    guessed_jaccard,
    jaccard,
)
from neuclip.tasks import find_task

PLACES = range(60)
LABELS = torch.tensor([7 if i % 11 == 0 else (7 * i + 3) % 6 for i in PLACES])
PREDICTED = torch.tensor([((5 * i) // 3 + 2) % 9 if i % 3 == 0 else int(LABELS[i]) for i in PLACES])
GROUPS = torch.tensor([5 if i % 3 == 0 and i < 12 else (i // 4) % 3 for i in PLACES])
TOP_FIVE = [[(int(PREDICTED[i]) + k * (1 + i % 2)) % 9 for k in range(5)] for i in PLACES]
RANKS = torch.tensor(
    [one.index(own) + 1 if own in one else 6 for one, own in zip(TOP_FIVE, LABELS.tolist(), strict=True)]
)


def metrics_of(key: str) -> dict:
    return classification_metrics(find_task(key), Predictions(PREDICTED, RANKS), LABELS, 9, GROUPS)


def test_the_metrics_equal_those_of_datacomps_evaluators():
    assert share(RANKS == 1) == share(PREDICTED == LABELS) == pytest.approx(0.7)
    assert mean_per_class_recall(PREDICTED, LABELS) == pytest.approx(0.698412698, abs=1e-9)
    assert macro_f1(PREDICTED, LABELS) == pytest.approx(0.648023405, abs=1e-9)
    wanted = {0: 0.611111, 1: 0.789474, 2: 0.789474, 5: 0.25}
    assert group_shares(RANKS == 1, GROUPS) == pytest.approx(wanted, abs=1e-6)
    wanted = {0: 0.722222, 1: 0.894737, 2: 1.0, 5: 0.5}
    assert group_shares(RANKS <= 5, GROUPS) == pytest.approx(wanted, abs=1e-6)


def test_each_task_has_its_own_main_metric():
    assert metrics_of("wilds/iwildcam")["F1-macro_all"] == pytest.approx(0.648023405, abs=1e-9)
    fmow = metrics_of("wilds/fmow")
    assert fmow["acc_worst_region"] == 0.25 and fmow["region:5"] == 0.25
    assert fmow["acc_worst_region_without_other"] == pytest.approx(0.611111, abs=1e-6)
    assert metrics_of("geode")["acc_wg"] == 0.25 and "acc_worst_region_without_other" not in metrics_of("geode")
    street = metrics_of("dollar_street")
    assert (street["acc_top5_wg"], street["acc5"]) == (0.5, pytest.approx(0.85))


def test_five_best_of_fewer_than_five_classes_are_not_counted():
    of_four = classification_metrics(find_task("cifar10"), Predictions(PREDICTED, RANKS), LABELS, 4)
    assert of_four["acc5"] is None and of_four["acc1"] == pytest.approx(0.7)


def test_a_group_without_images_is_not_the_worst_and_one_image_may_be():
    right, groups = torch.tensor([True, True, False]), torch.tensor([0, 0, 4])
    assert group_shares(right, groups) == {0: 1.0, 4: 0.0} and worst_group(right, groups) == 0.0
    assert worst_group(right, groups, without=4) == 1.0
    assert worst_group(right[2:], groups[2:], without=4) is None


def test_metrics_over_classes_equal_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(2)
    for classes in (2, 7, 50):
        labels = torch.randint(0, classes, (200,), generator=generator) // 2 * 2 % classes  # some classes have no image
        predicted = torch.where(torch.rand(200, generator=generator) < 0.4, labels, (labels * 3 + 1) % classes)
        there = labels.unique().tolist()
        f1 = sklearn.f1_score(labels, predicted, average="macro", labels=there)
        assert macro_f1(predicted, labels) == pytest.approx(f1, abs=1e-12)
        recall = sklearn.recall_score(labels, predicted, average="macro", labels=there, zero_division=0)
        assert mean_per_class_recall(predicted, labels) == pytest.approx(recall, abs=1e-12)


def test_jaccard_of_as_many_chosen_as_are_right():
    assert jaccard([0, 1], [1, 2]) == pytest.approx(1 / 3)  # k = 2, one hit
    assert jaccard([0, 1, 2], [1, 2, 3]) == 0.5  # k = 3, two hits
    assert jaccard([4], [4]) == 1.0 and jaccard([4], [5]) == 0.0
    assert best_candidates(torch.tensor([0.5, 0.9, 0.5, 0.5]), 2) == [1, 0]  # the first of equal ones


# What guessing reaches.

SVHN = (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595)  # test images of each digit


def test_chance_is_the_published_one_where_a_published_one_is_of_the_same_metric():
    labels = torch.arange(10).repeat_interleave(torch.tensor(SVHN))
    assert chance_of("acc1", labels, 10) == pytest.approx(0.117897, abs=1e-6)
    assert chance_of("mean_per_class_recall", labels, 12) == pytest.approx(1 / 10)


@pytest.mark.parametrize("metric", ["acc1", "mean_per_class_recall", "F1-macro_all", "acc_wg"])
def test_chance_is_what_random_guesses_reach(metric):
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 600 + [1] * 300 + [3] * 100)
    groups = torch.tensor([0] * 500 + [1] * 500)
    task = {"F1-macro_all": "iwildcam", "acc_wg": "geode"}.get(metric, "cifar10")
    reached = []
    for _ in range(50):
        guesses = labels[torch.randint(1000, (1000,), generator=generator)]
        ranks = torch.where(guesses == labels, 1, 2)
        reached.append(classification_metrics(find_task(task), Predictions(guesses, ranks), labels, 4, groups)[metric])
    assert sum(reached) / 50 == pytest.approx(
        chance_of(metric, labels, 4, groups if task == "geode" else None), abs=0.01
    )


def test_chance_of_a_puzzle_is_the_mean_over_all_choices():
    choices = list(itertools.combinations(range(6), 3))
    assert guessed_jaccard(6, 3) == pytest.approx(sum(jaccard(one, (0, 1, 2)) for one in choices) / len(choices))
