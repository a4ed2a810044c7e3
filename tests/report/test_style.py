from __future__ import annotations

import re

import pytest

from neuclip.report.page import own_file

READ_TOGETHER = [(text, ground) for text in ("ink", "quiet", "accent", "right") for ground in ("paper", "surface")]
READ_TOGETHER += [("right", "right-surface"), ("ink", "right-surface"), ("quiet", "right-surface")]
READ_TOGETHER += [("notice", "notice-surface")]
READ_TOGETHER += [(f"series-{index}", "surface") for index in range(6)]


def colours(scheme: str) -> dict[str, str]:
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", own_file("style.css"))
    return {name: light if scheme == "light" else dark for name, light, dark in found}


def luminance(colour: str) -> float:
    """Relative luminance as the web's accessibility guidelines define it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_of_level_aa_in_both_schemes(scheme: str) -> None:
    palette = colours(scheme)
    for text, ground in READ_TOGETHER:
        lighter, darker = sorted((luminance(palette[text]), luminance(palette[ground])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{text} on {ground}, {scheme}"
