"""What is drawn, as numbers."""

from __future__ import annotations

import math
import random

import pytest

from neuclip.report.charts import (
    CURVES,
    MOST_POINTS,
    Chart,
    Line,
    group_lines,
    mean_curve,
    shown,
    smooth,
    thinned,
)

LOSS = next(curve for curve in CURVES if curve.key == "loss")
TEMPERATURE = next(curve for curve in CURVES if curve.key == "temperature")


def noisy(count: int) -> list[tuple[float, float]]:
    draw = random.Random(0)
    return [(float(place), 1 + draw.gauss(0, 0.1)) for place in range(count)]


def test_a_noisy_curve_of_one_run_is_smoothed_with_its_values_behind() -> None:
    records = [{"samples": samples, "loss": value} for samples, value in noisy(300)]
    (line,) = LOSS.chart({"run": [records]}).lines
    assert line.name == "run" and line.behind == [noisy(300)]
    assert max(abs(value - 1) for _, value in line.points[20:]) < 0.06 < max(abs(value - 1) for _, value in noisy(300))


def test_the_line_of_several_runs_is_their_mean_with_all_of_them_behind() -> None:
    runs = [[{"samples": 1.0, "temperature": x}, {"samples": 2.0, "temperature": 2 * x}] for x in (0.1, 0.3)]
    chart = TEMPERATURE.chart({"a": runs, "none": [[]], "b": runs[:1]})
    assert [(line.name, line.colour, line.dash) for line in chart.lines] == [("a, mean of 2", 0, 0), ("b", 2, 2)]
    assert chart.lines[0].points == [(1.0, 0.2), (2.0, 0.4)] and len(chart.lines[0].behind) == 2
    assert chart.lines[1].behind == ()


def test_more_groups_than_colours_differ_in_their_dashes() -> None:
    lines = group_lines({str(place): [[(0.0, 1.0)]] for place in range(8)})
    assert [line.colour for line in lines] == [0, 1, 2, 3, 4, 5, 0, 1]
    assert [line.dash for line in lines] == list(range(8))


def test_smoothing_keeps_the_steep_start_looks_back_at_the_end_and_is_not_lifted_by_a_spike() -> None:
    straight = [(float(place), 100.0 - place) for place in range(100)]
    assert [value for _, value in smooth(straight)[:50]] == pytest.approx([value for _, value in straight[:50]])
    assert smooth(straight)[-1] == pytest.approx((99.0, 3.0))  # the mean of the last five
    spiked = [(samples, 1e9 if samples == 150 else value) for samples, value in noisy(300)]
    assert max(value for _, value in smooth(spiked)) < 1.2


def test_with_log_the_mean_is_geometric_unless_a_value_is_not_positive() -> None:
    points = [(0.0, 1.0), (1.0, 100.0)]
    assert smooth(points, log=True)[-1][1] == pytest.approx(10.0)
    assert smooth([(0.0, 0.0), (1.0, 100.0)], log=True)[-1][1] == pytest.approx(50.0)


def test_a_mean_is_taken_where_all_curves_have_a_value() -> None:
    assert mean_curve([[(1.0, 1.0), (2.0, 3.0)], [(2.0, 5.0), (3.0, 9.0)]]) == [(2.0, 4.0)]


@pytest.mark.parametrize("count", [MOST_POINTS, MOST_POINTS + 1, 10_007])
def test_a_long_line_is_thinned_and_keeps_every_peak_and_its_end(count: int) -> None:
    points = noisy(count)
    points[count // 3] = (points[count // 3][0], 7.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS and kept == sorted(kept)
    assert points[count // 3] in kept and points[-1] == kept[-1]
    assert count > MOST_POINTS or kept == points


def test_no_more_digits_are_written_than_can_be_seen() -> None:
    assert shown([(123456.0, math.pi)]) == [(123456.0, 3.1416)]


@pytest.mark.parametrize(("percent", "text"), [(True, "12.3 %"), (False, "0.123")])
def test_without_a_script_the_last_value_of_each_line_is_read(percent: bool, text: str) -> None:
    lines = [Line("a", [(0.0, 1.0), (1.0, 0.1234)]), Line("empty", [])]
    assert Chart(title="", unit="", lines=lines, percent=percent).last_values() == [("a", text)]
