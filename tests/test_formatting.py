from __future__ import annotations

import pytest

from neuclip.formatting import (
    byte_size,
    format_count,
    format_duration,
    format_number,
    format_ratio,
    format_samples,
    percent,
    plural,
    times_chance,
)


@pytest.mark.parametrize("write", [format_number, format_count, format_samples, format_duration, byte_size, percent])
def test_an_unknown_value_is_a_dash(write) -> None:
    assert write(None) == "–"


def test_numbers_have_three_digits_that_matter() -> None:
    numbers = {0: "0", 1234.4: "1,234", 508.34: "508", 1.0666: "1.07", 2.0: "2", -0.31: "−0.31", 0.05131: "0.0513"}
    numbers |= {9.8e-5: "9.8e-5", -9.8e-5: "−9.8e-5", 0.9999: "1"}
    assert {value: format_number(value) for value in numbers} == numbers


def test_zeros_stay_where_a_column_should_be_equally_exact() -> None:
    assert [format_number(value, keep_zeros=True) for value in (1.8, 2.0, 0.11)] == ["1.80", "2.00", "0.110"]


def test_samples_are_counted_in_thousands_millions_and_billions() -> None:
    samples = {0: "0", 900: "900", 12_800: "12.8 k", 50_000: "50 k", 999_999: "1 M", 1.5e6: "1.5 M", 2e9: "2 B"}
    assert {count: format_samples(count) for count in samples} == samples


def test_sizes_are_written_in_the_unit_that_fits() -> None:
    sizes = {12: "12 bytes", 42_400: "42.4 kB", 2.54e8: "254 MB", 999_999_999: "1 GB", 1.421e9: "1.42 GB", 3e12: "3 TB"}
    assert {count: byte_size(count) for count in sizes} == sizes


def test_shares_have_one_decimal_and_those_as_small_as_chance_two_digits() -> None:
    shares = {0.123: "12.3 %", 0.25: "25.0 %", 1.5: "150.0 %", -0.123: "−12.3 %", 0.00996: "1.0 %"}
    shares |= {0.00104: "0.10 %", 1 / 2184: "0.046 %", 2e-5: "0.0020 %"}
    assert {share: percent(share) for share in shares} == shares


def test_only_none_is_0_percent_and_only_all_is_100_percent() -> None:
    assert [percent(share) for share in (0.0, 1e-9, 0.99999, 1.0)] == ["0 %", "below 0.001 %", "99.9 %", "100 %"]


def test_nothing_is_compared_with_an_unknown_chance() -> None:
    assert times_chance(0.12, 0.00104) == "115x chance"
    assert times_chance(0.4, 1 / 9) == "3.6x chance"
    assert times_chance(0.4, None) == times_chance(None, 0.1) == times_chance(0.4, 0.0) == ""


def test_ratios_have_two_digits_or_are_whole() -> None:
    ratios = {0.467: "0.5x", 2.44: "2.4x", 9.94: "9.9x", 9.96: "10x", 1234.0: "1,234x"}
    assert {ratio: format_ratio(ratio) for ratio in ratios} == ratios


def test_one_is_singular() -> None:
    assert [plural(count, "shard") for count in (0, 1, 2000)] == ["0 shards", "1 shard", "2,000 shards"]
    assert plural(2, "class", "classes") == "2 classes"


def test_durations_have_at_most_two_units() -> None:
    durations = {47.6: "48 s", 59.6: "1 min 0 s", 200: "3 min 20 s", 7500: "2 h 5 min", 273_600: "3 d 4 h"}
    assert {seconds: format_duration(seconds) for seconds in durations} == durations
