"""The pages in a real browser: do they fit, do they tell their values, do they run without a complaint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neuclip.cli.main import main
from neuclip.records import RunFolder
from neuclip.report.run_report import write_report
from tests.builders.browser import Tab
from tests.builders.run_folders import make_fine_tuned, write_results, write_run

pytestmark = pytest.mark.slow

NOTE_ERRORS = """
window.noted = [];
addEventListener("error", (event) => noted.push(event.message));
addEventListener("securitypolicyviolation", (event) => noted.push(event.violatedDirective));
"""
# Opens everything that can be opened, then measures. `hidden`: letters of a chart that lie outside of its frame.
PROBE = """(() => {
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  const name = (one) => one.tagName + "." + one.className;
  const wide = [...document.querySelectorAll("main *")]
    .filter((one) => !one.closest(".scroll") && one.getBoundingClientRect().right > innerWidth + 0.5).map(name);
  const hidden = [...document.querySelectorAll(".chart > svg text")].filter((text) => {
    const box = text.getBBox(), frame = text.ownerSVGElement.viewBox.baseVal;
    return box.x < 0 || box.y < 0 || box.x + box.width > frame.width || box.y + box.height > frame.height;
  }).map((text) => text.textContent);
  const crossing = [...document.querySelectorAll(".chart > svg")].filter((svg) => {
    const boxes = [...svg.querySelectorAll("text")].map((text) => text.getBBox());
    return boxes.some((one, place) => boxes.slice(place + 1).some((other) => one.x < other.x + other.width
      && other.x < one.x + one.width && one.y < other.y + other.height - 2 && other.y < one.y + one.height - 2));
  }).map((svg) => svg.ariaLabel);
  const scrolling = [...document.querySelectorAll(".scroll")]
    .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText.slice(0, 40));
  return {
    errors: noted, wide, hidden, crossing, scrolling, viewport: innerWidth, width: document.documentElement.scrollWidth,
    broken: [...document.images].filter((image) => !image.naturalWidth).length, images: document.images.length,
    charts: document.querySelectorAll(".chart").length, drawn: document.querySelectorAll(".chart > svg .line").length,
    ground: getComputedStyle(document.body).backgroundColor,
  };
})()"""


def browse(tab: Tab, page: Path, width: int, *, dark: bool = False, extra: str = "") -> dict[str, Any]:
    """What the probe measured in a window of that width, with what the browser complained of."""
    tab.complaints = []
    with tab.script(NOTE_ERRORS + extra):
        tab.open(page.as_uri(), width=width, dark=dark)
    measured = tab.evaluate(PROBE)
    return measured | {"console": list(tab.complaints)}


def expect_fit(measured: dict[str, Any], width: int) -> None:
    assert measured["viewport"] == width and measured["width"] <= width
    assert measured["wide"] == measured["hidden"] == measured["crossing"] == measured["scrolling"] == []
    assert measured["errors"] == measured["console"] == []


def values(tab: Tab, title: str) -> str:
    """What stands above a chart, in one line."""
    script = f"[...document.querySelectorAll('.chart')].find((one) => one.innerText.startsWith('{title}'))"
    return " ".join(tab.evaluate(f"{script}.querySelector('.values').innerText").split())


def point(tab: Tab, title: str, share: float) -> None:
    """Move a real pointer over a chart, to this share of its width."""
    box = tab.evaluate(
        f"""(() => {{
          const chart = [...document.querySelectorAll('.chart')].find((one) => one.innerText.startsWith('{title}'));
          chart.scrollIntoView({{ block: "center" }});
          const box = chart.querySelector(':scope > svg').getBoundingClientRect();
          return {{ x: box.left, y: box.top + box.height / 2, width: box.width }};
        }})()"""
    )
    tab.command("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + share * box["width"], y=box["y"])


def compare(runs: list[Path]) -> Path:
    page = runs[0].parent / "compare.html"
    assert main(["compare", *map(str, runs), "--output", str(page)]) == 0
    return page


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Two methods with three seeds each, one with task results."""
    runs = [
        write_run(tmp_path / f"{name}-{seed}", recalls, seed=seed, objective=name, errors=[3.0, 1.0, 0.3, 0.02 * seed])
        for name, recalls in (("fastclip", [0.10, 0.20, 0.30, 0.40]), ("neuclip", [0.25, 0.41, 0.50, 0.60]))
        for seed in (1, 2, 3)
    ]
    write_results(runs[0] / "tasks.jsonl")
    return compare(runs)


