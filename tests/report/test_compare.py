from __future__ import annotations

import csv
import io
import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from neuclip.cli.main import main
from neuclip.errors import UserError
from neuclip.records import RunFolder, read_lines
from neuclip.report.compare import Comparison, compare, comparison_as_dict, write_comparison
from neuclip.report.compare_curves import all_curves
from neuclip.report.compare_inputs import different_settings, letters
from neuclip.report.compare_scores import Score, Spread, best_group
from neuclip.report.compare_tables import LATEX, with_spread
from tests.report.compared_runs import SET, write_results, write_run
from tests.report.sample_run import write_lines
from tests.report.test_page import HOSTILE, structure, visible_text

RECALL = "image_to_text_recall_at_1"
SLOW, FAST = [0.10, 0.20, 0.30, 0.40], [0.25, 0.45, 0.50, 0.60]


def seeds(folder: Path, name: str, recalls: list[float], **more: object) -> list[Path]:
    """Three runs; the final recalls of seeds 1, 2 and 3 are 0, 1 and 3 points above."""
    return [
        write_run(folder / f"{name}-{seed}", [*recalls[:-1], round(recalls[-1] + add, 2)], seed=seed, **more)  # type: ignore[arg-type]
        for seed, add in ((1, 0.0), (2, 0.01), (3, 0.03))
    ]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    clip = seeds(tmp_path, "clip", SLOW, objective="clip")
    return clip + seeds(tmp_path, "neuclip", FAST, objective="neuclip", settings={"objective": {"inner_steps": 3}})


def score_of(comparison: Comparison, metric: str, dataset: str = SET) -> Score:
    return next(one for one in comparison.scores if one.measure.metric == metric and one.measure.dataset == dataset)


def write_as(comparison: Comparison, path: Path) -> str:
    write_comparison(comparison, path)
    return path.read_text(encoding="utf-8")


def test_runs_that_differ_only_in_their_seed_are_one_group_in_the_order_of_the_seeds(paths: list[Path]) -> None:
    groups = compare(paths[::-1]).groups
    assert [(group.letter, group.name) for group in groups] == [("A", "neuclip"), ("B", "clip")]
    assert [[member.seed for member in group.members] for group in groups] == [["1", "2", "3"]] * 2


def test_runs_of_one_group_may_lie_in_different_folders(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / place / f"clip-{seed}", SLOW, seed=seed) for seed, place in enumerate(("here", "there"))
    ]
    assert [group.name for group in compare(runs).groups] == ["clip"]


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["clip-seed1", "clip-seed2"], "clip"),
        (["towers-1", "towers-12"], "towers"),
        (["clip-10", "clip-11"], "clip"),
        (["vit16_s0", "vit16_s1"], "vit16"),
        (["one", "two"], "one and 1 more"),
    ],
)
def test_a_group_is_named_by_what_its_runs_have_in_common(tmp_path: Path, names: list[str], name: str) -> None:
    runs = [write_run(tmp_path / one, SLOW, seed=seed) for seed, one in enumerate(names)]
    assert [group.name for group in compare(runs).groups] == [name]


def test_runs_of_the_same_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / place / "first", SLOW, objective=place) for place in ("clip", "siglip")]
    assert [group.name for group in compare(runs).groups] == [str(run) for run in runs]


def test_any_other_setting_makes_another_group_and_only_it_is_listed(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"run{size}", SLOW, settings={"train": {"batch_size": size}}, seed=size)
        for size in (100, 200)
    ]
    assert different_settings(compare(runs).groups) == {"train.batch_size": ["100", "200"]}


def test_settings_of_one_method_alone_come_after_those_that_all_have(paths: list[Path]) -> None:
    different = different_settings(compare(paths).groups)
    assert next(iter(different)) == "objective.name" and different.pop("objective.name") == ["clip", "neuclip"]
    assert (different["objective.form"], different["objective.inner_steps"]) == (["openclip", None], [None, "3"])
    assert all(None in values and name.startswith("objective.") for name, values in different.items())


