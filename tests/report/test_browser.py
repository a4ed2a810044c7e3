"""The page in a real browser: does it fit, does it run without a complaint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuclip.records import RunFolder
from neuclip.report.page import write_report
from tests.builders.browser import Tab
from tests.report.sample_run import make_fine_tuned

pytestmark = pytest.mark.slow

NOTE_ERRORS = """
window.noted = [];
addEventListener("error", (event) => noted.push(event.message));
addEventListener("securitypolicyviolation", (event) => noted.push(event.violatedDirective));
"""
# Opens everything that can be opened, points at every figure, then measures.
PROBE = """(() => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  const bands = [...document.querySelectorAll("figure.curve .band, figure.curve .dot")];
  bands.forEach((band) => band.dispatchEvent(new PointerEvent("pointerover", { bubbles: true })));
  const root = document.documentElement;
  const wide = [...document.querySelectorAll("main *")]
    .filter((one) => !one.closest(".scroll") && one.getBoundingClientRect().right > innerWidth + 0.5)
    .map((one) => one.tagName + "." + one.className);
  const clipped = [...document.querySelectorAll("figure.curve svg text")].filter((text) => {
    const box = text.getBBox(), frame = text.ownerSVGElement.viewBox.baseVal;
    return box.x < 0 || box.y < 0 || box.x + box.width > frame.width || box.y + box.height > frame.height;
  }).map((text) => text.textContent);
  const scrolling = [...document.querySelectorAll(".scroll")]
    .filter((table) => table.scrollWidth > table.clientWidth).map((table) => table.ariaLabel);
  const squeezed = [...document.querySelectorAll("caption, th, td")].filter((one) => one.offsetWidth)
    .filter((one) => one.offsetWidth < 40).map((one) => one.textContent);
  const readout = document.querySelector("figure.curve .readout");
  return {
    errors: noted, wide, clipped, scrolling, squeezed, viewport: innerWidth, width: root.scrollWidth,
    hovered: readout && readout.textContent,
    dark: matchMedia("(prefers-color-scheme: dark)").matches, ground: getComputedStyle(document.body).backgroundColor,
    broken: [...document.images].filter((image) => !image.naturalWidth).length, images: document.images.length,
  };
})()"""


def browse(
    tab: Tab, page: Path, width: int, *, dark: bool = False, extra: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """What the probe measured in a window of that width, and what the browser complained of."""
    tab.complaints = []
    with tab.script(NOTE_ERRORS + extra):
        tab.open(page.as_uri(), width=width, dark=dark)
    return tab.evaluate(PROBE), tab.complaints


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_the_page_fits_its_window_and_the_console_stays_silent(tab: Tab, run: RunFolder, width: int) -> None:
    measured, console = browse(tab, write_report(run), width)
    assert measured["viewport"] == width
    assert measured["width"] <= width
    assert measured["wide"] == measured["clipped"] == measured["scrolling"] == measured["squeezed"] == []
    assert measured["errors"] == [] and console == []
    assert measured["images"] == 72 and measured["broken"] == 0
    assert measured["hovered"].startswith("−0.") and "smoothed" in measured["hovered"]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_of_a_fine_tuned_run_fits_its_window(tab: Tab, run: RunFolder, width: int) -> None:
    make_fine_tuned(run)
    measured, console = browse(tab, write_report(run), width)
    assert measured["width"] <= width
    assert measured["wide"] == measured["clipped"] == measured["scrolling"] == measured["squeezed"] == []
    assert measured["errors"] == [] and console == []


def test_a_run_that_just_began_with_a_very_long_name_fits_a_phone(tab: Tab, run: RunFolder) -> None:
    for path in (run.records, run.evaluation, run.summary, run.environment, run.gallery, run.skipped):
        path.unlink()
    run.settings.write_text(f"run: {{name: {'x' * 300}}}\ntrain: {{batch_size: {'9' * 80}}}\n")
    measured, console = browse(tab, write_report(run), 360)
    assert measured["width"] <= 360 and measured["wide"] == []
    assert measured["errors"] == [] and console == []


def test_a_dark_browser_gets_a_dark_page(tab: Tab, run: RunFolder) -> None:
    page = write_report(run)
    grounds = {}
    for dark in (True, False):
        measured, _ = browse(tab, page, 1280, dark=dark)
        assert measured["dark"] == dark
        grounds[dark] = measured["ground"]
    assert grounds == {True: "rgb(20, 23, 27)", False: "rgb(251, 250, 247)"}


def test_the_probe_would_notice_an_error_and_a_page_that_is_too_wide(tab: Tab, run: RunFolder) -> None:
    bad = 'console.error("seen"); setTimeout(() => { throw new Error("thrown"); });'
    bad += 'addEventListener("DOMContentLoaded", () => { document.querySelector("h1").style.width = "2000px"; });'
    measured, console = browse(tab, write_report(run), 360, extra=bad)
    assert any("seen" in line for line in console)
    assert measured["errors"] == ["Uncaught Error: thrown"]
    assert measured["width"] >= 2000 and "H1." in measured["wide"]
