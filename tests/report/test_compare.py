"""Runs side by side: groups, paired differences, what cannot be compared, and the files."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from neuclip.cli.main import main
from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.report.compare import Comparison, compare, t_quantile
from neuclip.report.compare_page import (
    comparison_figures,
    comparison_page,
    decimals,
    figure_cell,
    figures_csv,
    final_table,
    main_charts,
    settings_table,
    verdicts,
    write_comparison,
)
from neuclip.report.measures import NORMALIZER_ERROR, Measure
from neuclip.report.page import render_html
from tests.report.sample_runs import SET, change_json, write_results, write_run
from tests.report.test_page import HOSTILE, refuse_foreign, visible_text

RECALL = "image_to_text_recall_at_1"
SLOW, FAST = [0.10, 0.20, 0.30, 0.40], [0.25, 0.45, 0.50, 0.60]


def seeds(folder: Path, name: str, recalls: list[float], gaps: tuple[float, ...] = (0.0, 0.01, 0.03), **more: Any):
    """Runs with seeds 1, 2, ...: their final recall is that of `recalls` and a gap."""
    return [
        write_run(folder / f"{name}-{seed}", [*recalls[:-1], round(recalls[-1] + gap, 4)], seed=seed, **more)
        for seed, gap in enumerate(gaps, start=1)
    ]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    clip = seeds(tmp_path, "clip", SLOW, objective="clip")
    other = {"objective": {"inner_steps": 3}}
    return clip + seeds(tmp_path, "neuclip", FAST, (0.0, 0.02, 0.01), objective="neuclip", settings=other)


def measure_of(comparison: Comparison, metric: str = RECALL, dataset: str = SET) -> Measure:
    return next(one for one in comparison.measures if (one.metric, one.dataset) == (metric, dataset))


def cells(comparison: Comparison, metric: str = RECALL, dataset: str = SET) -> list[str]:
    measure = measure_of(comparison, metric, dataset)
    return [str(figure_cell(comparison, group, measure)) for group in comparison.groups]


# Groups


def test_runs_that_differ_only_in_their_seed_are_one_group_in_the_order_of_the_seeds(paths: list[Path]) -> None:
    groups = compare(paths[::-1]).groups
    assert [(group.name, [member.seed for member in group.members]) for group in groups] == [
        ("neuclip", [1, 2, 3]),
        ("clip", [1, 2, 3]),
    ]


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["clip-1", "clip-2"], "clip"),
        (["clip_seed1", "clip_seed2"], "clip"),
        (["clip-s10", "clip-s11"], "clip"),
        (["one", "two"], "one and 1 more"),
        (["here/clip", "there/clip"], "clip"),
    ],
)
def test_a_group_is_named_by_what_its_runs_have_in_common(tmp_path: Path, names: list[str], name: str) -> None:
    runs = [write_run(tmp_path / one, SLOW, seed=seed) for seed, one in enumerate(names)]
    (group,) = compare(runs).groups
    assert group.name == name and len({member.name for member in group.members}) == 2


def test_any_other_setting_makes_another_group_and_only_it_is_listed(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", SLOW),
        write_run(tmp_path / "b", SLOW, objective="siglip"),
        write_run(tmp_path / "c", SLOW, settings={"model": {"name": "small"}}),
    ]
    table = settings_table(compare(runs).groups)
    assert [list(row) for row in table.rows] == [
        ["model.name", "tiny", "tiny", "small"],
        ["objective.name", "clip", "siglip", "clip"],
        ["objective.form", "openclip", "–", "openclip"],
        ["objective.rho", "6.5", "–", "6.5"],
        ["objective.eps", "1e-06", "–", "1e-06"],
    ]


def test_an_unfinished_run_is_told_and_left_out_unless_none_has_finished(paths: list[Path]) -> None:
    RunFolder(paths[0]).summary.unlink()
    records = RunFolder(paths[0]).records
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:5]))
    RunFolder(paths[0]).evaluation.unlink()
    comparison = compare(paths)
    sentence = "clip-1 has not finished: 500 of 1,000 samples seen, and it is left out of means and curves."
    assert list(comparison.notices()) == [sentence]
    assert cells(comparison)[0] == "42.0 ± 1.4 %"
    assert main_charts(comparison)[0].lines[0].name == "clip, mean of 2"
    for path in paths[1:3]:
        RunFolder(path).summary.unlink()
        change = RunFolder(path).records.read_text().splitlines(keepends=True)[:5]
        RunFolder(path).records.write_text("".join(change))
        RunFolder(path).evaluation.unlink()
    assert [len(group.counted) for group in compare(paths).groups] == [3, 3]


def test_a_repeated_seed_is_told_counts_in_the_mean_and_is_nobodys_partner(paths: list[Path], tmp_path: Path) -> None:
    again = write_run(tmp_path / "clip-again", [*SLOW[:-1], 0.60], seed=1)
    comparison = compare([*paths, again])
    assert list(comparison.notices()) == ["clip has seed 1 more than once: its spread is not that of seeds."]
    clip, neuclip = comparison.groups
    assert clip.values(measure_of(comparison)) == [0.40, 0.60, 0.41, 0.43]
    gap = comparison.difference(neuclip, measure_of(comparison))
    assert gap and gap.seeds == 2


# Differences


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8, 30, 101])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.995, 0.9995])
def test_the_quantile_of_students_t_is_that_of_scipy(probability: float, freedom: int) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-9)


@pytest.mark.parametrize("groups", [2, 4])
def test_the_interval_is_that_of_a_paired_t_test_shared_by_all_groups(tmp_path: Path, groups: int) -> None:
    values = [(0.0, 0.03, 0.01, 0.04), (0.02, 0.05, 0.02, 0.09), (0.1, 0.0, 0.1, 0.0), (0.5, 0.5, 0.5, 0.51)][:groups]
    paths = [
        path
        for place, gaps in enumerate(values)
        for path in seeds(tmp_path, f"m{'abcd'[place]}", SLOW, gaps, settings={"model": {"name": f"m{place}"}})
    ]
    comparison = compare(paths)
    for group, gaps in list(zip(comparison.groups, values, strict=True))[1:]:
        gap = comparison.difference(group, measure_of(comparison))
        assert gap is not None
        test = stats.ttest_rel(gaps, values[0])
        interval = test.confidence_interval(1 - 0.05 / (groups - 1))
        assert (gap.low, gap.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)
        assert gap.mean == pytest.approx(math.fsum(gaps) / 4 - math.fsum(values[0]) / 4) and gap.seeds == 4
        assert gap.is_shown == (test.pvalue < 0.05 / (groups - 1))
    assert comparison.difference(comparison.groups[0], measure_of(comparison)) is None


def test_a_cell_has_mean_deviation_difference_and_under_the_pointer_each_run(paths: list[Path]) -> None:
    comparison = compare(paths)
    clip, neuclip = (figure_cell(comparison, group, measure_of(comparison)) for group in comparison.groups)
    assert clip == ("41.3 ± 1.5 %", "", "clip-1: 40.0 %, clip-2: 41.0 %, clip-3: 43.0 %", False)
    assert neuclip[:2] == ("61.0 ± 1.0 %", "+19.7 [+15.9, +23.5]") and neuclip.strong
    assert figure_cell(comparison, clip := comparison.groups[0], Measure("b", "top1", "")).text == "–" and clip


def test_differences_are_to_the_group_that_is_named(paths: list[Path]) -> None:
    comparison = compare(paths, against="neuclip")
    assert cells(comparison)[0] == "41.3 ± 1.5 % (−19.7 [−23.5, −15.9])"
    assert any("mean difference to neuclip over the seeds" in note for note in final_table(comparison).notes)
    with pytest.raises(UserError, match="no group 'siglip' to compare with; there are clip, neuclip"):
        compare(paths, against="siglip")


def test_only_the_measure_that_was_named_beforehand_gets_a_verdict(paths: list[Path]) -> None:
    every, one = compare(paths), compare(paths, measure=f"{SET}.{RECALL}")
    strong = [sum(getattr(cell, "strong", False) for row in final_table(c).rows for cell in row) for c in (every, one)]
    assert strong == [3, 1]
    assert list(verdicts(every)) == []
    assert list(verdicts(one)) == [
        f"image to text recall@1 on {SET}: neuclip is better than clip, +19.7 [+15.9, +23.5] over 3 seeds."
    ]
    assert "decide before training which figure counts" in final_table(every).notes[1]
    assert f"Only {SET}.{RECALL} was chosen beforehand" in final_table(one).notes[1]
    with pytest.raises(UserError, match=r"no figure 'kinds\.top5'; there are "):
        compare(paths, measure="kinds.top5")


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ((0.0, 0.01, 0.03), "not shown to differ from a, "),
        ((0.20, 0.22, 0.21), "worse than a, "),
        ((-0.20, -0.18, -0.19), "better than a, "),
    ],
)
def test_lower_is_better_for_the_normalizer_error(tmp_path: Path, gaps: tuple[float, ...], word: str) -> None:
    errors = {"a": (1.0, 1.02, 1.01), "b": [1.01 + gap for gap in gaps]}
    paths = [
        write_run(tmp_path / f"{name}-{seed}", SLOW, seed=seed, errors=[value] * 4, settings={"model": {"name": name}})
        for name, ours in errors.items()
        for seed, value in enumerate(ours)
    ]
    (sentence,) = verdicts(compare(paths, measure="normalizer_error.method"))
    assert f"normalizer error on training data: b is {word}" in sentence


def test_one_seed_has_neither_spread_nor_difference(paths: list[Path]) -> None:
    comparison = compare([paths[0], paths[3]])
    assert cells(comparison) == ["40.0 %", "60.0 %"]
    assert not any("interval" in note for note in final_table(comparison).notes)


@pytest.mark.parametrize(
    ("values", "percent", "places"),
    [
        ([0.123, 0.131], True, 1),
        ([0.0052], True, 2),
        ([0.5, 0.5001], True, 2),
        ([1.07], False, 2),
        ([0.123], False, 3),
        ([5e-5], False, None),
        ([0.0], False, None),
        ([380.0], False, 0),
    ],
)
def test_mean_deviation_and_difference_have_the_same_decimals(values: list[float], percent: bool, places: int) -> None:
    assert decimals(values, Measure("a", "b", "", percent=percent)) == places


# What cannot be compared


def test_other_training_data_are_told_and_leave_no_difference_of_normalizer_errors(tmp_path: Path) -> None:
    paths = seeds(tmp_path, "a", SLOW, errors=[3.0, 1.0], data="one" * 9)
    paths += seeds(tmp_path, "b", FAST, errors=[2.0, 1.0], data="two" * 9, settings={"model": {"name": "small"}})
    comparison = compare(paths)
    assert list(comparison.notices()) == [
        "The runs were trained on different data, which may explain every difference below (fingerprint oneoneon in "
        "a-1, a-2, a-3; fingerprint twotwotw in b-1, b-2, b-3)."
    ]
    assert comparison.difference(comparison.groups[1], NORMALIZER_ERROR) is None
    assert comparison.difference(comparison.groups[1], measure_of(comparison)) is not None


def test_data_held_out_by_the_seed_is_the_same_data(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"a-{seed}", SLOW, seed=seed, data=f"{seed}", settings={"data": {"hold_out": 5}})
        for seed in (1, 2)
    ]
    assert list(compare(paths).notices()) == []


def test_a_set_of_another_size_is_told_and_not_compared(tmp_path: Path) -> None:
    paths = seeds(tmp_path, "a", SLOW)
    paths += seeds(tmp_path, "b", FAST, extra={f"{SET}.images": 999}, settings={"model": {"name": "small"}})
    comparison = compare(paths)
    assert list(comparison.notices()) == [
        f"{SET} is not the same in all runs (1,000 images, 1,000 captions, 1 per image in a-1, a-2, a-3; 999 images, "
        "1,000 captions, 1 per image in b-1, b-2, b-3): these figures cannot be compared."
    ]
    assert cells(comparison)[1] == "61.3 ± 1.5 %"
    row = next(row for row in final_table(comparison).rows if row[:2] == [SET, "image to text recall@1"])
    assert row[2] == "–"
    assert comparison.difference(comparison.groups[1], measure_of(comparison, "top1", "kinds")) is not None


def test_normalizer_errors_with_another_eps_are_not_compared(tmp_path: Path) -> None:
    paths = [*seeds(tmp_path, "a", SLOW, errors=[3.0, 1.0, 0.5, 0.1])]
    paths += seeds(tmp_path, "b", FAST, errors=[2.0, 1.0, 0.4, 0.2], settings={"model": {"name": "small"}})
    assert compare(paths).difference(compare(paths).groups[1], NORMALIZER_ERROR) is not None
    change_json(RunFolder(paths[0]).summary, normalizer_error={"eps": 1e-9, "estimators": {"method": {"mean": 0.1}}})
    comparison = compare(paths)
    assert "normalizer error is not the same in all runs (eps 1e-09 in a-1; eps 1e-06 in" in next(comparison.notices())
    assert comparison.difference(comparison.groups[1], NORMALIZER_ERROR) is None


# Task results


def test_averages_are_there_only_when_complete_and_in_full(tmp_path: Path) -> None:
    comparison = compare([write_results(tmp_path / "whole.jsonl")])
    assert cells(comparison, "average", "Datacomp Average") == ["19.5 %"]
    part = compare([write_results(tmp_path / "part.jsonl", leave_out=3)])
    assert "Datacomp Average needs all 38 tasks in full: part has 35." in list(part.notices())
    few = compare([write_results(tmp_path / "few.jsonl", meta={"items": 10})])
    assert not [one for one in few.measures if one.metric == "average"]
    assert cells(few, "acc1", "CIFAR-10") == ["2.0 %"]


def test_a_run_with_task_results_shows_both_with_chance_where_it_was_computed(paths: list[Path]) -> None:
    write_results(paths[0] / "tasks.jsonl", meta={"chance": 0.1})
    rows = final_table(compare(paths)).rows
    shown = {(row[0], row[1]): [str(cell) for cell in row[2:]] for row in rows}
    assert shown["CIFAR-10", "acc1"] == ["10.0 %", "2.0 %", "–"]
    assert shown["Datacomp Average", "mean of 38 tasks"] == ["10.0 %", "19.5 %", "–"]
    assert (SET, "image to text recall@1") in shown


def test_tasks_measured_on_other_data_are_told_and_not_compared(paths: list[Path]) -> None:
    for place, path in enumerate(paths):
        write_results(path / "tasks.jsonl", add=0.001 * place, meta={"data": "a"})
    assert list(compare(paths).notices()) == []
    assert compare(paths).difference(compare(paths).groups[1], measure_of(compare(paths), "acc1", "CIFAR-10"))
    for path in paths[3:]:
        write_results(path / "tasks.jsonl", add=0.1, meta={"data": "b"})
    comparison = compare(paths)
    assert list(comparison.notices()) == [
        "Caltech-101, CIFAR-10, CIFAR-100, CLEVR Counts and 34 more are not the same in all runs "
        "(clip-1, clip-2, clip-3 / neuclip-1, neuclip-2, neuclip-3): these figures cannot be compared."
    ]
    for metric, dataset in (("acc1", "CIFAR-10"), ("average", "Datacomp Average")):
        assert comparison.difference(comparison.groups[1], measure_of(comparison, metric, dataset)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no task result"),
        ("not json\n", "line 1 is not a task result"),
        ('{"key": "a", "metrics": {}}\n{"key": "b", "metrics": {"main_metric": 0.5}}\n', "line 1 is not a task result"),
        ("[1]\n", "line 1 is not a task result"),
        ('{"key": "a", "metrics": {"main_metric": null}}\n', "holds no task result"),
    ],
)
def test_a_file_that_holds_no_results_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        compare([path])
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_a_line_cut_off_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    path = write_results(tmp_path / "cut.jsonl")
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:5]) + "\n" + whole[5][:20])
    assert len(compare([path]).groups[0].members[0].tasks) == 5


# Page, files and the command


def test_curves_have_a_line_per_group_and_only_those_that_were_measured(tmp_path: Path) -> None:
    paths = seeds(tmp_path, "a", SLOW, errors=[3.0, 1.0, 0.5, 0.1], objective="neuclip")
    paths += seeds(tmp_path, "b", FAST, objective="siglip")
    charts = {chart.title: chart for chart in main_charts(compare(paths))}
    assert list(charts) == [
        "Loss",
        f"Recall@1 on {SET}",
        "Temperature",
        "Calibration",
        "In-batch accuracy",
        "Normalizer error",
    ]
    assert [line.name for line in charts["Loss"].lines] == ["a, mean of 3", "b, mean of 3"]
    assert "compare their course, not their height" in charts["Loss"].note
    recall = charts[f"Recall@1 on {SET}"].lines[1]
    assert recall.points[-1] == (1000, pytest.approx(0.6133, abs=1e-4)) and len(recall.behind) == 3
    assert [line.name for line in charts["Normalizer error"].lines] == ["a, mean of 3"]


def test_the_page_is_well_formed_self_contained_and_runs_no_hostile_text(tmp_path: Path) -> None:
    hostile = {f"{HOSTILE}.top1": 0.5, f"{HOSTILE}.images": 9}
    paths = [write_run(tmp_path / f"run-{seed}", SLOW, seed=seed, extra=hostile) for seed in (1, 2)]
    name = {"run": {"name": HOSTILE}, "model": {"name": HOSTILE}}
    paths.append(write_run(tmp_path / "other", FAST, settings=name, extra=hostile))
    page = render_html(comparison_page(compare(paths)))
    refuse_foreign(page)
    assert "<script>alert" not in page and f"comparison run, {HOSTILE}" in visible_text(page)


def test_csv_has_one_row_per_run_and_figure_with_exact_values(paths: list[Path]) -> None:
    RunFolder(paths[5]).summary.unlink()
    rows = list(csv.DictReader(io.StringIO(figures_csv(compare(paths)))))
    of_one = [row for row in rows if row["run"] == "neuclip-2"]
    assert [(row["dataset"], row["metric"], row["value"]) for row in of_one] == [
        (SET, RECALL, "0.62"),
        (SET, "text_to_image_recall_at_1", "0.31"),
        (SET, "image_to_text_recall_at_5", "1.24"),
        ("kinds", "top1", "0.62"),
        ("training data", "calibration", "1.1"),
        ("training", "samples_per_second", "50.0"),
    ]
    assert {(row["group"], row["seed"], row["finished"], row["samples"]) for row in of_one} == {
        ("neuclip", "2", "true", "1000")
    }
    assert {row["finished"] for row in rows if row["run"] == "neuclip-3"} == {"false"}


def test_json_has_every_value_and_the_intervals(paths: list[Path]) -> None:
    first = comparison_figures(compare(paths))[0]
    assert (first["dataset"], first["metric"]) == (SET, RECALL)
    assert first["groups"]["clip"]["values"] == [0.40, 0.41, 0.43] and first["groups"]["clip"]["difference"] is None
    neuclip = first["groups"]["neuclip"]
    assert neuclip["mean"] == pytest.approx(0.61) and neuclip["standard_deviation"] == pytest.approx(0.01)
    assert neuclip["difference"]["seeds"] == 3 and neuclip["difference"]["low"] == pytest.approx(0.1587, abs=1e-4)


@pytest.mark.parametrize("ending", [".md", ".tex"])
def test_a_table_alone_carries_the_notices(paths: list[Path], tmp_path: Path, ending: str) -> None:
    RunFolder(paths[0]).evaluation.unlink()
    RunFolder(paths[0]).summary.unlink()
    text = write_comparison(compare(paths), tmp_path / f"table{ending}").read_text()
    assert "clip-1 has not finished" in text and "42.0" in text and "standard deviation" in text


def test_the_command_writes_what_is_asked_and_prints_the_final_figures(
    paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [tmp_path / "new" / f"all{ending}" for ending in (".html", ".md", ".tex", ".csv")]
    assert main(["compare", *map(str, paths), "--output", ",".join(map(str, outputs))]) == 0
    printed = capsys.readouterr().out
    row = r"image to text recall@1 +0\.10 % +41\.3 ± 1\.5 % +61\.0 ± 1\.0 % \(\+19\.7 \[\+15\.9, \+23\.5\]\)"
    assert re.search(rf"{SET} +{row}", printed)
    assert all(str(path) in printed and path.stat().st_size > 100 for path in outputs)
    assert main(["compare", str(paths[0]), "--output", str(outputs[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["metric"] == RECALL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clip-1", "clip-1"], "clip-1 is given twice"),
        (["clip-1", "--output", "page.pdf"], "--output page.pdf: give a name that ends in .html, .md, .tex, .csv"),
        (["clip-9"], "no run at clip-9; did you mean clip-"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    arguments: list[str],
    message: str,
    paths: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["compare", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before