def test_the_spread_is_the_standard_deviation_of_a_sample_over_all_seeds(paths: list[Path]) -> None:
    spread = score_of(compare(paths), RECALL).spreads[0]
    assert spread is not None and spread.values == [0.40, 0.41, 0.43]
    assert spread.mean == pytest.approx(statistics.mean([0.40, 0.41, 0.43]))
    assert spread.deviation == pytest.approx(statistics.stdev([0.40, 0.41, 0.43]))


def test_one_seed_has_no_spread_and_nothing_is_called_best(paths: list[Path]) -> None:
    comparison = compare([paths[0], *paths[3:]])
    spread = score_of(comparison, RECALL).spreads[0]
    assert spread is not None and spread.deviation is None
    assert all(score.best is None for score in comparison.scores)


@pytest.mark.parametrize(
    ("values", "better", "best"),
    [
        ([[0.40, 0.41, 0.42], [0.50, 0.51, 0.52]], "higher", 1),
        ([[0.40, 0.41, 0.42], [0.50, 0.51, 0.52]], "lower", 0),
        ([[0.40, 0.41, 0.42], [0.50, 0.51, 0.52]], "", None),
        ([[0.40, 0.45, 0.50], [0.49, 0.54, 0.59]], "higher", None),  # apart by 0.09, both deviations are 0.05
        ([[0.40, 0.41, 0.42], [0.50, 0.51, 0.52], [0.51, 0.52, 0.53]], "higher", None),  # the second is too near
        ([[0.40, 0.41, 0.42], [0.50, 0.52]], "higher", None),  # two runs are too few
        ([[0.40, 0.41, 0.42], [0.50]], "higher", None),
        ([[0.40, 0.41, 0.42], []], "higher", None),
        ([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], "higher", None),
    ],
)
def test_the_best_leads_by_more_than_both_deviations(values: list[list[float]], better: str, best: int | None) -> None:
    assert best_group([Spread(one) if one else None for one in values], better) == best


def test_a_score_counts_as_reached_at_the_first_evaluation_at_or_above_it(paths: list[Path]) -> None:
    # The final means are 0.4133 and 0.6133; neuclip is at 0.45 after the second of four evaluations.
    targets = {one.group.name: one for one in compare(paths).targets if one.measure.dataset == SET}
    clip, neuclip = targets["clip"].reached, targets["neuclip"].reached
    assert [one and one.samples for one in clip] == [1000, 500]
    assert [one and one.share for one in clip] == [1.0, 0.5]
    assert [one and one.samples for one in neuclip] == [None, 1000]


def test_what_was_reached_at_the_first_evaluation_may_have_been_reached_before(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "once", [0.5]), write_run(tmp_path / "slow", SLOW, objective="siglip")]
    text = visible_text(write_as(compare(runs), tmp_path / "page.html"))
    assert "1,000 or before (1.00)" in text and "not reached" in text
    assert "Evaluated only once: A once. A smaller evaluation.every gives a finer answer." in text


def test_budgets_may_differ_and_the_share_is_of_each_ones_own(tmp_path: Path) -> None:
    long = write_run(tmp_path / "long", FAST, settings={"train": {"samples": 4000}})
    reached = compare([long, write_run(tmp_path / "short", SLOW)]).targets[1].reached
    assert [(one.samples, one.share) for one in reached if one] == [(2000, 0.5), (1000, 1.0)]


def test_curves_are_overlaid_each_seed_thin_and_the_mean_with_its_letter(paths: list[Path]) -> None:
    figures = {figure.title: figure for figure in all_curves(compare(paths).groups)}
    assert [*figures] == ["Loss", f"Recall@1 on {SET}", "Temperature", "Calibration"]
    recall = figures[f"Recall@1 on {SET}"]
    assert [line.style for line in recall.lines] == ["thin"] * 3 + ["line", "dots"] + ["thin"] * 3 + ["line", "dots"]
    assert [(line.label, line.name) for line in recall.legend] == [
        ("A", "clip, mean of 3"),
        ("B", "neuclip, mean of 3"),
    ]
    assert recall.legend[0].points[-1] == (1000, pytest.approx(0.41333333))
    assert recall.hover[-1] == (1000, "1 k: A 41.3 %, B 61.3 %")
    assert "Losses of different methods" in figures["Loss"].explanation


