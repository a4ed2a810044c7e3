"""The page in a real browser: does it fit, does it run without a complaint."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from neuclip.records import RunFolder
from neuclip.report.page import write_report
from tests.report.sample_run import make_fine_tuned

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1400,900",
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine"),
]

# Opens everything that can be opened, points at every figure, then leaves what it measured in the document.
PROBE = """
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
addEventListener("load", () => {
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
  root.dataset.measured = JSON.stringify({
    errors, wide, clipped, scrolling, squeezed, viewport: innerWidth, width: root.scrollWidth,
    hovered: readout && readout.textContent,
    dark: matchMedia("(prefers-color-scheme: dark)").matches, ground: getComputedStyle(document.body).backgroundColor,
    broken: [...document.images].filter((image) => !image.naturalWidth).length, images: document.images.length,
  });
});
"""


# A browser's window is never narrower than 500 pixels; a frame can be. It loads before the window does, and the window
# then copies what the probe measured into the document that is printed.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  document.documentElement.dataset.measured = frames[0].document.documentElement.dataset.measured;
}});
</script>"""


def browse(page: Path, width: int, *more_flags: str, extra: str = "") -> tuple[dict[str, Any], list[str]]:
    """What the probe measured in a frame of that width, and what the browser's console said.

    The page is changed in nothing but the probe in its head, which its own policy is made to allow.
    """
    assert BROWSER is not None
    script = PROBE + extra
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    text = text.replace("<title>", f"<script>{script}</script><title>", 1)
    framed = page.with_name("framed.html")
    framed.write_text(FRAME.format(width=width, page=html.escape(text)), encoding="utf-8")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *more_flags, "--dump-dom", framed.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = re.search(r'^<html data-measured="([^"]*)"', done.stdout, flags=re.MULTILINE)
    assert measured, f"the page did not load: {done.stderr[-2000:]}"
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(measured[1])), console


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_the_page_fits_its_window_and_the_console_stays_silent(run: RunFolder, width: int) -> None:
    measured, console = browse(write_report(run), width)
    assert measured["viewport"] == width
    assert measured["width"] <= width
    assert measured["wide"] == measured["clipped"] == measured["scrolling"] == measured["squeezed"] == []
    assert measured["errors"] == [] and console == []
    assert measured["images"] == 72 and measured["broken"] == 0
    assert measured["hovered"].startswith("−0.") and "smoothed" in measured["hovered"]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_of_a_fine_tuned_run_fits_its_window(run: RunFolder, width: int) -> None:
    make_fine_tuned(run)
    measured, console = browse(write_report(run), width)
    assert measured["width"] <= width
    assert measured["wide"] == measured["clipped"] == measured["scrolling"] == measured["squeezed"] == []
    assert measured["errors"] == [] and console == []


def test_a_run_that_just_began_with_a_very_long_name_fits_a_phone(run: RunFolder) -> None:
    for path in (run.records, run.evaluation, run.summary, run.environment, run.gallery, run.skipped):
        path.unlink()
    run.settings.write_text(f"run: {{name: {'x' * 300}}}\ntrain: {{batch_size: {'9' * 80}}}\n")
    measured, console = browse(write_report(run), 360)
    assert measured["width"] <= 360 and measured["wide"] == []
    assert measured["errors"] == [] and console == []


def test_a_dark_browser_gets_a_dark_page(run: RunFolder) -> None:
    page = write_report(run)
    grounds = {}
    for scheme, number in (("dark", 0), ("light", 1)):
        flag = f"--blink-settings=preferredColorScheme={number}"
        measured, _ = browse(page, 1280, flag)
        assert measured["dark"] == (scheme == "dark")
        grounds[scheme] = measured["ground"]
    assert grounds == {"dark": "rgb(20, 23, 27)", "light": "rgb(251, 250, 247)"}


def test_the_probe_would_notice_an_error_and_a_page_that_is_too_wide(run: RunFolder) -> None:
    bad = 'console.error("seen"); setTimeout(() => { throw new Error("thrown"); });'
    bad += 'addEventListener("DOMContentLoaded", () => { document.querySelector("h1").style.width = "2000px"; });'
    measured, console = browse(write_report(run), 360, extra=bad)
    assert any("seen" in line for line in console)
    assert measured["errors"] == ["Uncaught Error: thrown"]
    assert measured["width"] >= 2000 and "H1." in measured["wide"]
