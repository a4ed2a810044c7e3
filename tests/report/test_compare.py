"""Runs side by side: groups, paired differences, what cannot be compared, and the files."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scipy import stats

from neuclip.cli.main import main
from neuclip.records import RunFolder, read_lines, write_lines
from tests.builders.pages import Shown, read_page
from tests.builders.run_folders import SET, change_json, write_results, write_run

RECALL, KEY = "image to text recall@1", (SET, "image_to_text_recall_at_1")
ERROR = ("training data", "normalizer_error")
SLOW, FAST = [0.10, 0.20, 0.30, 0.40], [0.25, 0.45, 0.50, 0.60]
OTHER = {"settings": {"model": {"name": "small"}}}


class Compared(NamedTuple):
    """What `neuclip compare --json` says on its page, on stderr and on stdout."""

    page: Shown
    notices: list[str]
    figures: dict[tuple[str, str], dict[str, Any]]  # by data set and metric: by group

    @property
    def groups(self) -> list[list[str]]:
        return [row[:4] for row in self.page.rows("What is compared")[1:]]

    def cells(self, words: str = RECALL, dataset: str = SET) -> list[str]:
        """Of one figure: its chance, then that of each group."""
        return next(row[2:] for row in self.page.rows("Final figures") if row[:2] == [dataset, words])

    def difference(self, key: tuple[str, str] = KEY, group: str = "b") -> dict[str, float] | None:
        return self.figures[key][group]["difference"]


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Compared]:
    def run(paths: list[Path], *flags: str) -> Compared:
        output = tmp_path / "compare.html"
        assert main(["compare", *map(str, paths), "--output", str(output), "--json", *flags]) == 0
        printed = capsys.readouterr()
        figures = {(one["dataset"], one["metric"]): one["groups"] for one in json.loads(printed.out)}
        page = read_page(output)
        assert page.notices == printed.err.splitlines()
        return Compared(page, page.notices, figures)

    return run


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


def interrupt(path: Path) -> None:
    """What it would have written after its fifth record is not there."""
    run = RunFolder(path)
    write_lines(run.records, read_lines(run.records)[:5])
    run.summary.unlink()
    run.evaluation.unlink()


# Groups


def test_runs_that_differ_only_in_their_seed_are_one_group_in_the_order_of_the_seeds(paths, compare) -> None:
    assert compare(paths[::-1]).groups == [
        ["neuclip", "NeuCLIP", "tiny", "1, 2, 3"],
        ["clip", "CLIP", "tiny", "1, 2, 3"],
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
def test_a_group_is_named_by_what_its_runs_have_in_common(tmp_path, compare, names: list[str], name: str) -> None:
    runs = [write_run(tmp_path / one, SLOW, seed=seed) for seed, one in enumerate(names)]
    assert [group[0] for group in compare(runs).groups] == [name]


def test_any_other_setting_makes_another_group_and_only_it_is_listed(tmp_path, compare) -> None:
    runs = [
        write_run(tmp_path / "a", SLOW),
        write_run(tmp_path / "b", SLOW, objective="siglip"),
        write_run(tmp_path / "c", SLOW, **OTHER),
    ]
    assert compare(runs).page.rows("Settings that differ") == [
        ["setting", "a", "b", "c"],
        ["model.name", "tiny", "tiny", "small"],
        ["objective.name", "clip", "siglip", "clip"],
        ["objective.form", "openclip", "–", "openclip"],
        ["objective.rho", "6.5", "–", "6.5"],
        ["objective.eps", "1e-06", "–", "1e-06"],
    ]


def test_an_unfinished_run_has_a_notice_and_is_left_out_unless_none_has_finished(paths, compare) -> None:
    interrupt(paths[0])
    one = compare(paths)
    assert one.notices == [
        "clip-1 has not finished: 500 of 1,000 samples seen, and it is left out of means and curves."
    ]
    assert one.cells()[1] == "42.0 ± 1.4 %"
    assert one.page.charts["Loss"]["lines"][0]["name"] == "clip, mean of 2"
    for path in paths[1:3]:
        interrupt(path)
    assert compare(paths).page.charts["Loss"]["lines"][0]["name"] == "clip, mean of 3"


def test_a_repeated_seed_has_a_notice_counts_in_the_mean_and_is_never_paired(paths, tmp_path, compare) -> None:
    again = write_run(tmp_path / "clip-again", [*SLOW[:-1], 0.60], seed=1)
    found = compare([*paths, again])
    assert found.notices == ["clip has seed 1 more than once: its standard deviation is not that over different seeds."]
    assert found.figures[KEY]["clip"]["values"] == [0.40, 0.60, 0.41, 0.43]
    assert found.difference(group="neuclip")["seeds"] == 2


# Differences


@pytest.mark.parametrize(("groups", "count"), [(2, 2), (2, 3), (4, 4), (3, 5), (2, 8), (2, 9), (4, 12)])
def test_the_interval_is_a_paired_t_interval_corrected_for_the_groups(tmp_path, compare, groups, count) -> None:
    draw = random.Random(groups * count)
    values = [[round(0.5 + 0.01 * place + draw.gauss(0, 0.02), 4) for _ in range(count)] for place in range(groups)]
    paths = [
        write_run(tmp_path / f"{name}-{seed}", [value], seed=seed, settings={"model": {"name": name}})
        for name, ours in zip("abcd", values, strict=False)
        for seed, value in enumerate(ours)
    ]
    found = compare(paths)
    for name, ours in list(zip("abcd", values, strict=False))[1:]:
        test = stats.ttest_rel(ours, values[0])
        interval = test.confidence_interval(1 - 0.05 / (groups - 1))
        gap = found.difference(group=name)
        assert (gap["low"], gap["high"]) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)
        assert gap["mean"] == pytest.approx((math.fsum(ours) - math.fsum(values[0])) / count) and gap["seeds"] == count
    assert found.difference(group="a") is None


def test_a_cell_has_mean_deviation_and_difference_and_a_tooltip_with_each_run(paths, compare) -> None:
    page = compare(paths).page
    assert compare(paths).cells() == ["0.10 %", "41.3 ± 1.5 %", "61.0 ± 1.0 % +19.7 [+15.9, +23.5]"]
    cells = [cell for cell in page.section("Final figures").all("td") if cell.attributes.get("title")]
    assert cells[0].attributes["title"] == "clip-1: 40.0 %, clip-2: 41.0 %, clip-3: 43.0 %"
    assert [one.text for one in cells[1].all("small", "strong")] == ["+19.7 [+15.9, +23.5]"]
    assert compare([paths[0], paths[3]]).cells() == ["0.10 %", "40.0 %", "60.0 %"]  # one seed has no spread
    assert "interval" not in compare([paths[0], paths[3]]).page.text


def test_differences_are_to_the_group_that_is_named(paths, compare) -> None:
    found = compare(paths, "--against", "neuclip")
    assert found.cells()[1:] == ["41.3 ± 1.5 % −19.7 [−23.5, −15.9]", "61.0 ± 1.0 %"]
    assert "mean difference to neuclip over the seeds that both have" in found.page.text


def test_only_the_measure_that_was_named_beforehand_gets_a_verdict(paths, compare) -> None:
    every, one = compare(paths), compare(paths, "--measure", ".".join(KEY))
    assert [len(found.page.section("Final figures").all("small", "strong")) for found in (every, one)] == [3, 1]
    verdict = f"{RECALL} on {SET}: neuclip is better than clip, +19.7 [+15.9, +23.5] over 3 seeds."
    assert verdict in one.page.text and "is better than" not in every.page.text
    assert "decide before training which figure counts" in every.page.text
    assert f"Only {'.'.join(KEY)} was chosen beforehand" in one.page.text


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ((0.0, 0.01, 0.03), "not shown to differ from a, "),
        ((0.20, 0.22, 0.21), "worse than a, "),
        ((-0.20, -0.18, -0.19), "better than a, "),
    ],
)
def test_lower_is_better_for_the_normalizer_error(tmp_path, compare, gaps: tuple[float, ...], word: str) -> None:
    errors = {"a": (1.0, 1.02, 1.01), "b": [1.01 + gap for gap in gaps]}
    paths = [
        write_run(tmp_path / f"{name}-{seed}", SLOW, seed=seed, errors=[value] * 4, settings={"model": {"name": name}})
        for name, ours in errors.items()
        for seed, value in enumerate(ours)
    ]
    page = compare(paths, "--measure", "normalizer_error.method").page
    assert f"normalizer error on training data: b is {word}" in page.text


@pytest.mark.parametrize(
    ("recalls", "errors", "shown", "error"),
    [
        ([0.123, 0.131], [1.07, 1.09], "12.7 ± 0.6 %", "1.08 ± 0.01"),
        ([0.0052, 0.0054], [0.123, 0.125], "0.53 ± 0.01 %", "0.124 ± 0.001"),
        ([0.5, 0.5001], [380.0, 384.0], "50.01 ± 0.01 %", "382 ± 3"),
        ([0.5, 0.5], [5e-5, 5e-5], "50.0 ± 0.0 %", "5e-5 ± 0"),
    ],
)
def test_mean_and_deviation_have_the_same_decimals(tmp_path, compare, recalls, errors, shown, error) -> None:
    runs = [
        write_run(tmp_path / f"a-{seed}", [recalls[seed]], seed=seed, errors=[errors[seed]], extra={"kinds.top5": 0.9})
        for seed in (0, 1)
    ]
    found = compare(runs)
    assert found.cells()[1] == shown and found.cells("normalizer error", "training data")[1] == error
    assert ["kinds", "top-5 accuracy", "–", "90.0 ± 0.0 %"] in found.page.rows("More figures")


# What cannot be compared


def test_other_training_data_have_a_notice_and_normalizer_errors_are_not_compared(tmp_path, compare) -> None:
    paths = seeds(tmp_path, "a", SLOW, errors=[3.0, 1.0, 0.5, 0.1], data="one" * 9)
    paths += seeds(tmp_path, "b", FAST, errors=[2.0, 1.0, 0.4, 0.2], data="two" * 9, **OTHER)
    found = compare(paths)
    assert found.notices == [
        "The runs were trained on different data, which may explain every difference below (fingerprint oneoneon in "
        "a-1, a-2, a-3; fingerprint twotwotw in b-1, b-2, b-3)."
    ]
    assert found.difference(ERROR) is None and found.difference() is not None


def test_runs_with_hold_out_count_as_trained_on_the_same_data(tmp_path, compare) -> None:
    held_out = {"data": {"hold_out": 5}}
    paths = [write_run(tmp_path / f"a-{seed}", SLOW, seed=seed, data=f"{seed}", settings=held_out) for seed in (1, 2)]
    assert compare(paths).notices == []


def test_a_set_of_another_size_has_a_notice_and_is_not_compared(tmp_path, compare) -> None:
    paths = seeds(tmp_path, "a", SLOW) + seeds(tmp_path, "b", FAST, extra={f"{SET}.images": 999}, **OTHER)
    found = compare(paths)
    assert found.notices == [
        f"{SET} was not measured in the same way in all runs (1,000 images, 1,000 captions, 1 per image in a-1, a-2, "
        "a-3; 999 images, 1,000 captions, 1 per image in b-1, b-2, b-3): these figures cannot be compared."
    ]
    assert found.cells() == ["–", "41.3 ± 1.5 %", "61.3 ± 1.5 %"]
    assert found.difference(("kinds", "top1")) is not None


def test_normalizer_errors_with_another_eps_are_not_compared(tmp_path, compare) -> None:
    paths = seeds(tmp_path, "a", SLOW, errors=[3.0, 1.0, 0.5, 0.1])
    paths += seeds(tmp_path, "b", FAST, errors=[2.0, 1.0, 0.4, 0.2], **OTHER)
    assert compare(paths).difference(ERROR) is not None
    change_json(RunFolder(paths[0]).summary, normalizer_error={"eps": 1e-9, "estimators": {"method": {"mean": 0.1}}})
    found = compare(paths)
    notice = "normalizer error was not measured in the same way in all runs (eps 1e-09 in a-1; eps 1e-06 in"
    assert notice in found.notices[0]
    assert found.difference(ERROR) is None


# Task results


def test_an_average_needs_all_tasks_with_all_samples(tmp_path, compare) -> None:
    average = ("mean of 38 tasks", "Datacomp Average")
    assert compare([write_results(tmp_path / "whole.jsonl")]).cells(*average) == ["–", "19.5 %"]
    part = compare([write_results(tmp_path / "part.jsonl", leave_out=3)])
    assert "Datacomp Average needs all 38 tasks in full: part has 35." in part.notices
    few = compare([write_results(tmp_path / "few.jsonl", meta={"items": 10})])
    assert not [metric for _, metric in few.figures if metric == "average"]
    assert few.cells("acc1", "CIFAR-10") == ["–", "2.0 %"]


def test_a_run_with_task_results_shows_tasks_and_averages_with_known_chance_levels(paths, compare) -> None:
    write_results(paths[0] / "tasks.jsonl", meta={"chance": 0.1})
    found = compare(paths)
    assert found.cells("acc1", "CIFAR-10") == ["10.0 %", "2.0 %", "–"]
    assert found.cells("mean of 38 tasks", "Datacomp Average") == ["10.0 %", "19.5 %", "–"]
    assert found.cells()


def test_tasks_measured_on_other_data_have_a_notice_and_are_not_compared(paths, compare) -> None:
    keys = [("CIFAR-10", "acc1"), ("Datacomp Average", "average")]
    for place, path in enumerate(paths):
        write_results(path / "tasks.jsonl", add=0.001 * place, meta={"data": "a"})
    found = compare(paths)
    assert found.notices == [] and all(found.difference(key, "neuclip") for key in keys)
    for path in paths[3:]:
        write_results(path / "tasks.jsonl", add=0.1, meta={"data": "b"})
    found = compare(paths)
    assert found.notices == [
        "Caltech-101, CIFAR-10, CIFAR-100, CLEVR Counts and 34 more were not measured in the same way in all runs "
        "(clip-1, clip-2, clip-3 / neuclip-1, neuclip-2, neuclip-3): these figures cannot be compared."
    ]
    assert [found.difference(key, "neuclip") for key in keys] == [None, None]


def test_an_incomplete_last_line_of_task_results_is_skipped(tmp_path, compare) -> None:
    path = write_results(tmp_path / "cut.jsonl")
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:5]) + "\n" + whole[5][:20])
    assert len(compare([path]).figures) == 5


# Page, files and the command


def test_curves_have_a_line_per_group_and_only_those_that_were_measured(tmp_path, compare) -> None:
    paths = seeds(tmp_path, "a", SLOW, errors=[3.0, 1.0, 0.5, 0.1], objective="neuclip")
    paths += seeds(tmp_path, "b", FAST, objective="siglip")
    page = compare(paths).page
    curves = ["Loss", f"Recall@1 on {SET}", "Temperature", "Calibration", "In-batch accuracy", "Normalizer error"]
    assert list(page.charts) == curves and "compare their course, not their height" in page.text
    recall = page.charts[f"Recall@1 on {SET}"]["lines"]
    assert [line["name"] for line in recall] == ["a, mean of 3", "b, mean of 3"]
    assert recall[1]["points"][-1] == [1000, pytest.approx(0.6133, abs=1e-4)] and len(recall[1]["behind"]) == 3
    assert [line["name"] for line in page.charts["Normalizer error"]["lines"]] == ["a, mean of 3"]


def test_a_mean_is_taken_where_all_runs_have_a_value_and_dashes_tell_groups_of_one_colour(tmp_path, compare) -> None:
    paths = [write_run(tmp_path / f"{place}", SLOW, settings={"model": {"name": f"m{place}"}}) for place in range(8)]
    lines = compare(paths).page.charts["Temperature"]["lines"]
    assert [(line["colour"], line["dash"]) for line in lines] == [(place % 6, place) for place in range(8)]
    script, style = (
        resources.files("neuclip.report").joinpath("templates", name).read_text() for name in ("chart.js", "style.css")
    )
    dashes = style.count("svg .dash-") + 1  # the first is a whole line
    assert f"DASHES = {dashes};" in script and len({(place % 6, place % dashes) for place in range(12)}) == 12
    paths = seeds(tmp_path, "a", SLOW, (0.0, 0.01))
    for path, numbers in zip(paths, ({100: 0.1, 200: 0.3}, {200: 0.5, 300: 0.9}), strict=True):
        write_lines(RunFolder(path).records, [{"samples": x, "temperature": tau} for x, tau in numbers.items()])
    assert "Temperature" not in compare(paths).page.charts  # one point makes no curve
    write_lines(RunFolder(paths[0]).records, [{"samples": x, "temperature": x / 1000} for x in (100, 200, 300)])
    (line,) = compare(paths).page.charts["Temperature"]["lines"]
    assert line["points"] == [[200, 0.35], [300, 0.6]]


def test_every_output_format_has_the_figures_and_the_notices(paths, tmp_path, capsys) -> None:
    interrupt(paths[0])
    RunFolder(paths[5]).summary.unlink()
    outputs = {ending: tmp_path / "new" / f"all.{ending}" for ending in ("html", "md", "tex", "csv")}
    assert main(["compare", *map(str, paths), "--output", ",".join(map(str, outputs.values()))]) == 0
    printed = capsys.readouterr().out
    row = r"image to text recall@1 +0\.10 % +42\.0 ± 1\.4 % +61\.0 ± 1\.4 %"
    assert re.search(rf"{SET} +{row}", printed) and all(str(path) in printed for path in outputs.values())
    for ending in ("md", "tex"):
        text = outputs[ending].read_text()
        assert "clip-1 has not finished" in text and "42.0" in text and "standard deviation" in text
    rows = list(csv.DictReader(outputs["csv"].open()))
    of_one = [row for row in rows if row["run"] == "neuclip-2"]
    assert [(row["dataset"], row["metric"], row["value"]) for row in of_one] == [
        (*KEY, "0.62"),
        (SET, "text_to_image_recall_at_1", "0.31"),
        (SET, "image_to_text_recall_at_5", "1.24"),
        ("kinds", "top1", "0.62"),
        ("training data", "calibration", "1.1"),
        ("training", "samples_per_second", "50.0"),
    ]
    facts = {tuple(row[name] for name in ("group", "seed", "finished", "samples")) for row in of_one}
    assert facts == {("neuclip", "2", "true", "1000")}
    assert {row["finished"] for row in rows if row["run"] == "neuclip-3"} == {"false"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["clip-1", "clip-1"], "clip-1 is given twice"),
        (["clip-1", "--output", "page.pdf"], "--output page.pdf: give a name that ends in .html, .md, .tex, .csv"),
        (["clip-9"], "no run at clip-9; did you mean clip-"),
        (["clip-1", "--against", "siglip"], "no group 'siglip' to compare with; the groups are clip"),
        (["clip-1", "--measure", "kinds.top5"], "no figure 'kinds.top5'; the figures are "),
        (["empty.jsonl"], "empty.jsonl contains no task result"),
        (["words.jsonl"], "words.jsonl line 1 is not a task result"),
        (["first.jsonl"], "first.jsonl line 1 is not a task result"),
        (["list.jsonl"], "list.jsonl line 1 is not a task result"),
        (["middle.jsonl"], "middle.jsonl line 2 is not a task result"),
        (["null.jsonl"], "null.jsonl contains no task result"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(paths, tmp_path, monkeypatch, capsys, arguments, message) -> None:
    result = '{"key": "b", "metrics": {"main_metric": %s}}\n'
    texts = {"empty": "", "words": "not json\n", "list": "[1]\n", "null": result % "null"}
    texts |= {
        "first": '{"key": "a", "metrics": {}}\n' + result % "0.5",
        "middle": result % "0.5" + "{\n" + result % "1",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["compare", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before