def test_labels_at_the_ends_of_lines_do_not_touch(tmp_path: Path) -> None:
    names = [f"method{index:02d}" for index in range(12)]
    runs = [write_run(tmp_path / name, [0.2, 0.3], settings={"model": {"name": name}}) for name in names]
    figure = next(one for one in all_curves(compare(runs).groups) if one.title.startswith("Recall"))
    heights = [y for _, y, _ in figure.end_labels()]
    assert len(heights) == 12 and figure.canvas is not None
    assert all(after - before >= 11.9 for before, after in itertools.pairwise(heights))
    assert min(heights) > 0 and max(heights) <= figure.canvas.bottom
    styles = {line.colour: line.style for line in figure.legend[:6]}
    assert len(styles) == 6 and {line.style for line in figure.legend[6:]} == {"line dashed"}


def test_a_method_without_a_normalizer_has_no_normalizer_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "siglip", SLOW, objective="siglip")
    summary = json.loads(RunFolder(run).summary.read_text())
    summary["normalizer_error"] = {"eps": 1e-6, "estimators": {"minibatch": {"mean": 0.001}}}
    RunFolder(run).summary.write_text(json.dumps(summary))
    assert "normalizer_error" not in {score.measure.metric for score in compare([run]).scores}


def test_chance_stands_beside_tasks_and_averages_where_it_was_computed(tmp_path: Path) -> None:
    ours, published = write_results(tmp_path / "a.jsonl", meta={"chance": 0.25}), write_results(tmp_path / "b.jsonl")
    chances = {score.measure.dataset: score.chance for score in compare([ours]).scores}
    assert chances["MSCOCO"] == 0.25 and chances["Datacomp Average"] == pytest.approx(0.25)
    chances = {score.measure.dataset: score.chance for score in compare([published]).scores}
    assert chances["CIFAR-10"] is chances["Datacomp Average"] is None  # a file of another program


def test_the_size_of_held_out_sets_and_their_captions_per_image_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "clip", SLOW, extra={f"{SET}.captions": 5000})
    assert f"Held out: {SET} (1,000 images, 5,000 captions, 5 per image)." in compare([run]).notes


def test_letters_go_on_after_z() -> None:
    assert [letters(index) for index in (0, 25, 26, 27, 52, 702)] == ["A", "Z", "AA", "AB", "BA", "AAA"]


def test_the_normalizer_error_is_drawn_and_not_compared_across_eps(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{name}-{seed}", SLOW, objective=name, seed=seed, errors=[4.0, 2.0, 1.0, last])
        for name, last in (("neuclip", 0.5), ("fastclip", 0.9))
        for seed in (1, 2, 3)
    ]
    comparison = compare(runs)
    figure = next(one for one in all_curves(comparison.groups) if one.title == "Normalizer error")
    assert figure.legend[1].points == [(250, 4.0), (500, 2.0), (750, 1.0), (1000, 0.9)]
    assert score_of(comparison, "normalizer_error", "training data").best == 0
    for run in runs[3:]:
        summary = json.loads(RunFolder(run).summary.read_text())
        summary["normalizer_error"]["eps"] = 1e-14
        RunFolder(run).summary.write_text(json.dumps(summary))
    other_eps = compare(runs)
    assert score_of(other_eps, "normalizer_error", "training data").best is None
    assert any("different eps (1e-06 in A, 1e-14 in B)" in notice for notice in other_eps.notices)


