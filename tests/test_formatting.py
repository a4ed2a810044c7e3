"""Numbers as people read them."""

from __future__ import annotations

from functools import partial

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

WRITTEN = {
    format_number: {
        **{0: "0", 1234.4: "1,234", 508.34: "508", 1.0666: "1.07", 2.0: "2", -0.31: "−0.31", 0.05131: "0.0513"},
        **{9.8e-5: "9.8e-5", -9.8e-5: "−9.8e-5", 0.9999: "1", None: "–"},
    },
    partial(format_number, keep_zeros=True): {1.8: "1.80", 2.0: "2.00", 0.11: "0.110"},  # a column is equally exact
    format_count: {27_500: "27,500", None: "–"},
    format_samples: {
        **{0: "0", 900: "900", 12_800: "12.8 k", 50_000: "50 k", 999_999: "1 M", 1.5e6: "1.5 M", 2e9: "2 B", None: "–"},
    },
    byte_size: {
        **{12: "12 bytes", 42_400: "42.4 kB", 2.54e8: "254 MB", 999_999_999: "1 GB", 1.421e9: "1.42 GB", 3e12: "3 TB"},
        None: "–",
    },
    percent: {  # two digits where chance lives; only none is 0 %, and only all is 100 %
        **{0.123: "12.3 %", 0.25: "25.0 %", 1.5: "150.0 %", -0.123: "−12.3 %", 0.00996: "1.0 %", 0.00104: "0.10 %"},
        **{1 / 2184: "0.046 %", 2e-5: "0.0020 %", 1e-9: "below 0.001 %", 0.99999: "99.9 %"},
        **{0.0: "0 %", 1.0: "100 %", None: "–"},
    },
    format_ratio: {0.467: "0.5x", 2.44: "2.4x", 9.94: "9.9x", 9.96: "10x", 1234.0: "1,234x"},
    format_duration: {
        **{47.6: "48 s", 59.6: "1 min 0 s", 200: "3 min 20 s", 7500: "2 h 5 min", 273_600: "3 d 4 h", None: "–"},
    },
    partial(plural, noun="shard"): {0: "0 shards", 1: "1 shard", 2000: "2,000 shards"},
    partial(plural, noun="class", nouns="classes"): {2: "2 classes"},
    partial(times_chance, chance=0.00104): {0.12: "115x chance", None: ""},
    partial(times_chance, chance=None): {0.4: ""},
    partial(times_chance, chance=0.0): {0.4: ""},
}


@pytest.mark.parametrize("write", WRITTEN)
def test_values_are_written_with_the_digits_and_units_that_matter(write):
    assert {value: write(value) for value in WRITTEN[write]} == WRITTEN[write]
