from __future__ import annotations

import pytest

from neuclip.formatting import format_bytes, format_number, format_percent, format_samples, times_chance


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1234.4, "1,234"),
        (508.34, "508"),
        (1.0666, "1.07"),
        (2.0, "2"),
        (-0.31, "−0.31"),
        (0.05131, "0.0513"),
        (9.8e-5, "9.8e-5"),
        (-9.8e-5, "−9.8e-5"),
        (0.9999, "1"),
    ],
)
def test_numbers_have_three_digits_that_matter(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_zeros_stay_where_a_column_should_be_equally_exact() -> None:
    assert [format_number(value, keep_zeros=True) for value in (1.8, 2.0, 0.11)] == ["1.80", "2.00", "0.110"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (900, "900"), (12_800, "12.8 k"), (50_000, "50 k"), (999_999, "1 M"), (1.5e6, "1.5 M"), (2e9, "2 B")],
)
def test_samples_are_counted_in_thousands_millions_and_billions(value: float, text: str) -> None:
    assert format_samples(value) == text


def test_small_shares_keep_two_decimals() -> None:
    assert [format_percent(share) for share in (0.123, 0.00104, 0.0, 1.0)] == ["12.3 %", "0.10 %", "0.0 %", "100.0 %"]


def test_memory_has_a_unit() -> None:
    assert [format_bytes(count) for count in (12, 1_421_000_000)] == ["12 bytes", "1.42 GB"]


def test_nothing_is_compared_with_an_unknown_chance() -> None:
    assert times_chance(0.12, 0.00104) == "115 times chance"
    assert times_chance(0.4, 1 / 9) == "3.6 times chance"
    assert times_chance(0.4, None) == times_chance(None, 0.1) == times_chance(0.4, 0.0) == ""