def test_runs_on_other_data_and_sets_of_other_sizes_are_warned_about(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", SLOW)
    elsewhere = write_run(tmp_path / "copy", SLOW, settings={"data": {"train": "copied/icons"}})
    assert compare([one, elsewhere]).notices == []  # the same fingerprint
    other = write_run(tmp_path / "other", SLOW, settings={"data": {"train": "photos"}}, data="other data")
    assert compare([one, other]).notices == [
        "The runs were trained on different data, which may explain every difference below "
        "(A: icons, fingerprint same dat; B: photos, fingerprint other da)."
    ]
    moved = write_run(tmp_path / "one-2", SLOW, seed=2, data="other data")
    assert compare([one, moved]).notices == [
        "The runs of one were trained on different data: their spread is not that of seeds."
    ]
    smaller = write_run(tmp_path / "smaller", SLOW, objective="siglip", extra={f"{SET}.images": 500})
    (notice,) = compare([one, smaller]).notices
    assert notice.startswith(f"{SET} is not the same set in all runs (1,000 images, 1,000 captions in one; 500 images")


def test_recall_over_different_captions_is_a_figure_of_its_own_with_its_definition(tmp_path: Path) -> None:
    extra = {f"{SET}.image_to_different_text_recall_at_1": 0.7, f"{SET}.different_text_to_image_recall_at_1": 0.8}
    comparison = compare([write_run(tmp_path / "one", SLOW, extra=extra)])
    words = {score.measure.words for score in comparison.scores}
    assert {"image to text recall@1", "image to text recall@1 over different captions"} <= words
    assert any("equal ones count once" in note for note in comparison.notes[-2:])


def test_an_unfinished_run_is_listed_but_not_averaged_unless_none_has_finished(paths: list[Path]) -> None:
    RunFolder(paths[0]).summary.unlink()
    comparison = compare(paths)
    spread = score_of(comparison, RECALL).spreads[0]
    assert spread is not None and spread.values == [0.41, 0.43]
    assert comparison.notices == [
        "clip-1 has not finished: 1,000 of 1,000 samples seen, and it is left out of the mean."
    ]
    for path in paths[1:3]:
        RunFolder(path).summary.unlink()
    spread = score_of(compare(paths), RECALL).spreads[0]
    assert spread is not None and spread.values == [0.40, 0.41, 0.43]


def test_a_repeated_seed_is_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, SLOW, seed=7) for name in ("first", "second")]
    assert any("has seed 7 more than once" in notice for notice in compare(runs).notices)


def test_averages_are_there_only_when_complete(tmp_path: Path) -> None:
    whole, part = write_results(tmp_path / "whole.jsonl"), write_results(tmp_path / "part" / "tasks.jsonl", leave_out=7)
    comparison = compare([whole, part])
    assert [group.name for group in comparison.groups] == ["whole", "part"]
    spreads = score_of(comparison, "average", "Datacomp Average").spreads
    assert spreads[0] is not None and spreads[0].mean == pytest.approx(sum(range(1, 39)) / 38 / 100)
    assert spreads[1] is None
    assert "Datacomp Average needs all 38 tasks in full: part has 31." in comparison.notes
    assert not [score for score in comparison.scores if "FairFace" in score.measure.dataset]


def test_a_run_with_task_results_shows_both(paths: list[Path], tmp_path: Path) -> None:
    for place, path in enumerate(paths):
        write_results(path / "tasks.jsonl", add=0.001 * place)
    comparison = compare(paths)
    average = score_of(comparison, "average", "Datacomp Average")
    assert average.best == 1 and score_of(comparison, RECALL).best == 1
    text = visible_text(write_as(comparison, tmp_path / "page.html"))
    assert re.search(r"Datacomp Average mean of 38 tasks – 19\.6 ± 0\.1 % best 19\.9 ± 0\.1 %", text)


def test_a_task_measured_on_part_of_its_images_is_not_averaged(tmp_path: Path) -> None:
    path = write_results(tmp_path / "part.jsonl", meta={"items": 10})
    comparison = compare([path])
    assert not [score for score in comparison.scores if score.measure.metric == "average"]
    assert score_of(comparison, "acc1", "CIFAR-10").spreads[0] == Spread([0.02])


def test_tasks_measured_with_other_switches_or_data_are_warned_about_and_never_best(paths: list[Path]) -> None:
    for place, path in enumerate(paths):
        write_results(path / "tasks.jsonl", add=0.001 * place, meta={"switches": {}, "data": "a"})
    assert compare(paths).notices == []
    for path in paths[3:]:
        write_results(path / "tasks.jsonl", add=0.1, meta={"switches": {"other": "drop"}, "data": "b"})
    comparison = compare(paths)
    assert comparison.notices == [
        "vtab/caltech101, cifar10, vtab/cifar100, vtab/clevr_count_all and 34 more measured with different switches "
        "in clip-1 and neuclip-1: these figures cannot be compared."
    ]
    assert score_of(comparison, "acc1", "CIFAR-10").best is None
    assert score_of(comparison, "average", "Datacomp Average").best is None


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


