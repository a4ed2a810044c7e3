from __future__ import annotations

import random

import pytest

from neuclip.report.series import column, smooth, spread, thin


def test_a_null_breaks_the_line_in_two() -> None:
    values = [1.0, 2.0, None, None, 3.0]
    records = [{"samples": index, "loss": value} for index, value in enumerate(values)]
    assert column(records, "loss") == [[(0, 1.0), (1, 2.0)], [(4, 3.0)]]


def test_smoothing_leaves_a_constant_alone_and_calms_noise() -> None:
    assert smooth([(index, 2.5) for index in range(100)]) == [(index, pytest.approx(2.5)) for index in range(100)]
    noise = random.Random(0)
    noisy = [(float(index), noise.gauss(0, 1)) for index in range(1000)]
    assert max(abs(value) for _, value in smooth(noisy)[20:]) < 0.7 < max(abs(value) for _, value in noisy)


def test_smoothing_does_not_lag_behind_a_slope() -> None:
    slope = [(float(index), float(index)) for index in range(200)]
    assert [value for _, value in smooth(slope)[:190]] == pytest.approx([value for _, value in slope[:190]])


def test_thinning_keeps_the_peaks_the_order_and_the_limit() -> None:
    noise = random.Random(1)
    points = [(float(index), noise.random()) for index in range(10_000)]
    points[4321] = (4321.0, 50.0)
    kept = thin(points, 600)
    assert len(kept) <= 600
    assert (4321.0, 50.0) in kept
    assert kept == sorted(kept)


def test_hover_places_include_the_first_and_the_last_record() -> None:
    assert spread(3, 48) == [0, 1, 2]
    chosen = spread(1000, 48)
    assert len(chosen) == 48 and chosen[0] == 0 and chosen[-1] == 999
