"""One test or more per rule, on plain numbers; then all of them on whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from neuclip.records import RunFolder
from neuclip.report.contents import read_contents
from neuclip.report.evaluations import HeldOutSet, all_evaluations, parse_evaluation
from neuclip.report.verdict import (
    Finding,
    budget_advice,
    calibration_finding,
    captions_finding,
    error_finding,
    fallen_recall_finding,
    forgetting_finding,
    gap_finding,
    judge_calibration,
    judge_error,
    loss_finding,
    result_finding,
    temperature_finding,
    verdict,
)

NOTHING = Finding()
HELD_OUT = HeldOutSet("icons", {"images": 1000.0, "captions": 960.0})


def result(**figures: float) -> str:
    return result_finding(parse_evaluation({f"icons.{name}": value for name, value in figures.items()}), True).sentence


def test_recall_is_given_against_chance_in_both_directions() -> None:
    sentence = result(
        image_to_text_recall_at_1=0.205,
        image_to_text_chance_at_1=0.001,
        text_to_image_recall_at_1=0.19,
        text_to_image_chance_at_1=0.001,
        images=1144,
        captions=960,
    )
    assert sentence == (
        "On icons, the right caption comes first for 20.5 % of the images (205x chance), "
        "the right image comes first for 19.0 % of the captions (190x chance)."
    )


@pytest.mark.parametrize(("recall", "guessing"), [(0.001, True), (0.003, True), (0.005, False)])
def test_a_recall_that_luck_explains_is_called_guessing(recall: float, guessing: bool) -> None:
    sentence = result(image_to_text_recall_at_1=recall, image_to_text_chance_at_1=0.001, images=1144)
    assert sentence.endswith("This is no better than guessing.") == guessing


def test_without_retrieval_the_first_zero_shot_task_is_judged_by_chance_and_by_its_largest_class() -> None:
    task = {"chance": 1 / 9, "images": 1301, "largest_class": 0.231}
    assert result(top1=0.61, **task) == "On icons, the right class comes first for 61.0 % of the images (5.5x chance)."
    assert result(top1=0.24, **task).endswith("Always naming the largest class would give 23.1 %.")
    assert result(top1=0.12, **task).endswith("This is no better than guessing.")


def test_without_any_held_out_figure_the_advice_is_to_give_held_out_data() -> None:
    assert result_finding(None, False) == ("Nothing was evaluated so far.", "")
    finding = result_finding(None, True)
    assert finding.sentence == "Nothing was evaluated on held-out data." and "evaluation.retrieval" in finding.advice


def test_a_loss_that_falls_is_well() -> None:
    assert loss_finding([0.7 - 0.01 * step for step in range(60)]) == ("The loss fell from 0.675 to 0.135.", "")


def test_a_loss_that_does_not_fall_or_rises_again_asks_for_a_lower_rate() -> None:
    rising = loss_finding([1.0, 1.1, 1.2])
    assert rising.sentence == "The loss did not fall: 1 first, 1.2 last." and "learning_rate" in rising.advice
    diverged = loss_finding([3.0, 1.0, 2.5])
    assert (
        diverged.sentence == "The loss fell from 3 to 1 and rose again to 2.5." and "learning_rate" in diverged.advice
    )


@pytest.mark.parametrize("losses", [[], [1.0]])
def test_of_fewer_than_two_losses_nothing_is_said(losses: list[float]) -> None:
    assert loss_finding(losses) == NOTHING


def test_one_spike_at_the_end_is_no_divergence() -> None:
    assert loss_finding([*(3.0 - 0.02 * step for step in range(99)), 50.0]).advice == ""


def test_calibration_is_good_near_1_and_else_says_what_it_means() -> None:
    words = {1.07: "good", 0.9: "good", 1.3: "fair, predicted normalizers are 1.3x too small"}
    words |= {
        0.25: "poor, predicted normalizers are 4.0x too large",
        0.0: "poor, predicted normalizers are far too large",
    }
    assert {value: judge_calibration(value) for value in words} == words


def test_only_a_poor_calibration_has_advice_and_only_where_the_method_has_a_known_remedy() -> None:
    assert calibration_finding(1.07, "neuclip") == ("Calibration is 1.07: good.", "")
    assert calibration_finding(1.3, "neuclip").advice == ""
    assert "objective.inner_steps" in calibration_finding(2.4, "neuclip").advice
    assert "objective.gamma" in calibration_finding(2.4, "fastclip").advice
    assert calibration_finding(2.4, "amorlip").advice == ""
    assert calibration_finding(None, "clip") == NOTHING


def test_the_error_is_compared_with_that_of_a_mini_batch() -> None:
    assert judge_error(0.46, 3.44) == "7.5x smaller than a mini-batch's"
    assert judge_error(3.44, 0.46) == "7.5x larger than a mini-batch's"
    assert judge_error(2.05, 2.05) == "as large as a mini-batch's"
    assert judge_error(0.0, 2.05) == "zero, the prediction is exact"
    assert judge_error(None, 2.05) == judge_error(0.46, None) == judge_error(0.46, 0.0) == ""
    assert error_finding(0.46, 3.44).sentence == "The normalizer error is 7.5x smaller than a mini-batch's."
    assert error_finding(None, 3.44) == NOTHING


def test_a_temperature_that_moved_to_its_bound_is_named() -> None:
    low = temperature_finding(0.01005, 0.07, 0.01, 1.0)
    assert low.sentence == "The temperature is at its minimum, 0.01." and "temperature.learning_rate" in low.advice
    assert temperature_finding(1.0, 0.07, 0.01, 1.0).sentence == "The temperature is at its maximum, 1."
    assert temperature_finding(0.03, 0.07, 0.01, 1.0) == temperature_finding(None, 0.07, 0.01, 1.0) == NOTHING
    assert temperature_finding(0.01, 0.01, 0.01, 1.0) == NOTHING  # it was put there


def test_many_truncated_captions_ask_for_a_longer_context() -> None:
    finding = captions_finding(0.123)
    assert finding.sentence.startswith("12.3 % of the captions fill the context") and "model.name" in finding.advice
    assert captions_finding(0.01) == captions_finding(None) == NOTHING


def test_a_recall_that_was_clearly_better_before_is_overfitting() -> None:
    fell = [(1000.0, 0.1), (2000.0, 0.3), (3000.0, 0.2)]
    finding = fallen_recall_finding(8.0, fell, HELD_OUT)
    assert finding.sentence == "Recall@1 was 30.0 % at 2 k samples and fell to 20.0 %."
    assert finding.advice.startswith("The model overfits")
    assert fallen_recall_finding(0.9, fell, HELD_OUT) == NOTHING  # no sample was seen twice
    assert fallen_recall_finding(8.0, [(1000.0, 0.3), (2000.0, 0.28)], HELD_OUT) == NOTHING  # luck explains it
    assert fallen_recall_finding(8.0, [(1000.0, 0.001), (2000.0, 0.0)], HELD_OUT) == NOTHING
    assert fallen_recall_finding(8.0, [], None) == NOTHING


@pytest.mark.parametrize(
    ("accuracy", "epochs", "overfits"),
    [(0.99, 30.0, True), (0.7, 30.0, False), (0.99, 2.0, False), (None, 30.0, False)],
)
def test_a_gap_to_training_at_equal_difficulty_is_overfitting_after_many_epochs(
    accuracy: float | None, epochs: float, overfits: bool
) -> None:
    recalls = {f"image_to_text_recall_at_{k}": recall for k, recall in ((1, 0.2), (5, 0.4), (10, 0.54))}
    finding = gap_finding(epochs, accuracy, 128, HeldOutSet("icons", HELD_OUT.metrics | recalls))
    # To be first of 128 is as hard as to be among the first 7.5 of 960: recall@10 is the next that was measured.
    wanted = "In training 99.0 % of a batch are right, on held-out data only 54.0 % at equal difficulty (recall@10)."
    assert finding.sentence == (wanted if overfits else "")
    assert finding.advice.startswith("The model overfits") == overfits


def test_no_gap_is_seen_where_no_recall_is_as_easy_as_a_batch() -> None:
    many = HeldOutSet("photos", {"captions": 5000.0, "image_to_text_recall_at_10": 0.1})
    assert gap_finding(30.0, 0.99, 128, many) == gap_finding(30.0, 0.99, None, many) == NOTHING
    assert gap_finding(30.0, 0.99, 128, None) == NOTHING


def test_more_samples_are_advised_after_few_epochs_and_while_recall_rises() -> None:
    assert budget_advice(0.467, []) == "Train longer (train.samples): only 46.7 % of the data was seen."
    both = "Train longer (train.samples): each sample was seen 3.5 times and recall@1 was still rising."
    assert budget_advice(3.5, [0.1, 0.2]) == both
    assert budget_advice(30.0, [0.1, 0.2]) == "Train longer (train.samples): recall@1 was still rising."
    assert budget_advice(30.0, [0.2, 0.201]) == budget_advice(None, []) == ""


def of(run: RunFolder, **changes: Any) -> dict[str, str]:
    contents = replace(read_contents(run), **changes)
    return dict(verdict(contents, all_evaluations(contents)).rows)


def test_a_finished_run_without_a_fault_is_told_so(run: RunFolder) -> None:
    rows = of(run)
    assert list(rows) == ["Result", "Training", "Try next"]
    assert rows["Try next"].startswith("Nothing stands out")


def test_a_run_that_goes_on_is_not_told_to_train_longer(run: RunFolder) -> None:
    records = read_contents(run).records[:40]
    assert "Try next" not in of(run, records=records, summary={})
    assert "Train longer" in of(run, records=records)["Try next"]


def test_of_many_faults_the_first_two_have_advice(run: RunFolder) -> None:
    contents = read_contents(run)
    summary = contents.summary | {"temperature": 0.01, "calibration": 3.0, "truncated_captions": 0.5}
    rows = of(run, summary=summary)
    assert "objective.inner_steps" in rows["Try next"] and "temperature.learning_rate" in rows["Try next"]
    assert "longer context" not in rows["Try next"] and "fill the context" in rows["Training"]


def test_an_overfitted_run_is_not_told_to_train_longer(run: RunFolder) -> None:
    evaluations = read_contents(run).evaluations
    drop = {"icons-30k/new-drawings.image_to_text_recall_at_1": 0.01}
    records = [record | {"epoch": 2.0} for record in read_contents(run).records]
    rows = of(run, evaluations=[*evaluations[:-1], evaluations[-1] | drop], summary={}, records=records)
    assert "fell to 1.0 %" in rows["Training"] and rows["Try next"].startswith("The model overfits")


def test_a_run_that_has_written_nothing_has_no_verdict(run: RunFolder) -> None:
    assert of(run, records=[], evaluations=[], summary={}) == {}


@pytest.mark.parametrize(("recall", "forgot"), [(0.40, False), (0.36, False), (0.35, True), (None, False)])
def test_a_set_on_which_the_model_was_clearly_better_before_is_named(recall: float | None, forgot: bool) -> None:
    """Of 1,000 images at 40 %, luck explains 4.6 points."""
    before = parse_evaluation({"old.image_to_text_recall_at_1": 0.4, "old.images": 1000}, 0.0)
    last = parse_evaluation({"old.image_to_text_recall_at_1": recall, "old.images": 1000}, 100.0)
    finding = forgetting_finding(before, last)
    assert finding.sentence == ("Since the start, recall@1 fell from 40.0 % to 35.0 % on old." if forgot else "")
    assert ("neuclip merge" in finding.advice) == forgot
    assert forgetting_finding(None, last) == forgetting_finding(None, None) == NOTHING


def test_recall_lost_since_the_start_is_forgetting_and_not_overfitting(run: RunFolder) -> None:
    """Overfitting is judged by what was reached in training."""
    contents = read_contents(run)
    first = contents.evaluations[-1]
    start = {key: 2 * value if "recall" in key else value for key, value in first.items()} | {"samples": 0, "step": 0}
    tuned = replace(contents, evaluations=[start, *contents.evaluations])
    found = verdict(tuned, all_evaluations(tuned))
    assert "Since the start, recall@1 fell" in found.training and "overfits" not in found.advice
