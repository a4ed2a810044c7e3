"""Every page is one closed, safe file that fits its reader; and tables in their other forms."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuclip.cli.main import main
from neuclip.errors import RunFailed
from neuclip.records import RunFolder, write_json, write_lines
from neuclip.report.page import (
    Cell,
    Gallery,
    Page,
    Query,
    Section,
    Table,
    latex_table,
    markdown_table,
    own_file,
    render_html,
    text_table,
    write_page,
)
from neuclip.report.run_report import write_report
from tests.builders.pages import Shown, read_page, refuse_foreign
from tests.builders.run_folders import SETTINGS, change_json, write_run

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def test_the_report_is_one_small_file_that_fetches_nothing_and_runs_only_its_own_script(run: RunFolder) -> None:
    assert write_report(run) == run.path / "report.html"
    text = run.report.read_text(encoding="utf-8")
    page = read_page(text)
    refuse_foreign(page)
    assert len(page.all("h1")) == len(page.all("main")) == 1 and len(page.all("img")) == 72
    assert len(text) < 1_000_000
    policy = next(one.attributes["content"] for one in page.all("meta") if "http-equiv" in one.attributes)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def hostile_report(run: RunFolder) -> Shown:
    """With the text in every place that a user, a data set or a file of another machine can reach."""
    gallery = json.loads(run.gallery.read_text())
    gallery["dataset"] = HOSTILE
    gallery["image_to_text"][0]["caption"] = HOSTILE
    for direction in ("image_to_text", "text_to_image"):
        gallery[direction][0]["matches"][0]["caption"] = HOSTILE
    write_json(run.gallery, gallery)
    # Values of their own: of one dict that stands in several places YAML makes aliases, which our reader refuses.
    hostile: dict[str, Any] = {"run": {"name": HOSTILE}, "model": {"name": HOSTILE}, "data": {"train": HOSTILE}}
    run.settings.write_text(yaml.safe_dump(SETTINGS | hostile))
    figures = {f"{HOSTILE}.image_to_text_recall_at_1": 0.5, f"{HOSTILE}.top1": 0.5, f"{HOSTILE}2.top1": 0.5}
    write_lines(run.evaluation, [{"samples": samples} | figures for samples in (100, 200)])
    told = {"not_measured": {HOSTILE: HOSTILE}, "skipped": {HOSTILE: 1}, "skipped_held_out": {HOSTILE: {HOSTILE: 2}}}
    change_json(run.summary, evaluation=dict(figures), **told)
    write_json(run.environment, {HOSTILE: HOSTILE, "device": HOSTILE, "started": HOSTILE})
    return read_page(write_report(run))


def hostile_comparison(run: RunFolder) -> Shown:
    extra, folder = {f"{HOSTILE}.top1": 0.5, f"{HOSTILE}.images": 9}, run.path.parent
    name = {"run": {"name": HOSTILE}, "model": {"name": HOSTILE}}
    paths = [write_run(folder / f"run-{seed}", [0.1, 0.2], seed=seed, extra=extra) for seed in (1, 2)]
    paths.append(write_run(folder / "other", [0.3, 0.4], settings=name, extra=extra))
    assert main(["compare", *map(str, paths), "--output", str(folder / "compare.html")]) == 0
    return read_page(folder / "compare.html")


@pytest.mark.parametrize(
    ("make", "places"),
    [
        (
            hostile_report,
            [
                f"run {HOSTILE} NeuCLIP · {HOSTILE} · {HOSTILE}",
                f"From {HOSTILE}.",
                f"on {HOSTILE}",
                f"{HOSTILE} image to text",
                f"held-out {HOSTILE}: {HOSTILE}.",
                f"{HOSTILE} was not measured: {HOSTILE}.",
            ],
        ),
        (hostile_comparison, [f"comparison run, {HOSTILE}", f"{HOSTILE} top-1 accuracy", f"model.name tiny {HOSTILE}"]),
    ],
)
def test_a_hostile_text_is_shown_and_not_run_wherever_it_comes_from(run: RunFolder, make, places: list[str]) -> None:
    page = make(run)
    refuse_foreign(page)
    assert [place for place in places if place not in page.text] == []


@pytest.mark.parametrize("source", ["https://example.org/spy.png", 'data:image/png;base64,AA" onerror="alert(3)'])
def test_an_image_that_is_not_embedded_in_the_file_is_not_shown(source: str) -> None:
    text = render_html(Page("pairs", "x", sections=[Section("", [Gallery("", [Query("a dog", source)])])]))
    assert [one.attributes["src"] for one in read_page(text).all("img")] == [""]
    assert "example.org" not in text and "onerror" not in text


TABLE = Table(
    "Figures",
    ["data_set", "a|b", "n"],
    [["x & y", "50 % of \\all", Cell("12.3 ± 0.4 %", "+1.2 [−0.3, +2.7]", strong=True)], ["z", "~{^}", "–"]],
    text_columns=2,
    notes=["one\nnote", ""],
)
FORMS = {
    text_table: [
        "data_set  a|b                      n",
        "x & y     50 % of \\all  12.3 ± 0.4 %",
        "z         ~{^}                     –",
    ],
    markdown_table: [
        "| data_set | a\\|b | n |",
        "| --- | --- | ---: |",
        "| x & y | 50 % of \\\\all | **12.3 ± 0.4 % (+1.2 [−0.3, +2.7])** |",
        "| z | ~{^} | – |",
        "",
        "one note",
    ],
    latex_table: [
        r"% \usepackage{booktabs}",
        "% one note",
        r"\begin{tabular}{llr}",
        r"\toprule",
        r"data\_set & a|b & n \\",
        r"\midrule",
        r"x \& y & 50 \% of \textbackslash{}all & \textbf{12.3 $\pm$ 0.4 \% (+1.2 [$-$0.3, +2.7])} \\",
        r"z & \textasciitilde{}\{\textasciicircum{}\} & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_is_escaped_for_its_format(form) -> None:
    assert form(TABLE).splitlines() == FORMS[form]
    assert "12.3 ± 0.4 % (+1.2 [−0.3, +2.7])" in text_table(TABLE, notes=True)


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(RunFailed, match=r"cannot write .*page\.html: .*; free some space or change the permissions"):
        write_page(tmp_path / "page.html", "text")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_and_line_has_the_contrast_of_level_aa(scheme: str) -> None:
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", own_file("style.css"))
    palette = {name: light if scheme == "light" else dark for name, light, dark in found}
    grounds = ("paper", "surface", "right-surface")
    together = [(text, ground) for text in ("ink", "quiet", "right") for ground in grounds]
    together += [("notice", "notice-surface"), *((f"series-{place}", "surface") for place in range(6))]
    for text, ground in together:
        lighter, darker = sorted((luminance(palette[text]), luminance(palette[ground])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{text} on {ground}"


def luminance(colour: str) -> float:
    """Relative luminance as the web's accessibility guidelines define it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
