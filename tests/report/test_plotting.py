from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neuclip.report.plotting import (
    Scale,
    column,
    evenly_spaced,
    linear_ticks,
    mean_curve,
    smooth,
    thin,
    tick_label,
    value_scale,
)

FINITE = st.floats(-1e12, 1e12, allow_subnormal=False)


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


def test_the_mean_of_curves_is_taken_where_all_of_them_have_a_value() -> None:
    assert mean_curve([[(1, 1.0), (2, 2.0), (4, 9.0)], [(1, 3.0), (2, 6.0), (3, 9.0)]]) == [(1, 2.0), (2, 4.0)]
    assert mean_curve([]) == []


def test_hover_places_include_the_first_and_the_last_record() -> None:
    assert evenly_spaced(3, 48) == [0, 1, 2]
    chosen = evenly_spaced(1000, 48)
    assert len(chosen) == 48 and chosen[0] == 0 and chosen[-1] == 999


@example(values=[0.0001], allow_log=False)  # its lowest tick rounds to just below the end of the axis
@given(st.lists(FINITE, min_size=1, max_size=60), st.booleans())
def test_every_value_has_a_place_between_the_ends_of_its_axis(values: list[float], allow_log: bool) -> None:
    scale = value_scale(values, allow_log=allow_log)
    assert scale.low < scale.high
    assert all(0 <= scale.position(value) <= 1 for value in values)
    assert all(scale.low * (0.99 if scale.log else 1) <= tick for tick in scale.ticks() if scale.log or tick >= 0)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_and_neighbours_have_different_labels(low: float, width: float) -> None:
    ticks = linear_ticks(low, low + width)
    assert 2 <= len(ticks) <= 9
    step = ticks[1] - ticks[0]
    if step > 1e-3 and max(map(abs, ticks)) < 1e6:
        labels = [tick_label(tick, step) for tick in ticks]
        assert len(set(labels)) == len(labels)


def test_ticks_are_round_numbers() -> None:
    assert linear_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert linear_ticks(0, 512_000) == [0, 100_000, 200_000, 300_000, 400_000, 500_000]
    assert [tick_label(tick, 0.25) for tick in (0.25, 0.5)] == ["0.25", "0.50"]


def test_one_early_spike_does_not_flatten_the_curve() -> None:
    values = [1e6, *(1 + index / 100 for index in range(100))]
    scale = value_scale(values)
    assert scale.high < 5
    assert scale.position(1e6) == 1


def test_a_logarithmic_axis_is_used_only_where_it_is_allowed_and_needed() -> None:
    assert value_scale([0.5, 100], allow_log=True).log
    assert not value_scale([0.5, 100]).log
    assert not value_scale([0.9, 1.3], allow_log=True).log
    assert Scale(0.1, 10, log=True).position(1) == pytest.approx(0.5)
    assert Scale(0.1, 10, log=True).position(0) == 0


def test_logarithmic_ticks_grow() -> None:
    for low, high in [(0.5, 20), (1e-9, 1e9), (1.1, 1.9e3)]:
        ticks = Scale(low, high, log=True).ticks()
        assert 2 <= len(ticks) <= 8
        assert all(before < after for before, after in itertools.pairwise(ticks))
