"""Numbers as people read them."""

from __future__ import annotations


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


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
