"""The comparison in a real browser, as the report in test_browser.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip.report.compare import compare, write_comparison
from tests.builders.browser import Tab
from tests.report.compared_runs import write_results, write_run
from tests.report.test_browser import browse

pytestmark = pytest.mark.slow


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Two methods with three seeds each, one with task results, on different data."""
    runs = [
        write_run(
            tmp_path / f"{name}-{seed}",
            recalls,
            seed=seed,
            objective=name,
            errors=[3.0, 1.0, 0.3, 0.02 * seed],
            data=name,
        )
        for name, recalls in (("fastclip", [0.10, 0.20, 0.30, 0.40]), ("neuclip", [0.25, 0.41, 0.50, 0.60]))
        for seed in (1, 2, 3)
    ]
    write_results(runs[0] / "tasks.jsonl")
    write_comparison(compare(runs), tmp_path / "compare.html")
    return tmp_path / "compare.html"


@pytest.mark.parametrize("width", [360, 1280])
def test_the_comparison_fits_its_window_and_the_console_stays_silent(tab: Tab, page: Path, width: int) -> None:
    measured, console = browse(tab, page, width)
    assert measured["viewport"] == width and measured["width"] <= width
    assert measured["wide"] == measured["clipped"] == measured["squeezed"] == []
    # The names of settings do not wrap: on a phone that table scrolls by itself.
    assert measured["scrolling"] == (["Settings that differ"] if width == 360 else [])
    assert measured["errors"] == [] and console == []
    assert measured["hovered"].startswith("1 k: A 4.05, B 4.05")


def test_many_groups_with_long_names_fit_a_phone(tab: Tab, tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / f"{index}-{'a-very-long-name-of-a-run' * 3}",
            [0.2, 0.3],
            settings={"model": {"name": f"m{index}"}},
        )
        for index in range(9)
    ]
    write_comparison(compare(runs), tmp_path / "compare.html")
    measured, console = browse(tab, tmp_path / "compare.html", 360)
    assert measured["width"] <= 360 and measured["wide"] == measured["clipped"] == []
    assert measured["errors"] == [] and console == []


def test_labels_of_neighbouring_curves_do_not_overlap(tab: Tab, page: Path) -> None:
    overlap = """
    addEventListener("load", () => {
      document.querySelectorAll("figure.curve svg").forEach((svg) => {
        const boxes = [...svg.querySelectorAll(".end")].map((text) => text.getBoundingClientRect());
        boxes.forEach((one, index) => boxes.slice(index + 1).forEach((other) => {
          const apart = one.right < other.left || other.right < one.left;
          if (!apart && Math.abs(one.top - other.top) < 9) throw new Error("labels overlap");
        }));
      });
    });
    """
    measured, _ = browse(tab, page, 360, extra=overlap)
    assert measured["errors"] == []
