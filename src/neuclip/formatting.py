"""Numbers as people read them: '50 k', '12.3 %', '1.4 GB', '115 times chance'. Unknown is a dash, never 'None'."""

from __future__ import annotations

import math

UNKNOWN = "–"
SHORT_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def format_number(value: float | None, *, keep_zeros: bool = False) -> str:
    """Three significant digits, thousands separated, a true minus sign: '1,234', '0.0513', '−3.1', '9.8e-5'.

    With `keep_zeros`, '2.00' stays so: in a column of figures all should be equally exact.
    """
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e9:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{trim(mantissa)}e{int(exponent)}".replace("-", "−", 1 if value < 0 else 0)
    decimals = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:,.{decimals}f}"
    return (text if keep_zeros else trim(text)).replace("-", "−")


def format_count(value: float | None) -> str:
    """A whole number in full: '27,500'."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def format_samples(value: float | None) -> str:
    """A number of samples in short: '900', '12.8 k', '50 k', '1.5 M', '2 B'."""
    if value is None:
        return UNKNOWN
    for unit, letter in SHORT_UNITS:
        if abs(value) >= unit * 0.9995:  # 999,999 is '1 M', not '1000 k'
            return f"{trim(f'{value / unit:.3g}')} {letter}"
    return trim(f"{value:.3g}")


def format_percent(share: float | None) -> str:
    """'12.3 %'; below one percent two decimals, because chance often lives there: '0.10 %'."""
    if share is None:
        return UNKNOWN
    percent = 100 * share
    return f"{percent:.{2 if 0 < abs(percent) < 0.995 else 1}f} %".replace("-", "−")


def format_bytes(count: float | None) -> str:
    if count is None:
        return UNKNOWN
    for unit, letters in BYTE_UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {letters}"
    return f"{count:.0f} bytes"


def times_chance(value: float | None, chance: float | None) -> str:
    """'115 times chance'; empty where chance is not known."""
    if value is None or not chance:
        return ""
    ratio = value / chance
    return f"{ratio:,.0f} times chance" if ratio >= 9.95 else f"{ratio:.1f} times chance"


def trim(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def plural(count: float, noun: str) -> str:
    """'1 shard', '2,000 shards'."""
    return f"{format_count(count)} {noun}" + ("" if count == 1 else "s")


def percent(share: float) -> str:
    """Never '0 %' for what is there, nor '100 %' for what is not all.

    >>> percent(0.0123), percent(0.0), percent(1e-5), percent(0.99999)
    ('1.2 %', '0 %', 'below 0.1 %', '99.9 %')
    """
    hundredths = 100 * share
    if hundredths in (0, 100):
        return f"{hundredths:.0f} %"
    if hundredths < 0.1:
        return "below 0.1 %"
    return f"{min(hundredths, 99.9) if hundredths < 100 else hundredths:.1f} %"


def byte_size(count: float) -> str:
    """In GB, MB or kB.

    >>> byte_size(2.54e8), byte_size(42_400)
    ('254 MB', '42.4 kB')
    """
    unit, name = next((one for one in ((1e9, "GB"), (1e6, "MB")) if count >= one[0]), (1e3, "kB"))
    return f"{count / unit:.3g} {name}"


def format_duration(seconds: float) -> str:
    """At most two units, as people say it: '48 s', '3 min 20 s', '2 h 5 min', '3 d 4 h'."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