def test_a_line_cut_off_by_a_kill_costs_only_itself_and_damaged_results_of_a_run_only_the_tasks(
    tmp_path: Path,
) -> None:
    path = write_results(tmp_path / "cut.jsonl")
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:5]) + "\n" + whole[5][:20])
    assert len(compare([path]).groups[0].members[0].tasks) == 5
    run = write_run(tmp_path / "run", SLOW)
    (run / "tasks.jsonl").write_bytes(b"\xff\xfe\n")
    comparison = compare([run])
    assert any("tasks.jsonl" in notice for notice in comparison.notices)
    assert score_of(comparison, RECALL).spreads[0] is not None


@pytest.mark.parametrize("damage", [b"", b"[1, 2]\n", b"{broken\n", b"\xff\xfe\n", b"null\n"])
@pytest.mark.parametrize("name", ["settings", "records", "evaluation", "summary", "environment"])
def test_a_damaged_file_costs_its_own_part_only(tmp_path: Path, name: str, damage: bytes) -> None:
    runs = [write_run(tmp_path / one, SLOW, objective=one) for one in ("clip", "siglip")]
    getattr(RunFolder(runs[0]), name).write_bytes(damage)
    for suffix in (".html", ".md", ".tex", ".csv"):
        text = write_as(compare(runs), tmp_path / f"page{suffix}")
    page = (tmp_path / "page.html").read_text()
    structure(page)
    assert text and not re.search(r"\b(None|nan|inf)\b", visible_text(page))


def test_values_of_any_wrong_kind_are_ignored(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / one, SLOW, objective=one, errors=SLOW) for one in ("clip", "neuclip")]
    run = RunFolder(paths[0])
    lines = {path: read_lines(path)[0] for path in (run.records, run.evaluation)}
    odd = [None, "text", True, [], {}, -1, 0, 1e308, -1e308, 5e-324, 10**400]
    for path, line in lines.items():
        write_lines(path, [dict.fromkeys(line, value) for value in odd])
    summary = json.loads(run.summary.read_text())
    for value in odd:
        run.summary.write_text(json.dumps(dict.fromkeys(summary, value)))
        run.environment.write_text(json.dumps({"data": {"sha256": value}}))
        run.settings.write_text(json.dumps({"run": {"name": value, "seed": value}, "train": value}))  # JSON is YAML
        for suffix in (".html", ".md", ".tex", ".csv"):
            write_as(compare(paths), tmp_path / f"page{suffix}")
        structure((tmp_path / "page.html").read_text())


def test_the_page_is_well_formed_self_contained_and_runs_no_hostile_text(tmp_path: Path) -> None:
    names = {"name": HOSTILE, HOSTILE: HOSTILE}
    extra = {f"{HOSTILE}.image_to_text_recall_at_1": 0.5, f"{HOSTILE}2.top1": 0.5}
    bad = write_run(tmp_path / "bad", SLOW, extra=extra, settings={"run": names, "data": {"train": HOSTILE}})
    page = write_as(compare([bad, write_run(tmp_path / "good", SLOW)]), tmp_path / "page.html")
    seen = structure(page).seen
    assert [tag for tag, _ in seen].count("script") == 1 and "&lt;script&gt;alert(1)" in page
    assert not any(name.startswith("on") for _, attributes in seen for name in attributes)
    assert "http://" not in page and "https://" not in page and "url(" not in page


def test_an_address_with_a_signature_is_shown_without_it(tmp_path: Path) -> None:
    signed = "https://me:word@host/a.tar?Signature=abc"
    runs = [
        write_run(tmp_path / "near", SLOW),
        write_run(tmp_path / "far", SLOW, settings={"data": {"train": signed}}, data="other"),
    ]
    for suffix in (".html", ".md", ".tex"):
        text = write_as(compare(runs), tmp_path / f"page{suffix}")
        assert "Signature" not in text and "word@" not in text
    assert "Signature" not in json.dumps(comparison_as_dict(compare(runs)))


