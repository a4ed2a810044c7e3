"""Formats numbers for people: '12.3 %', '1.4 GB', '2 h 5 min', '1 shard', '115x chance'. An unknown value is a dash."""

from __future__ import annotations

import math

UNKNOWN = "–"
SAMPLE_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def format_number(value: float | None, *, keep_zeros: bool = False) -> str:
    """Three significant digits, thousands separated, a true minus sign: '1,234', '0.0513', '−3.1', '9.8e-5'.

    `keep_zeros` writes '2.00' instead of '2', for columns whose values all have the same precision.
    """
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e9:
        return scientific(value)
    decimals = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:,.{decimals}f}"
    return (text if keep_zeros else _trim_zeros(text)).replace("-", "−")


def scientific(value: float) -> str:
    """'9.8e-5', '−1e9'."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{_trim_zeros(mantissa).replace('-', '−')}e{int(exponent)}"


def format_count(value: float | None) -> str:
    """A whole number in full: '27,500'."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def format_samples(value: float | None) -> str:
    """A number of samples, abbreviated: '900', '12.8 k', '50 k', '1.5 M', '2 B'."""
    return UNKNOWN if value is None else _in_units(value, SAMPLE_UNITS) or f"{value:.3g}"


def byte_size(count: float | None) -> str:
    """'12 bytes', '42.4 kB', '254 MB', '1.42 GB', '3 TB'."""
    return UNKNOWN if count is None else _in_units(count, BYTE_UNITS) or f"{count:.0f} bytes"


def percent(share: float | None) -> str:
    """A share in percent with one decimal; below 1 %, where chance level often is, with two significant digits. Only
    exactly 1 is '100 %' and only exactly 0 is '0 %'.

    >>> percent(0.123), percent(0.00104), percent(0.0), percent(1e-9), percent(0.99999), percent(1.0)
    ('12.3 %', '0.10 %', '0 %', 'below 0.001 %', '99.9 %', '100 %')
    """
    if share is None:
        return UNKNOWN
    if share < 0:
        return f"−{percent(-share)}"
    value = 100 * share
    if value in (0, 100):
        return f"{value:.0f} %"
    if value < 0.001:
        return "below 0.001 %"
    if value < 0.995:
        return f"{value:#.2g} %"
    return f"{min(value, 99.9) if value < 100 else value:.1f} %"


def times_chance(value: float | None, chance: float | None) -> str:
    """'115x chance'; '' if chance is not known."""
    if value is None or not chance:
        return ""
    return f"{format_ratio(value / chance)} chance"


def format_ratio(ratio: float) -> str:
    """'2.4x', '115x'."""
    return f"{ratio:,.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def plural(count: float, noun: str, nouns: str = "") -> str:
    """'1 shard', '2,000 shards'; `nouns` is the plural if it is not the noun with an 's'."""
    return f"{format_count(count)} {noun if count == 1 else nouns or f'{noun}s'}"


def format_duration(seconds: float | None) -> str:
    """At most two units: '48 s', '3 min 20 s', '2 h 5 min', '3 d 4 h'."""
    if seconds is None:
        return UNKNOWN
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _trim_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def _in_units(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Three significant digits in the largest unit that fits; '' if the value is too small for all units."""
    for unit, name in units:
        if abs(value) >= unit * 0.9995:  # 999,999 is '1 M', not '1000 k'
            return f"{value / unit:.3g} {name}"
    return ""
