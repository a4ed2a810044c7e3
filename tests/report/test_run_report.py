"""The page of one run: what it says of which records."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest

from neuclip.errors import UserError
from neuclip.records import RunFolder, read_lines
from neuclip.report.contents import RunContents, read_contents
from neuclip.report.findings import findings, judge_calibration, judge_error
from neuclip.report.run_report import main_charts, more_charts, report_page, tiles, write_report
from neuclip.settings.objectives import OBJECTIVES
from tests.report.sample_runs import BATCH, HELD_OUT, STEPS, change_json, make_fine_tuned, write_lines
from tests.report.test_page import report, visible_text

NEW, OLD = HELD_OUT


def tiles_of(run: RunFolder) -> dict[str, tuple[str, str]]:
    return {label: (value, note) for label, value, note in tiles(read_contents(run))}


def test_the_same_files_make_the_same_page_to_the_byte_whenever_they_were_written(run: RunFolder) -> None:
    first = report(run)
    for path in run.path.iterdir():
        os.utime(path, (1e9, 1e9))
    assert report(run) == first and "16 November 2026, 19:05 UTC" in first


def test_tiles_say_what_was_reached_against_chance_and_at_what_cost(run: RunFolder) -> None:
    assert tiles_of(run) == {
        "Image to text recall@1": ("39.9 %", f"383x chance; {NEW}, 1,143 images, 960 captions, 0.84 per image"),
        "Text to image recall@1": ("35.1 %", f"337x chance; {NEW}, 1,143 images, 960 captions, 0.84 per image"),
        "Top-1 accuracy": (
            "59.9 %",
            "5.4x chance; largest class 22.2 %; icons-30k/zero-shot/groups, 1,301 images, 9 classes",
        ),
        "Normalizer error": ("0.12", "16x smaller than a mini-batch's"),
        "Calibration": ("1.07", "good; median of the last quarter, 1 is right"),
        "Time": ("17 min 23 s", "for 512 k samples"),
        "Samples per second": ("508", "on cpu, 2 threads"),
        "Peak memory": ("1.42 GB", ""),
    }


def test_a_calibration_keeps_its_zeros(run: RunFolder) -> None:
    change_json(run.summary, calibration=1.0006)
    assert tiles_of(run)["Calibration"][0] == "1.00"


def test_what_was_not_measured_has_no_tile_and_no_chart(run: RunFolder) -> None:
    for path in (run.evaluation, run.summary, run.environment, run.gallery):
        path.unlink()
    records = [{"samples": line["samples"], "loss": line["loss"]} for line in read_lines(run.records)]
    write_lines(run.records, [*records, {"samples": 512_000, "samples_per_second": 99.0}])
    assert tiles_of(run) == {"Samples per second": ("99", "at the last record")}
    assert [chart.title for chart in main_charts(read_contents(run))] == ["Loss"]
    text = visible_text(report(run))
    assert "Nothing was evaluated. Give held-out data" in text and "It was not measured: neuclip error" in text


def test_a_run_that_began_says_how_far_it_is(run: RunFolder) -> None:
    run.summary.unlink()
    write_lines(run.records, read_lines(run.records)[:100])
    write_lines(run.evaluation, read_lines(run.evaluation)[:1])
    text = visible_text(report(run))
    assert "This run has not finished: 128 k of 512 k samples seen (25.0 %)." in text
    assert "Measured at 64,000 samples." in text and "skipped.jsonl lists them" in text
    for path in (run.records, run.evaluation, run.environment, run.gallery):
        path.unlink()
    assert "This run has not finished: it has not logged a step so far." in visible_text(report(run))


def test_a_set_that_was_not_measured_has_a_notice_at_the_top(run: RunFolder) -> None:
    change_json(run.summary, not_measured={"my.set": "8 of 40 samples cannot be used"})
    assert report_page(read_contents(run)).notices == ["my.set was not measured: 8 of 40 samples cannot be used."]


# Rules: what changes in a run without fault, and the sentence that it gets.

QUIET: dict[str, Any] = {
    "settings": {"objective.name": "neuclip", "temperature.initial": 0.07, "temperature.minimum": 0.01},
    "summary": {"samples_seen": 900, "temperature": 0.05, "calibration": 1.05},
    "records": [{"samples": 10.0 * n, "loss": 5 - n / 20, "epoch": n / 10} for n in range(1, 91)],
}


def evaluations(*recalls: float, **others: float) -> list[dict[str, float]]:
    facts = {"a.images": 1000.0, "a.captions": 1000.0, "a.image_to_text_chance_at_1": 0.001}
    return [
        {"samples": 100.0 * place, "a.image_to_text_recall_at_1": recall} | facts | others
        for place, recall in enumerate(recalls)
    ]


def records(**values: list[float]) -> list[dict[str, float]]:
    count = len(next(iter(values.values())))
    return [{"samples": float(n), "epoch": 9.0} | {key: ours[n] for key, ours in values.items()} for n in range(count)]


def found(**changes: Any) -> list[str]:
    return list(findings(replace(RunContents(RunFolder("run")), **QUIET | changes)))


TASK = {"b.images": 400.0, "b.chance": 0.1, "b.largest_class": 0.3}
RULES = {
    "nothing": ({}, ""),
    "guessing": ({"evaluations": evaluations(0.003)}, "On a, image to text recall@1 (0.30 %) is no better than guess"),
    "above chance": ({"evaluations": evaluations(0.005)}, ""),
    "largest class": (
        {"evaluations": evaluations(0.5, **TASK, **{"b.top1": 0.35})},
        "On b, top-1 accuracy (35.0 %) is no better than always naming the largest class.",
    ),
    "above the largest": ({"evaluations": evaluations(0.5, **TASK, **{"b.top1": 0.38})}, ""),
    "both directions": (
        {
            "evaluations": evaluations(
                0.001, **{"a.text_to_image_recall_at_1": 0.0, "a.text_to_image_chance_at_1": 0.001}
            )
        },
        "On a, image to text recall@1 (0.10 %) and text to image recall@1 (0 %) are no better than guessing.",
    ),
    "loss rises": ({"records": records(loss=[3.0] * 10 + [4.0] * 10)}, "The loss did not fall: 3 first, 4 last. Try a"),
    "loss rises again": (
        {"records": records(loss=[3.0] * 10 + [1.0] * 10 + [2.5] * 10)},
        "The loss fell from 3 to 1 and rose again to 2.5. Try a lower optimizer.learning_rate",
    ),
    "one spike": ({"records": records(loss=[3.0] * 50 + [1.0] * 49 + [9.0])}, ""),
    "one record": ({"records": records(loss=[3.0])}, ""),
    "calibration": (
        {"summary": QUIET["summary"] | {"calibration": 3.0}},
        "Calibration is 3.00: poor, predicted normalizers are 3.0x too small. Try more objective.inner_steps",
    ),
    "fair calibration": ({"summary": QUIET["summary"] | {"calibration": 1.4}}, ""),
    "minimum": (
        {"summary": QUIET["summary"] | {"temperature": 0.01}},
        "The temperature is at its minimum, 0.01. For a higher one, try a smaller temperature.learning_rate",
    ),
    "meant to be there": (
        {"settings": QUIET["settings"] | {"temperature.initial": 0.01}, "summary": {"temperature": 0.01}},
        "",
    ),
    "maximum": (
        {"settings": QUIET["settings"] | {"temperature.maximum": 0.05}},
        "The temperature is at its maximum, 0.05. Check that images and captions belong together",
    ),
    "capped": (
        {"records": records(capped=[0.0, 3.0, 0.0])},
        "Exponents were capped, of up to 3 anchors in a batch: their predicted normalizers were far too small.",
    ),
    "never capped": ({"records": records(capped=[0.0, 0.0])}, ""),
    "captions": (
        {"records": records(truncated_captions=[0.9, 0.12])},
        "12.0 % of the captions fill the context and may be cut. Shorten them",
    ),
    "overfitting": (
        {"evaluations": evaluations(0.1, 0.5, 0.4)},
        "Recall@1 on a was 50.0 % at 100 samples and fell to 40.0 %. Try more data",
    ),
    "luck": ({"evaluations": evaluations(0.1, 0.5, 0.46)}, ""),
    "first epoch": (
        {"evaluations": evaluations(0.1, 0.5, 0.4), "records": [{"samples": 9.0, "epoch": 1.0}]},
        "Train longer (train.samples): each sample was seen 1.0 times.",
    ),
    "forgetting": (
        {"evaluations": evaluations(0.5, 0.3, 0.4)},
        "Recall@1 on a was 50.0 % before training and fell to 40.0 %. To keep more of what the model knew, merge both",
    ),
    "still rising": (
        {"evaluations": evaluations(0.1, 0.3)},
        "Train longer (train.samples): recall@1 was still rising.",
    ),
    "few epochs": (
        {"records": [{"samples": 9.0, "epoch": 0.25}], "evaluations": evaluations(0.1, 0.3)},
        "Train longer (train.samples): only 25.0 % of the data was seen and recall@1 was still rising.",
    ),
    "not finished": ({"summary": {}, "records": [{"samples": 9.0, "epoch": 0.25}]}, ""),
}


@pytest.mark.parametrize("name", RULES)
def test_a_run_is_told_what_was_seen_and_what_to_try(name: str) -> None:
    changes, sentence = RULES[name]
    sentences = found(**changes)
    assert [one[: len(sentence)] for one in sentences] == [sentence] * bool(sentence)


def test_recall_of_one_set_is_not_compared_with_that_of_another() -> None:
    two = evaluations(0.3, 0.3, **{"b.image_to_text_recall_at_1": 0.9, "b.images": 1000.0})
    assert found(evaluations=two) == []


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_advice_on_calibration_is_the_methods_own(name: str) -> None:
    poor = {"settings": {"objective.name": name}, "summary": {"calibration": 3.0}}
    advice = OBJECTIVES[name].calibration_advice
    assert found(**poor)[0].endswith(f"too small. {advice}".rstrip())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1.15, "good"),
        (0.87, "good"),
        (1.3, "fair, predicted normalizers are 1.3x too small"),
        (0.4, "poor, predicted normalizers are 2.5x too large"),
        (0.0, "poor, predicted normalizers are far too large"),
    ],
)
def test_a_calibration_says_what_it_means(value: float, words: str) -> None:
    assert judge_calibration(value) == words


@pytest.mark.parametrize(
    ("error", "batch", "words"),
    [
        (0.1, 0.75, "7.5x smaller than a mini-batch's"),
        (2.0, 1.0, "2.0x larger than a mini-batch's"),
        (1.05, 1.0, "as large as a mini-batch's"),
        (0.0, 1.0, "zero, the prediction is exact"),
        (None, 1.0, ""),
        (1.0, None, ""),
    ],
)
def test_an_error_is_compared_with_that_of_a_mini_batch(error: float | None, batch: float | None, words: str) -> None:
    assert judge_error(error, batch) == words


def test_the_normalizer_error_is_drawn_over_samples_beside_that_of_a_mini_batch(run: RunFolder) -> None:
    chart = next(chart for chart in main_charts(read_contents(run)) if chart.title == "Normalizer error")
    assert [line.name for line in chart.lines] == ["NeuCLIP", f"a mini-batch of {BATCH}"]
    assert chart.lines[0].points[0] == (64_000, 0.96) and chart.lines[0].points[-1] == (STEPS * BATCH, 0.12)
    assert chart.log and chart.dots


def test_capped_exponents_and_normalizers_at_eps_are_on_the_page(run: RunFolder) -> None:
    charts = {chart.title: chart for chart in more_charts(read_contents(run))}
    assert charts["Capped exponents"].last_values() == [("2026-11-16-neuclip-tiny", "0")]
    assert charts["Normalizers at eps"].lines[0].points[-1][1] == pytest.approx(0.04, abs=0.002)
    assert "at the eps floor 10.0 %; in the batches of the last quarter 3.5 %" in visible_text(report(run))


def test_the_table_of_errors_names_the_estimators_and_how_they_were_measured(run: RunFolder) -> None:
    text = visible_text(report(run))
    assert f"NeuCLIP, this run 0.110 0.130 0.120 0.0900 a mini-batch of {BATCH} 1.80 2.00 1.90 0.210" in text
    assert "5,000 anchors of the training set; 1,200 of them with a caption that others share; temperature" in text
    batch = {"estimators": {"minibatch": {"mean": 2.0}}, "method_note": "SigLIP has no normalizer"}
    change_json(run.summary, normalizer_error=batch)
    assert "– – 2.00 –" in visible_text(report(run)) and "SigLIP has no normalizer." in visible_text(report(run))


def test_recall_has_a_colour_per_set_dashes_per_line_and_no_curve_of_one_evaluation(run: RunFolder) -> None:
    chart = main_charts(read_contents(run))[1]
    assert [(line.name, line.colour, line.dash) for line in chart.lines] == [
        ("new-drawings, image to text", 0, 0),
        ("new-drawings, text to image", 0, 1),
        ("new-concepts, image to text", 1, 2),
        ("new-concepts, text to image", 1, 3),
    ]
    run.evaluation.unlink()
    assert "Recall@1 on held-out data" not in [chart.title for chart in main_charts(read_contents(run))]


def test_a_fine_tuned_run_shows_before_and_after_what_was_lost_and_the_merged_models(run: RunFolder) -> None:
    make_fine_tuned(run)
    text = visible_text(report(run))
    assert "Before and after training" in text and f"{OLD} image to text recall@1 44.0 % 10.5 % −33.5" in text
    assert f"Recall@1 on {OLD} was 44.0 % before training and fell to 10.5 %." in text
    assert tiles_of(run)["Image to text recall@1"][1].startswith("before 12.0 %; 383x chance")
    merged = next(chart for chart in main_charts(read_contents(run)) if chart.title == "Merged with the start")
    assert merged.across == "weight of this run" and [x for x, _ in merged.lines[0].points][::10] == [0.0, 1.0]
    write_lines(run.evaluation, read_lines(run.evaluation)[:1])
    run.summary.unlink()
    assert "Before and after" not in visible_text(report(run))


def test_examples_are_shown_in_both_directions_with_how_many_are_right(run: RunFolder) -> None:
    text, page = visible_text(report(run)), report(run)
    assert f"From {NEW}. The queries are drawn at random with the run's seed, not chosen." in text
    assert "Image to text: 2 of 12 right at first, 10 among the first 5 " in text
    assert page.count('class="query"') == 24 and page.count("✓ right") == page.count('<li class="right">') == 20


@pytest.mark.parametrize(
    "damage",
    [
        {"image_to_text": [{"x": 1}]},
        {"image_to_text": 3},
        {"text_to_image": [{"caption": "a", "rank": 1, "matches": 2}]},
    ],
)
def test_damaged_examples_are_named_in_one_line(run: RunFolder, damage: dict[str, Any]) -> None:
    run.gallery.write_text(json.dumps(damage))
    with pytest.raises(UserError, match=r"gallery\.json: is damaged.*move it away, and the page is made without it"):
        write_report(run)


def test_skipped_samples_are_counted_by_reason_in_training_and_held_out_sets_apart(run: RunFolder) -> None:
    change_json(run.summary, skipped_held_out={"a/b.csv": {"caption is empty": 1200}})
    text = visible_text(report(run))
    assert "1 sample of the training data skipped: cannot decode." in text
    assert "1,200 samples of the held-out a/b.csv skipped: caption is empty." in text
    assert "1.3 % of the captions fill the context (possibly truncated)." in text
    change_json(run.summary, skipped={}, skipped_held_out={})
    assert "No sample was skipped." in visible_text(report(run))


def test_all_settings_and_the_environment_are_listed_without_secrets(run: RunFolder) -> None:
    text = run.settings.read_text().replace("train: icons-30k", "train: https://host/a.tar?X-Signature=abc123")
    run.settings.write_text(text)
    page = report(run)
    shown = visible_text(page)
    assert "objective.num_prototypes 1024" in shown and "objective.network_lr default" in shown
    assert "data.crop_scale [0.9, 1.0]" in shown and "versions.torch 2.13.0" in shown
    assert "https://host/a.tar" in shown and "abc123" not in page
