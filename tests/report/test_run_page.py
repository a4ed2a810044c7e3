"""The page of one run: what it says of which records, whatever is missing or damaged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuclip.errors import UserError
from neuclip.objectives import OBJECTIVES
from neuclip.records import RunFolder, read_lines, write_json, write_lines
from neuclip.report.run_report import write_report
from tests.builders.pages import Shown, read_page
from tests.builders.run_folders import BATCH, FIGURES_AT_END, HELD_OUT, change_json, make_fine_tuned

NEW, OLD = HELD_OUT
FILES = ["settings", "records", "evaluation", "summary", "environment", "gallery", "merges"]


def page_of(run: RunFolder) -> Shown:
    return read_page(write_report(run))


def keep_only(run: RunFolder, *names: str) -> None:
    for name in set(FILES) - set(names):
        getattr(run, name).unlink(missing_ok=True)


# What is at the top


def test_the_same_files_make_the_same_page_to_the_byte_whenever_they_were_written(run: RunFolder) -> None:
    first = write_report(run).read_bytes()
    for path in run.path.iterdir():
        os.utime(path, (1e9, 1e9))
    assert write_report(run).read_bytes() == first


def test_tiles_show_results_with_chance_and_cost(run: RunFolder) -> None:
    assert page_of(run).tiles == {
        "Image to text recall@1": ("39.9 %", f"383x chance; {NEW}, 1,143 images, 960 captions, 0.84 per image"),
        "Text to image recall@1": ("35.1 %", f"337x chance; {NEW}, 1,143 images, 960 captions, 0.84 per image"),
        "Top-1 accuracy": (
            "59.9 %",
            "5.4x chance; largest class 22.2 %; icons-30k/zero-shot/groups, 1,301 images, 9 classes",
        ),
        "Normalizer error": ("0.12", "16x smaller than a mini-batch's"),
        "Calibration": ("1.07", "good; median of the last quarter, ideally 1"),
        "Time": ("17 min 23 s", "for 512 k samples"),
        "Samples per second": ("508", "on cpu, 2 threads"),
        "Peak memory": ("1.42 GB", ""),
    }


def test_the_head_has_method_model_data_and_the_start_in_utc(run: RunFolder) -> None:
    facts = "NeuCLIP · tiny · icons-30k"
    assert f"2026-11-16-neuclip-tiny {facts} · 16 November 2026, 19:05 UTC" in page_of(run).text
    for unknown in ("soon", None):
        change_json(run.environment, started=unknown)
        assert "UTC" not in page_of(run).text and facts in page_of(run).text


def test_unmeasured_figures_have_no_tile_and_no_chart(run: RunFolder) -> None:
    keep_only(run, "settings", "records")
    records = [{"samples": line["samples"], "loss": line["loss"]} for line in read_lines(run.records)]
    write_lines(run.records, [*records, {"samples": 512_000, "samples_per_second": 99.0}])
    page = page_of(run)
    assert page.tiles == {"Samples per second": ("99", "at the last record")}
    assert list(page.charts) == ["Loss", "Speed"]
    assert "The model was not evaluated." in page.text and "The normalizer error was not measured." in page.text


def test_an_unfinished_run_shows_its_progress_in_whole_batches(run: RunFolder) -> None:
    assert page_of(run).notices == []  # it saw all of its 512,000 samples; the budget of 512,060 is no batch more
    run.summary.unlink()
    write_lines(run.records, read_lines(run.records)[:100])
    write_lines(run.evaluation, read_lines(run.evaluation)[:1])
    page = page_of(run)
    assert page.notices[0].startswith("This run has not finished: 128 k of 512 k samples seen (25.0 %).")
    assert "Measured at 64,000 samples." in page.text and "skipped.jsonl lists them" in page.text
    keep_only(run, "settings")
    assert "This run has not finished: no step is logged yet." in page_of(run).text


def test_without_a_summary_the_calibration_is_the_median_of_the_last_quarter(run: RunFolder) -> None:
    change_json(run.summary, calibration=1.0006)
    assert page_of(run).tiles["Calibration"][0] == "1.00"  # zeros are kept
    values = [9.0] * 5 + [2.0, 500.0, 900.0, None]
    write_lines(run.records, [{"samples": n, "calibration": value} for n, value in enumerate(values, start=1)])
    change_json(run.summary, calibration=None)
    assert page_of(run).tiles["Calibration"][0] == "900"
    write_lines(run.records, [{"samples": n, "calibration": value} for n, value in enumerate(values[:-1], start=1)])
    assert page_of(run).tiles["Calibration"][0] == "700"


CALIBRATIONS = {
    1.15: "good",
    0.87: "good",
    1.3: "predicted normalizers are 1.3x too small",
    0.4: "predicted normalizers are 2.5x too large",
    0.0: "predicted normalizers are far too large",
}
ERRORS = {
    (2.0, 1.0): "2.0x larger than a mini-batch's",
    (1.05, 1.0): "as large as a mini-batch's",
    (0.0, 1.0): "zero, the prediction is exact",
    (1.0, None): "",
}


@pytest.mark.parametrize("value", CALIBRATIONS)
def test_a_calibration_is_explained(run: RunFolder, value: float) -> None:
    change_json(run.summary, calibration=value)
    assert page_of(run).tiles["Calibration"][1].startswith(f"{CALIBRATIONS[value]}; ")


@pytest.mark.parametrize(("error", "batch"), ERRORS)
def test_a_normalizer_error_is_compared_with_a_mini_batchs(run: RunFolder, error: float, batch: float) -> None:
    write_lines(run.evaluation, [{"samples": 9, "normalizer_error.method": error, "normalizer_error.minibatch": batch}])
    assert page_of(run).tiles["Normalizer error"][1] == ERRORS[error, batch]


# What is advised: what changes in a run without fault, and how the sentence that it gets begins.

QUIET_SETTINGS = {"train": {"batch_size": 10, "samples": 900}, "objective": {"name": "neuclip"}}
QUIET: dict[str, Any] = {
    "settings": {},
    "summary": {"samples_seen": 900, "temperature": 0.05, "calibration": 1.05},
    "records": [{"samples": 10.0 * n, "loss": 5 - n / 20, "epoch": n / 10} for n in range(1, 91)],
    "evaluations": [],
}
TASK = {"b.images": 400.0, "b.chance": 0.1, "b.largest_class": 0.3}


def evaluations(*recalls: float, **others: float) -> dict[str, Any]:
    facts = {"a.images": 1000.0, "a.captions": 1000.0, "a.image_to_text_chance_at_1": 0.001}
    lines = [
        {"samples": 100.0 * place, "a.image_to_text_recall_at_1": recall} | facts | others
        for place, recall in enumerate(recalls)
    ]
    return {"evaluations": lines}


def records(**values: list[float]) -> dict[str, Any]:
    count = len(next(iter(values.values())))
    lines = [{"samples": float(n), "epoch": 9.0} | {key: ours[n] for key, ours in values.items()} for n in range(count)]
    return {"records": lines}


def summary(**changes: float) -> dict[str, Any]:
    return {"summary": QUIET["summary"] | changes}


def early(epoch: float, **others: Any) -> dict[str, Any]:
    return {"records": [{"samples": 900.0, "epoch": epoch}], **others}


SMALL = "predicted normalizers are 3.0x too small."
OTHER_WAY = {"a.text_to_image_recall_at_1": 0.0, "a.text_to_image_chance_at_1": 0.001}
OTHER_SET = {"b.image_to_text_recall_at_1": 0.9, "b.images": 1000.0}
AT_START = {"settings": {"temperature": {"initial": 0.01}}, **summary(temperature=0.01)}
AT_MAXIMUM = {"settings": {"temperature": {"initial": 0.04, "maximum": 0.05}}}
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "guessing": (evaluations(0.003), "On a, image to text recall@1 (0.30 %) is no better than guessing."),
    "above chance": (evaluations(0.005), ""),
    "largest": (evaluations(0.5, **TASK, **{"b.top1": 0.35}), "On b, top-1 accuracy (35.0 %) is no better than always"),
    "above the largest": (evaluations(0.5, **TASK, **{"b.top1": 0.38}), ""),
    "both ways": (
        evaluations(0.001, **OTHER_WAY),
        "On a, image to text recall@1 (0.10 %) and text to image recall@1 (0",
    ),
    "loss rises": (records(loss=[3.0] * 10 + [4.0] * 10), "The loss did not fall: it was 3 at first and 4 at last."),
    "rises again": (
        records(loss=[3.0] * 9 + [1.0] * 9 + [2.5] * 9),
        "The loss fell from 3 to 1 and rose again to 2.5.",
    ),
    "one spike": (records(loss=[3.0] * 50 + [1.0] * 49 + [9.0]), ""),
    "one record": (records(loss=[3.0]), ""),
    "calibration": (summary(calibration=3.0), f"Calibration is 3.00: {SMALL} Try more objective.inner_steps"),
    "fair calibration": (summary(calibration=1.4), ""),
    "calibration of a queue": (
        {"settings": {"objective": {"name": "neuclip", "restart": "rolling"}}, **summary(calibration=3.0)},
        "",
    ),
    "minimum": (
        summary(temperature=0.01),
        "The temperature is at its minimum, 0.01. To keep it higher, try a smaller te",
    ),
    "meant to be there": (AT_START, ""),
    "maximum": (AT_MAXIMUM, "The temperature is at its maximum, 0.05. Check that images and captions belong together"),
    "capped": (records(capped=[0.0, 3.0, 0.0]), "Exponents were capped for up to 3 anchors in a batch: their predi"),
    "captions": (
        records(truncated_captions=[0.9, 0.12]),
        "12.0 % of the captions fill the context and may be trunca",
    ),
    "overfitting": (evaluations(0.1, 0.5, 0.4), "Recall@1 on a was 50.0 % at 100 samples and fell to 40.0 %. Try mo"),
    "luck": (evaluations(0.1, 0.5, 0.46), ""),
    "other set": (evaluations(0.3, 0.3, **OTHER_SET), ""),
    "first epoch": (
        early(1.0, **evaluations(0.1, 0.5, 0.4)),
        "Train longer (train.samples): each sample was seen 1.0 t",
    ),
    "forgetting": (evaluations(0.5, 0.3, 0.4), "Recall@1 on a was 50.0 % before training and fell to 40.0 %. To ke"),
    "rising": (evaluations(0.1, 0.3), "Train longer (train.samples): recall@1 was still rising."),
    "few epochs": (
        early(0.25, **evaluations(0.1, 0.3)),
        "Train longer (train.samples): only 25.0 % of the data was see",
    ),
    "not finished": (early(0.25, summary={}), ""),
}
for name, kind in OBJECTIVES.items():
    poor = {"settings": {"objective": {"name": name}}, **summary(calibration=3.0)}
    sentence = f"Calibration is 3.00: {SMALL} {kind.calibration_advice}"
    RULES[f"calibration of {name}"] = (poor, sentence.rstrip())


@pytest.mark.parametrize("name", RULES)
def test_findings_say_what_happened_and_what_to_try(tmp_path: Path, name: str) -> None:
    changes, sentence = RULES[name]
    run, parts = RunFolder(tmp_path), QUIET | changes
    run.settings.write_text(yaml.safe_dump(QUIET_SETTINGS | parts["settings"]))
    write_json(run.summary, parts["summary"])
    write_lines(run.records, parts["records"])
    write_lines(run.evaluation, parts["evaluations"])
    assert [one[: len(sentence)] for one in page_of(run).findings] == [sentence] * bool(sentence)


# Evaluation, normalizer error, examples, data, settings


def test_every_figure_of_an_evaluation_is_in_its_tables(run: RunFolder) -> None:
    page = page_of(run)
    head, first, *_, last = page.rows("Retrieval")
    assert head == ["held-out set", "direction", "over chance", *(f"recall@{k}" for k in (1, 5, 10)), "median rank"]
    recalls = ["39.9 % chance 0.10 %", "64.7 % chance 0.52 %", "79.6 % chance 1.0 %"]
    assert first == [NEW, "image to text", "383x", *recalls, "34 of 960"]
    assert last[:3] == [OLD, "text to image", "12x"]
    assert page.rows("Zero-shot classification") == [
        ["task", "top-1", "over chance", "top-5", "mean per class", "chance", "largest class", "classes", "images"],
        ["icons-30k/zero-shot/groups", "59.9 %", "5.4x", "95.8 %", "53.9 %", "11.1 %", "22.2 %", "9", "1,301"],
        ["icons-30k/zero-shot/subgroups", "28.5 %", "25x", "45.6 %", "25.6 %", "1.1 %", "2.3 %", "88", "1,301"],
    ]
    counts = f"{NEW}: 1,143 images, 960 captions, 0.84 per image; {OLD}: 158 images, 133 captions, 0.842 per image"
    assert counts in page.text and "Recall@k: share of images with one of their captions" in page.text
    assert "Before and after" not in page.text


def test_values_that_are_not_finite_numbers_and_lines_without_samples_are_ignored(run: RunFolder) -> None:
    good = {"samples": 3, "a.top1": 0.5}
    huge = '{"samples": 4, "b.top1": 1e300, "c.top1": 1' + "0" * 400 + ', "d.top1": true, "e.top1": "1", "f.top1": [1]}'
    write_lines(run.evaluation, [{"samples": None, "a.top1": 0.9}, good, {"a.top1": 0.7}])
    assert page_of(run).rows("Zero-shot classification")[1][:2] == ["a", "50.0 %"]
    assert page_of(run).tiles["Top-1 accuracy"] == ("50.0 %", "a")
    with run.evaluation.open("a") as file:
        file.write(f"{huge}\n")
    assert "Zero-shot classification" not in page_of(run).text


def test_a_set_that_was_not_measured_has_a_notice_at_the_top(run: RunFolder) -> None:
    change_json(run.summary, not_measured={"my.set": "8 of 40 samples cannot be used"})
    assert page_of(run).notices == ["my.set was not measured: 8 of 40 samples cannot be used."]


def test_a_fine_tuned_run_shows_before_and_after_what_was_lost_and_the_merged_models(run: RunFolder) -> None:
    make_fine_tuned(run)
    page = page_of(run)
    changes = page.rows("Before and after training")
    assert changes[0] == ["held-out set", "figure", "before", "after", "points"]
    assert [OLD, "image to text recall@1", "44.0 %", "10.5 %", "−33.5"] in changes
    assert any(one.startswith(f"Recall@1 on {OLD} was 44.0 % before training and fell") for one in page.findings)
    assert page.tiles["Image to text recall@1"][1].startswith("before 12.0 %; 383x chance")
    merged = page.charts["Recall@1 of merged models"]
    assert merged["across"] == "weight of this run" and [x for x, _ in merged["lines"][0]["points"]][::10] == [0, 1]
    keep_only(run, "settings", "records", "evaluation")
    write_lines(run.evaluation, read_lines(run.evaluation)[:1])
    assert "Before and after" not in page_of(run).text


def test_the_table_of_errors_names_the_estimators_and_how_they_were_measured(run: RunFolder) -> None:
    page = page_of(run)
    assert page.rows("By estimator")[1:] == [
        ["NeuCLIP, this run", "0.110", "0.130", "0.120", "0.0900"],
        [f"a mini-batch of {BATCH}", "1.80", "2.00", "1.90", "0.210"],
    ]
    assert "5,000 anchors of the training set; 1,200 of them have a caption that occurs more than once;" in page.text
    assert "at the eps floor: 10.0 % of the anchors; in the batches of the last quarter: 3.5 %" in page.text
    batch = {"estimators": {"minibatch": {"mean": 2.0}}, "method_note": "SigLIP has no normalizer"}
    change_json(run.summary, normalizer_error=batch)
    assert page_of(run).rows("By estimator")[1:] == [[f"a mini-batch of {BATCH}", "–", "–", "2.00", "–"]]
    assert "SigLIP has no normalizer." in page_of(run).text


def test_examples_are_shown_in_both_directions_with_how_many_are_right(run: RunFolder) -> None:
    examples = page_of(run).section("Retrieval examples")
    assert f"From {NEW}. The queries are drawn at random with the run's seed." in examples.text
    assert [one.text for one in examples.all("h3")] == [
        f"{direction}: the first match is right for 2 of 12 queries, one of the first 5 for 10"
        for direction in ("Image to text", "Text to image")
    ]
    assert len(examples.all("div", "query")) == 24
    right = examples.all("li", "right")
    assert len(right) == 20 and all("✓ right" in one.text for one in right)


def test_skipped_samples_are_counted_by_reason_in_training_and_held_out_sets_apart(run: RunFolder) -> None:
    change_json(run.summary, skipped_held_out={"a/b.csv": {"caption is empty": 1200}})
    assert [one.text for one in page_of(run).section("Data").all("p")] == [
        "Skipped 1 sample of the training data: cannot decode.",
        "Skipped 1,200 samples of the held-out a/b.csv: caption is empty.",
        "1.3 % of the captions fill the context (possibly truncated).",
    ]
    change_json(run.summary, skipped={}, skipped_held_out={})
    assert "No sample was skipped." in page_of(run).text


def test_all_settings_and_the_environment_are_listed_without_secrets(run: RunFolder) -> None:
    settings = yaml.safe_load(run.settings.read_text())
    settings["data"]["train"] = "s3://me:SECRET@host/a.tar?X-Signature=SECRET"
    settings["evaluation"]["retrieval"] = ["https://host/b.tar?key=SECRET", "c"]
    run.settings.write_text(yaml.safe_dump(settings))
    page = page_of(run)
    rows = dict(page.rows("Settings")[1:])
    assert rows["objective.num_prototypes"] == "1024" and rows["data.crop_scale"] == "[0.9, 1.0]"
    assert rows["objective.update"] == "alternating" and rows["objective.network_lr"] == "default"  # not in the file
    assert rows["data.train"] == "s3://***@host/a.tar"
    assert rows["evaluation.retrieval"] == '["https://host/b.tar", "c"]'
    assert dict(page.rows("Environment")[1:])["versions.torch"] == "2.13.0"
    assert "SECRET" not in run.report.read_text()


# What is missing or damaged


@pytest.mark.parametrize("name", FILES)
def test_any_file_may_be_missing(run: RunFolder, name: str) -> None:
    getattr(run, name).unlink(missing_ok=True)
    assert page_of(run).tiles["Samples per second"]


DAMAGES = [
    (name, damage)
    for name in FILES
    for damage in (b"[1, 2]\n", b"{broken\n", b"\xff\xfe\n", b"null\n", b"[" * 5000 + b"\n")
    if (name, damage) != ("settings", b"null\n")  # empty YAML: all defaults
]
BAD_QUERIES = [
    {"image_to_text": [{"x": 1}]},
    {"image_to_text": 3},
    {"text_to_image": [{"caption": "a", "rank": 1, "matches": 2}]},
]
DAMAGES += [("gallery", json.dumps(one).encode()) for one in BAD_QUERIES] + [("settings", b"objective: future\n")]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_file_is_named_in_one_line_with_what_to_do(run: RunFolder, name: str, damage: bytes) -> None:
    path = getattr(run, name)
    path.write_bytes(damage)
    with pytest.raises(UserError) as refused:
        write_report(run)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_an_incomplete_last_record_is_skipped(run: RunFolder) -> None:
    before = page_of(run).charts
    with run.records.open("a") as file:
        file.write('{"samples": 9')
    assert page_of(run).charts == before


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"is not a run: it has no settings\.yaml"):
        write_report(RunFolder(tmp_path / "empty"))
    with pytest.raises(UserError, match="is not a folder"):
        write_report(RunFolder(tmp_path / "nothing"))


# Curves


def noisy(count: int) -> list[float]:
    return [1 + 0.1 * math.sin(12.9 * place * place) for place in range(count)]


def lines_of(run: RunFolder, title: str, **values: list[float]) -> list[dict[str, Any]]:
    write_lines(run.records, records(**values)["records"])
    return page_of(run).charts[title]["lines"]


def test_a_noisy_curve_is_smoothed_with_its_values_behind_and_no_spike_lifts_it(run: RunFolder) -> None:
    values = noisy(300)
    (line,) = lines_of(run, "Loss", loss=values)
    assert [value for _, value in line["behind"][0]] == pytest.approx(values, rel=1e-4)
    assert max(abs(value - 1) for _, value in line["points"][20:]) < 0.06 < max(abs(value - 1) for value in values)
    (line,) = lines_of(run, "Loss", loss=[*values[:150], 1e9, *values[151:]])
    assert max(value for _, value in line["points"]) < 1.2


def test_smoothing_keeps_a_steep_start_and_looks_back_at_the_end(run: RunFolder) -> None:
    (line,) = lines_of(run, "Loss", loss=[100.0 - place for place in range(100)])
    assert [value for _, value in line["points"][:50]] == pytest.approx([100.0 - place for place in range(50)])
    assert line["points"][-1] == [99, pytest.approx(3.0)]  # the mean of the last five


def test_on_a_logarithmic_scale_the_mean_is_geometric_unless_a_value_is_not_positive(run: RunFolder) -> None:
    assert lines_of(run, "Gradient norm", gradient_norm=[1.0, 100.0])[0]["points"][-1][1] == pytest.approx(10.0)
    assert lines_of(run, "Gradient norm", gradient_norm=[0.0, 100.0])[0]["points"][-1][1] == pytest.approx(50.0)


@pytest.mark.parametrize("count", [320, 321, 10_007])
def test_a_long_line_has_at_most_320_points_with_every_peak_its_end_and_five_digits(run: RunFolder, count: int) -> None:
    values = [value + math.pi for value in noisy(count)]
    values[count // 3] = 7.0
    (line,) = lines_of(run, "Temperature", temperature=values)
    kept, points = line["points"], [[place, pytest.approx(value, rel=1e-4)] for place, value in enumerate(values)]
    assert len(kept) <= 320 and kept == sorted(kept) and [count // 3, 7.0] in kept and kept[-1] == points[-1]
    assert count > 320 or kept == points
    assert all(len(f"{value:.12g}") <= 6 for _, value in kept)


def test_the_normalizer_error_is_drawn_over_samples_beside_that_of_a_mini_batch(run: RunFolder) -> None:
    chart = page_of(run).charts["Normalizer error"]
    assert [line["name"] for line in chart["lines"]] == ["NeuCLIP", f"a mini-batch of {BATCH}"]
    assert chart["lines"][0]["points"][0] == [64_000, 0.96] and chart["lines"][0]["points"][-1] == [512_000, 0.12]
    assert chart["log"] and chart["dots"] and chart["values"] == "NeuCLIP: 0.12 a mini-batch of 128: 1.9"


def test_recall_has_a_colour_per_set_dashes_per_line_and_no_curve_of_one_evaluation(run: RunFolder) -> None:
    chart = page_of(run).charts["Recall@1 on held-out data"]
    assert [(line["name"], line["colour"], line["dash"]) for line in chart["lines"]] == [
        ("new-drawings, image to text", 0, 0),
        ("new-drawings, text to image", 0, 1),
        ("new-concepts, image to text", 1, 2),
        ("new-concepts, text to image", 1, 3),
    ]
    assert chart["values"].startswith("new-drawings, image to text: 39.9 % new-drawings, text to image: 35.1 %")
    sets = {"a/b.image_to_text_recall_at_1": 0.1, "c.image_to_text_recall_at_1": 0.2}  # in no common folder
    write_lines(run.evaluation, [{"samples": samples} | sets for samples in (9, 10)])
    lines = page_of(run).charts["Recall@1 on held-out data"]["lines"]
    assert [line["name"] for line in lines] == ["a/b, image to text", "c, image to text"]
    write_lines(run.evaluation, [{"samples": 9} | FIGURES_AT_END])
    assert "Recall@1 on held-out data" not in page_of(run).charts


def test_every_curve_that_training_records_is_drawn(run: RunFolder) -> None:
    charts = page_of(run).charts
    assert {"Loss", "Calibration", "In-batch accuracy", "Learning rate", "Waiting for data", "Speed"} <= set(charts)
    assert charts["Capped exponents"]["values"] == "2026-11-16-neuclip-tiny: 0"
    assert charts["Normalizers at eps"]["lines"][0]["points"][-1][1] == pytest.approx(0.04, abs=0.002)
