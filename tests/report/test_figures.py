from __future__ import annotations

import re

import pytest

from neuclip.report.figures import BOTTOM, HEIGHT, TOP, WIDTH, NamedLine, curve, lines, stacked

POINTS = [(1000.0 * index, 2.0 - index / 50) for index in range(1, 51)]


def test_a_screen_reader_hears_the_course_of_a_curve_in_one_sentence() -> None:
    drawn = curve("Loss", [POINTS], unit="loss")
    assert 'role="img"' in drawn
    label = "Loss over samples seen: from 1.98 to 1 at 50 k samples; lowest 1, highest 1.98."
    assert f'aria-label="{label}"' in drawn


def test_hovering_gives_the_value_without_script() -> None:
    drawn = curve("Loss", [POINTS], unit="loss")
    assert "<title>1 at 50 k samples, smoothed " in drawn
    assert "<title>1.98 at 1 k samples, smoothed 1.98</title>" in drawn


def test_both_axes_have_ticks_and_titles() -> None:
    drawn = curve("Loss", [POINTS], unit="loss of the batch")
    assert ">loss of the batch</text>" in drawn and ">samples seen</text>" in drawn
    for tick in ("1.2", "1.8", "10 k", "50 k"):
        assert f">{tick}</text>" in drawn


def test_the_raw_and_the_smoothed_line_are_both_drawn_unless_there_is_no_noise() -> None:
    noisy, calm = curve("Loss", [POINTS], unit="loss"), curve("Rate", [POINTS], unit="rate", noisy=False)
    assert (noisy.count('class="raw"'), noisy.count('class="line"')) == (1, 1)
    assert (calm.count('class="raw"'), calm.count('class="line"')) == (0, 1)


def test_the_reference_is_inside_the_frame_even_if_no_value_comes_near() -> None:
    drawn = curve("Calibration", [[(1000.0, 5.0), (2000.0, 6.0)]], unit="ratio", reference=1.0)
    found = re.search(r'class="reference" d="M\S+ (\S+)H', drawn)
    assert found and TOP < float(found[1]) < BOTTOM - 2  # not merely held at the edge
    assert ">1</text>" in drawn


def test_wide_calibration_gets_a_logarithmic_axis_and_says_so() -> None:
    drawn = curve("Calibration", [[(1.0, 0.01), (2.0, 100.0)]], unit="ratio", reference=1.0, allow_log=True)
    assert "ratio, log scale" in drawn


def test_values_outside_the_frame_are_counted_in_words() -> None:
    spiky = [(0.0, 1e6), *((float(index), 1 + index / 100) for index in range(1, 100))]
    drawn = curve("Loss", [spiky], unit="loss")
    assert "1 of 100 values lie outside the frame" in drawn
    assert "<title>1.02 at 2 samples, smoothed 1." in drawn  # the spike beside it must not drag the smoothed line away


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(5.0, 1.0)], [(1.0, -3.0)] * 3, [(1e12, 1e-9), (2e12, 1e-9)]])
def test_a_single_or_constant_value_is_drawn_within_the_canvas(points: list[tuple[float, float]]) -> None:
    drawn = curve("Loss", [points], unit="loss")
    found = re.search(r'class="line" d="M(\S+) ([\d.]+)', drawn)
    assert found and 0 <= float(found[1]) <= WIDTH and 0 <= float(found[2]) <= HEIGHT


def test_a_gap_in_the_values_is_a_gap_in_the_line() -> None:
    assert curve("Loss", [POINTS[:20], POINTS[30:]], unit="loss").count('class="line"') == 2


def test_without_values_a_sentence_stands_in_the_place_of_the_figure() -> None:
    drawn = curve("Loss", [], unit="loss")
    assert "<svg" not in drawn and "The records hold no such value yet." in drawn


def test_lines_of_one_colour_differ_in_dashes_and_all_are_in_the_legend() -> None:
    named = [NamedLine("a, there", POINTS), NamedLine("a, back", POINTS, dashed=True), NamedLine("b", POINTS, colour=7)]
    drawn = lines("Recall", named, unit="recall")
    assert drawn.count("<li>") == 3
    assert drawn.count('class="line series-0"') == drawn.count('class="line series-0 dashed"') == 2  # line and legend
    assert "series-1" in drawn and "series-7" not in drawn


def test_stacked_shares_fill_the_frame_from_bottom_to_top() -> None:
    rows = [(1000.0 * index, [0.05, 0.8, 0.12, 0.03]) for index in range(1, 20)]
    drawn = stacked("Time", rows, ["data", "towers", "normalizer", "other"])
    assert drawn.count('class="area ') == 4
    heights = [
        float(y)
        for path in re.findall(r'class="area [^"]*" d="M([^"]*)Z"', drawn)
        for y in re.findall(r" (\S+?)(?:L|$)", path)
    ]
    assert min(heights) == pytest.approx(TOP) and max(heights) == pytest.approx(BOTTOM)
    assert "<title>19 k: data 5, towers 80, normalizer 12 %</title>" in drawn


def test_a_long_run_costs_no_more_than_a_short_one() -> None:
    long = [(float(index), (index * 7919 % 1000) / 1000) for index in range(30_000)]
    assert len(curve("Loss", [long], unit="loss")) < 40_000
