from __future__ import annotations

import re
from dataclasses import replace

import pytest

from neuclip.records import RunFolder
from neuclip.report.contents import read_contents
from neuclip.report.evaluations import Evaluation, parse_evaluation
from neuclip.report.figures import Canvas, Figure, calibration_figure, curve, merge_figures, recall_figure, time_figure
from neuclip.report.page import TEMPLATES

POINTS = [(1000.0 * index, 2.0 - index / 50) for index in range(1, 51)]


def draw(figure: Figure) -> str:
    return TEMPLATES.get_template("figures.html").module.draw(figure)


def test_a_screen_reader_hears_the_course_of_a_curve_in_one_sentence() -> None:
    label = "Loss over samples seen: from 1.98 to 1 at 50 k samples; lowest 1, highest 1.98."
    assert f'role="img" aria-label="{label}"' in draw(curve("Loss", [POINTS], "loss"))


def test_hovering_gives_the_value_without_script() -> None:
    drawn = draw(curve("Loss", [POINTS], "loss"))
    assert "<title>1 at 50 k samples, smoothed " in drawn
    assert "<title>1.98 at 1 k samples, smoothed 1.98</title>" in drawn


def test_both_axes_have_ticks_and_titles() -> None:
    drawn = draw(curve("Loss", [POINTS], "loss of the batch"))
    for text in ("loss of the batch", "samples seen", "1.2", "1.8", "10 k", "50 k"):
        assert f">{text}</text>" in drawn


def test_the_raw_and_the_smoothed_line_are_both_drawn_unless_there_is_no_noise() -> None:
    noisy, calm = curve("Loss", [POINTS], "loss"), curve("Rate", [POINTS], "rate", noisy=False)
    assert [line.style for line in noisy.lines] == ["raw", "line"]
    assert [line.style for line in calm.lines] == ["line"]


def test_the_reference_is_inside_the_frame_even_if_no_value_comes_near() -> None:
    drawn = draw(curve("Calibration", [[(1000.0, 5.0), (2000.0, 6.0)]], "ratio", reference=1.0))
    found = re.search(r'class="reference" d="M\S+ (\S+)H', drawn)
    assert found and Canvas.top < float(found[1]) < Canvas.bottom - 2  # not merely held at the edge
    assert ">1</text>" in drawn


def test_wide_calibration_gets_a_logarithmic_axis_and_says_so() -> None:
    figure = curve("Calibration", [[(1.0, 0.01), (2.0, 100.0)]], "ratio", reference=1.0, allow_log=True)
    assert figure.canvas and figure.canvas.unit == "ratio, log scale"


def test_the_calibration_that_is_shown_is_that_of_the_summary_and_not_of_a_single_record(run: RunFolder) -> None:
    contents = read_contents(run)
    spike = [*contents.records[:-1], contents.records[-1] | {"calibration": 6.43}]
    figure = calibration_figure(replace(contents, records=spike))
    assert figure.readout == "1.07 (good), median of the last quarter" and "6.43 at 512 k" in figure.hover[-1][1]


def test_without_a_summary_the_calibration_is_the_median_of_the_last_quarter(run: RunFolder) -> None:
    calibrations = [9.0] * 12 + [None, 1.4, 1.2, 50.0]
    records = [{"samples": index, "calibration": value} for index, value in enumerate(calibrations)]
    assert replace(read_contents(run), summary={}, records=records).calibration == 1.4


def test_long_labels_of_ticks_have_the_room_they_need() -> None:
    short, long = (curve("Rate", [[(1.0, 0.0), (2.0, top)]], "rate", noisy=False).canvas for top in (5.0, 0.0015))
    assert short and long and short.left < 40 < 60 < long.left
    assert long.x(0) == long.left and long.x(2) == Canvas.right


def test_values_outside_the_frame_are_counted_in_words() -> None:
    spiky = [(0.0, 1e6), *((float(index), 1 + index / 100) for index in range(1, 100))]
    figure = curve("Loss", [spiky], "loss")
    assert figure.explanation.startswith("1 of 100 values lie outside the frame")
    assert figure.hover[2][1].startswith("1.02 at 2 samples, smoothed 1.")  # the spike must not move its neighbours


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(5.0, 1.0)], [(1.0, -3.0)] * 3, [(1e12, 1e-9), (2e12, 1e-9)]])
def test_a_single_or_constant_value_is_drawn_within_the_canvas(points: list[tuple[float, float]]) -> None:
    found = re.search(r'class="line" .*d="M(\S+) ([\d.]+)', draw(curve("Loss", [points], "loss")))
    assert found and 0 <= float(found[1]) <= Canvas.width and 0 <= float(found[2]) <= Canvas.height