@pytest.mark.parametrize("width", [360, 390, 1280])
def test_the_report_fits_its_window_and_the_console_stays_silent(tab: Tab, run: RunFolder, width: int) -> None:
    make_fine_tuned(run)
    measured = browse(tab, write_report(run), width)
    expect_fit(measured, width)
    assert measured["images"] == 72 and measured["broken"] == 0
    assert measured["charts"] == 15 and measured["drawn"] == 15 + 3 + 3 + 1


def test_a_run_that_just_began_with_a_very_long_name_fits_a_phone(tab: Tab, run: RunFolder) -> None:
    for path in (run.records, run.evaluation, run.summary, run.environment, run.gallery):
        path.unlink()
    run.settings.write_text(f"run: {{name: {'x' * 300}}}\n")
    expect_fit(browse(tab, write_report(run), 360), 360)


@pytest.mark.parametrize("width", [360, 1280])
def test_the_comparison_fits_its_window_and_so_do_many_groups_with_long_names(
    tab: Tab, comparison: Path, tmp_path: Path, width: int
) -> None:
    measured = browse(tab, comparison, width)
    scrolling = measured.pop("scrolling")  # the names of settings do not wrap
    expect_fit(measured | {"scrolling": []}, width)
    assert width < 1280 or scrolling == []
    names = [f"{place}-{'a-very-long-name' * 4}" for place in range(9)]
    many = [write_run(tmp_path / name, [0.2, 0.3], settings={"model": {"name": name[:1]}}) for name in names]
    expect_fit(browse(tab, compare(many), width) | {"scrolling": [], "crossing": []}, width)


def test_the_legend_shows_the_values_under_the_pointer_or_the_last_ones(
    tab: Tab, run: RunFolder, comparison: Path
) -> None:
    browse(tab, write_report(run), 1280)
    last = values(tab, "Temperature")
    assert last == "0.0307 at 512 k"
    point(tab, "Temperature", 0.5)
    middle = values(tab, "Temperature")
    shown, samples = (float(text) for text in middle.removesuffix(" k").split(" at "))
    assert shown == pytest.approx(0.03 + 0.04 * 2.718281828 ** (-4 * samples / 512), rel=0.02) and 150 < samples < 350
    point(tab, "Recall@1", 1.0)
    assert values(tab, "Temperature") == last
    assert values(tab, "Recall@1").startswith("new-drawings, image to text: 39.9 % new-drawings, text to image: 35.1 %")
    browse(tab, comparison, 1280)
    assert values(tab, "Normalizer") == "fastclip, mean of 3: 0.0400 neuclip, mean of 3: 0.0400 at 1 k"
    assert values(tab, "Calibration").startswith("fastclip, mean of 3: 1.10 ")  # zeros are kept


def test_without_javascript_last_values_and_tables_remain(tab: Tab, run: RunFolder) -> None:
    tab.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.command("Page.navigate", url=write_report(run).as_uri())
        nodes: list[str] = []
        while not nodes:  # there is no script to wait in
            tree = tab.command("DOMSnapshot.captureSnapshot", computedStyles=[])
            nodes = [tree["strings"][place] for place in tree["documents"][0]["layout"]["text"] if place >= 0]
    finally:
        tab.command("Emulation.setScriptExecutionDisabled", value=False)
    text = " ".join(" ".join(nodes).split())
    assert "2026-11-16-neuclip-tiny: 0.0307" in text and "a mini-batch of 128: 1.9" in text
    assert "held-out set direction over chance" in text and "1,143 images" in text


def test_a_dark_browser_gets_a_dark_page_and_paper_a_light_one(tab: Tab, run: RunFolder) -> None:
    page = write_report(run)
    light, dark = (browse(tab, page, 1280, dark=dark)["ground"] for dark in (False, True))
    preferred = [{"name": "prefers-color-scheme", "value": "dark"}]
    tab.command("Emulation.setEmulatedMedia", media="print", features=preferred)
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.command("Emulation.setEmulatedMedia", media="")
    assert (light, dark, paper) == ("rgb(251, 250, 247)", "rgb(20, 23, 27)", "rgb(251, 250, 247)")


def test_the_probe_would_notice_an_error_and_a_page_that_is_too_wide(tab: Tab, run: RunFolder) -> None:
    bad = 'console.error("seen"); setTimeout(() => { throw new Error("thrown"); });'
    bad += 'addEventListener("DOMContentLoaded", () => { document.querySelector("h1").style.width = "2000px"; });'
    measured = browse(tab, write_report(run), 360, extra=bad)
    assert any("seen" in line for line in measured["console"])
    assert measured["errors"] == ["Uncaught Error: thrown"]
    assert measured["width"] >= 2000 and "H1." in measured["wide"]