def test_markdown_parses_back_into_the_same_cells(paths: list[Path], tmp_path: Path) -> None:
    text = write_as(compare(paths), tmp_path / "table.md")
    table = text.partition("## Main figures\n\n")[2].partition("\n\n")[0]
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines())
    assert head == ["data", "figure", "chance", "A clip (n = 3)", "B neuclip (n = 3)"]
    assert rule[:3] == ["---", "---", "---:"]
    assert rows[0] == [SET, "image to text recall@1", "0.10 %", "41.3 ± 1.5 %", "**61.3 ± 1.5 %**"]


def test_latex_is_escaped_and_balanced(tmp_path: Path) -> None:
    clip = seeds(tmp_path, "a_b", SLOW, extra={"50%_&{x}\\.top1": 0.2})
    text = write_as(compare(clip + seeds(tmp_path, "c#d", FAST, objective="siglip")), tmp_path / "table.tex")
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert r"\begin{tabular}{llrrr}" in body and r"\end{tabular}" in body
    rows = [line for line in body if line.endswith(r"\\")]
    assert rows[0] == r"data & figure & chance & a\_b (n = 3) & c\#d (n = 3) \\"
    assert all(len(re.split(r"(?<!\\)&", row)) == 5 for row in rows)
    assert r"41.3 $\pm$ 1.5 \% & \textbf{61.3 $\pm$ 1.5 \%} \\" in rows[1]
    assert r"50\%\_\&\{x\}\textbackslash{} & top-1 accuracy" in text
    assert LATEX.text("−1 ~ ^ $") == r"$-$1 \textasciitilde{} \textasciicircum{} \$"


def test_csv_has_one_row_per_run_and_figure_with_exact_values(paths: list[Path], tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(write_as(compare(paths), tmp_path / "figures.csv"))))
    ours = [row for row in rows if row["metric"] == RECALL]
    assert [row["run"] for row in ours] == [f"{name}-{seed}" for name in ("clip", "neuclip") for seed in (1, 2, 3)]
    assert [float(row["value"]) for row in ours] == [0.40, 0.41, 0.43, 0.60, 0.61, 0.63]
    assert {row["group"] for row in ours} == {"clip", "neuclip"} and {row["samples"] for row in ours} == {"1000"}


@pytest.mark.parametrize(
    ("mean", "deviation", "in_percent", "text"),
    [
        (0.1234, 0.0041, True, "12.3 ± 0.4 %"),
        (0.00521, 0.0003, True, "0.52 ± 0.03 %"),
        (0.0164, 0.0004, True, "1.64 ± 0.04 %"),  # not ± 0.0
        (0.5, None, True, "50.0 %"),
        (1.0664, 0.021, False, "1.07 ± 0.02"),
        (1234.5, 20.0, False, "1,234 ± 20"),
        (0.0, 0.0, False, "0 ± 0"),
        (-0.5, 0.1, False, "−0.500 ± 0.100"),
    ],
)
def test_mean_and_deviation_have_the_same_decimals(
    mean: float, deviation: float | None, in_percent: bool, text: str
) -> None:
    assert with_spread(mean, deviation, in_percent=in_percent) == text


def test_the_command_prints_the_table_and_the_path_and_writes_what_is_asked(
    paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [tmp_path / "new" / f"all{suffix}" for suffix in (".html", ".md", ".tex", ".csv")]
    assert main(["compare", *map(str, paths), "--output", ",".join(map(str, outputs))]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"{SET} image to text recall@1 +0\.10 % +41\.3 ± 1\.5 % +\* 61\.3 ± 1\.5 %", printed)
    assert "* Best is what leads every other group" in printed
    assert all(str(path) in printed and path.stat().st_size > 100 for path in outputs)


def test_json_gives_every_value(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *map(str, paths), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    first = result["figures"][0]
    assert first["metric"] == RECALL and first["best"] == "neuclip"
    assert first["groups"]["clip"]["values"] == [0.40, 0.41, 0.43]
    assert result["reached"][0]["samples"] == {"clip": 1000, "neuclip": 500}
    assert (tmp_path / "compare.html").is_file()


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


def test_a_file_that_cannot_be_written_is_a_failure_in_one_line(
    paths: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.html").mkdir()
    assert main(["compare", str(paths[0]), "--output", str(tmp_path / "page.html")]) == 1
    assert "cannot write" in capsys.readouterr().err