def test_a_gap_in_the_values_is_a_gap_in_the_line() -> None:
    assert len(curve("Loss", [POINTS[:20], POINTS[30:]], "loss", noisy=False).lines) == 2


def test_without_values_a_sentence_replaces_the_figure() -> None:
    drawn = draw(curve("Loss", [], "loss"))
    assert "<svg" not in drawn and "The records hold no such value yet." in drawn


def recall_at(samples: float, names: list[str]) -> Evaluation:
    directions = ("image_to_text", "text_to_image")
    return parse_evaluation({f"{name}.{one}_recall_at_1": 0.5 for name in names for one in directions}, samples)


def test_directions_differ_in_dashes_sets_in_colour_and_all_are_in_the_legend() -> None:
    names = [f"icons/{index}" for index in range(7)]
    drawn = draw(recall_figure([recall_at(100, names), recall_at(200, names)]))
    assert drawn.count("<li>") == 14 and ">icons/" not in drawn  # the shared folder is the unit's, not the legend's
    for style in ("line", "line dashed"):  # sets 0 and 6 share a colour; each line is drawn, and again in the legend
        assert drawn.count(f'class="{style}" style="--colour: var(--series-0)"') == 4
    assert drawn.count('class="dot"') == 28
    assert "series-5" in drawn and "series-6" not in drawn


def test_one_evaluation_makes_no_curve_of_recall() -> None:
    assert recall_figure([recall_at(100, ["icons"])]).absence.startswith("There is one evaluation so far, at 100")
    assert recall_figure([]).absence == "No retrieval was evaluated."


def test_shares_of_time_fill_the_frame_from_bottom_to_top(run: RunFolder) -> None:
    share = {"data_share": 0.05, "towers_share": 0.8, "normalizer_share": 0.12}
    records = [{"samples": 1000.0 * index} | share for index in range(1, 20)]
    figure = time_figure(replace(read_contents(run), records=records))
    heights = [value for area in figure.areas for _, value in area.points]
    assert [area.name for area in figure.areas] == ["data", "towers", "normalizer", "other"]
    assert min(heights) == pytest.approx(0) and max(heights) == pytest.approx(1)
    assert figure.hover[-1][1] == "19 k: data 5, towers 80, normalizer 12 %"


def test_a_long_run_costs_no_more_than_a_short_one() -> None:
    long = [(float(index), (index * 7919 % 1000) / 1000) for index in range(30_000)]
    assert len(draw(curve("Loss", [long], "loss"))) < 40_000


def test_merged_models_are_drawn_over_the_weight_and_the_best_is_said_to_be_chosen_here(
    run: RunFolder,
) -> None:
    """The mean of new (0.2, 0.5, 0.6) and old (0.5, 0.5, 0.1) is highest in the middle."""
    new, old = {0.0: 0.2, 0.5: 0.5, 1.0: 0.6}, {0.0: 0.5, 0.5: 0.5, 1.0: 0.1}
    lines = [
        {"weight": weight, "new.image_to_text_recall_at_1": new[weight], "old.image_to_text_recall_at_1": old[weight]}
        for weight in (1.0, 0.0, 0.5)
    ]
    [figure] = merge_figures(replace(read_contents(run), merges=[*lines, {"weight": "?"}, {"weight": 7.0}]))
    assert [line.points for line in figure.lines] == [list(new.items()), list(old.items())]
    assert figure.readout == "mean of the lines highest at 0.5: 50.0 %"
    assert "chosen by these sets looks better on them than it is" in figure.explanation
    drawn = draw(figure)
    for text in ("weight of the fine-tuned model", "0", "0.2", "1"):
        assert f">{text}</text>" in drawn
    assert "samples seen" not in drawn and "10.0 % at 1: old, image to text" in drawn


def test_without_merged_models_there_is_no_figure_of_them(run: RunFolder) -> None:
    contents = read_contents(run)
    one = [{"weight": 0.0, "new.image_to_text_recall_at_1": 0.2}]
    assert merge_figures(contents) == merge_figures(replace(contents, merges=one)) == []
