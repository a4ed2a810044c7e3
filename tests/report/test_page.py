"""The document: well formed, self-contained, safe; and tables in their other forms."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from neuclip.errors import RunFailed
from neuclip.records import RunFolder, write_json
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
from tests.report.sample_runs import SETTINGS, change_json, write_lines

VOID = {"meta", "img", "br", "link", "input", "hr"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


class Structure(HTMLParser):
    """Remembers which tags were opened and fails on a closing tag that closes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing, line {self.getpos()[0]}"


def structure(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """Its tags with their attributes."""
    parser = Structure()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.seen


def report(folder: RunFolder) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def visible_text(page: str) -> str:
    """What a reader sees without a script, in one line."""
    without_code = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without_code)))


def refuse_foreign(page: str) -> None:
    """The page is one file: no script but its own and numbers, no attribute that runs one, nothing to fetch."""
    tags = structure(page)
    assert [attributes.get("type") for tag, attributes in tags if tag == "script"].count(None) == 1
    assert all(attributes.get("type") in (None, "application/json") for tag, attributes in tags if tag == "script")
    for tag, attributes in tags:
        assert tag not in ("link", "iframe", "object", "base", "a", "form")
        assert not any(name.startswith("on") or name == "href" for name in attributes)
        assert (attributes.get("src") or "data:image/").startswith("data:image/")
    assert "@import" not in page and "url(" not in page


def test_the_report_is_one_closed_document_with_one_script_and_nothing_to_fetch(run: RunFolder) -> None:
    assert write_report(run) == run.path / "report.html"
    page = report(run)
    refuse_foreign(page)
    tags = [tag for tag, _ in structure(page)]
    assert tags.count("h1") == tags.count("main") == 1 and tags.count("img") == 72
    assert len(page) < 1_000_000


def test_the_policy_lets_the_browser_load_nothing_and_run_only_the_pages_own_script(run: RunFolder) -> None:
    page = report(run)
    policy = next(attributes["content"] for tag, attributes in structure(page) if attributes.get("http-equiv"))
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_a_hostile_text_is_shown_and_not_run_wherever_it_comes_from(run: RunFolder) -> None:
    gallery = json.loads(run.gallery.read_text())
    gallery["dataset"] = HOSTILE
    gallery["image_to_text"][0]["caption"] = HOSTILE
    gallery["image_to_text"][0]["matches"][0]["caption"] = HOSTILE
    gallery["text_to_image"][0]["matches"][0]["caption"] = HOSTILE
    write_json(run.gallery, gallery)
    # Values of their own: of one dict that stands in several places YAML makes aliases, which our reader refuses.
    hostile: dict[str, Any] = {"run": {"name": HOSTILE}, "model": {"name": HOSTILE}, "data": {"train": HOSTILE}}
    run.settings.write_text(yaml.safe_dump(SETTINGS | hostile))
    figures = {f"{HOSTILE}.image_to_text_recall_at_1": 0.5, f"{HOSTILE}.top1": 0.5, f"{HOSTILE}2.top1": 0.5}
    write_lines(run.evaluation, [{"samples": samples} | figures for samples in (100, 200)])
    change_json(
        run.summary,
        evaluation=dict(figures),
        not_measured={HOSTILE: HOSTILE},
        skipped={HOSTILE: 1},
        skipped_held_out={HOSTILE: {HOSTILE: 2}},
    )
    write_json(run.environment, {HOSTILE: HOSTILE, "device": HOSTILE, "started": HOSTILE})
    page = report(run)
    refuse_foreign(page)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script>alert" not in page
    text = visible_text(page)
    for place in (
        f"run {HOSTILE} NeuCLIP · {HOSTILE} · {HOSTILE}",
        f"From {HOSTILE}.",
        f"on {HOSTILE}",
        f"{HOSTILE} image to text",
    ):
        assert place in text
    assert f"held-out {HOSTILE} skipped: {HOSTILE}." in text and f"{HOSTILE} was not measured: {HOSTILE}." in text


@pytest.mark.parametrize("source", ["https://example.org/spy.png", 'data:image/png;base64,AA" onerror="alert(3)'])
def test_an_image_that_the_file_does_not_hold_is_not_shown(source: str) -> None:
    page = render_html(Page("pairs", "x", sections=[Section("", [Gallery("", [Query("a dog", source)])])]))
    assert [attributes["src"] for tag, attributes in structure(page) if tag == "img"] == [""]
    assert "example.org" not in page and "onerror" not in page


TABLE = Table(
    "Figures",
    ["data_set", "a|b", "n"],
    [["x & y", "50 % of \\all", Cell("12.3 ± 0.4 %", "+1.2 [−0.3, +2.7]", strong=True)], ["z", "~{^}", "–"]],
    text_columns=2,
    notes=["one\nnote", ""],
)


def test_a_table_on_the_terminal_has_columns_to_the_left_for_text_and_to_the_right_for_numbers() -> None:
    assert text_table(TABLE).splitlines() == [
        "data_set  a|b                      n",
        "x & y     50 % of \\all  12.3 ± 0.4 %",
        "z         ~{^}                     –",
    ]
    assert "12.3 ± 0.4 % (+1.2 [−0.3, +2.7])" in text_table(TABLE, notes=True)


def test_markdown_parses_back_into_the_same_cells() -> None:
    head, rule, first, second, _, note = markdown_table(TABLE).splitlines()
    cells = [cell.strip().replace("\\|", "|").replace("\\\\", "\\") for cell in re.split(r"(?<!\\)\|", head)[1:-1]]
    assert cells == TABLE.head and rule == "| --- | --- | ---: |"
    assert first == "| x & y | 50 % of \\\\all | **12.3 ± 0.4 % (+1.2 [−0.3, +2.7])** |"
    assert second == "| z | ~{^} | – |" and note == "one note"


def test_latex_is_escaped_and_balanced() -> None:
    lines = latex_table(TABLE).splitlines()
    assert lines[:2] == [r"% \usepackage{booktabs}", "% one note"]
    assert lines[2] == r"\begin{tabular}{llr}" and lines[-1] == r"\end{tabular}"
    assert r"data\_set & a|b & n \\" in lines
    assert r"x \& y & 50 \% of \textbackslash{}all & \textbf{12.3 $\pm$ 0.4 \% (+1.2 [$-$0.3, +2.7])} \\" in lines
    assert r"z & \textasciitilde{}\{\textasciicircum{}\} & -- \\" in lines


def test_a_page_that_cannot_be_written_is_a_failure_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(RunFailed, match=r"cannot write .*page\.html: .*; make room or give write access"):
        write_page(tmp_path / "page.html", "text")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_and_line_has_the_contrast_of_level_aa(scheme: str) -> None:
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", own_file("style.css"))
    palette = {name: light if scheme == "light" else dark for name, light, dark in found}
    together = [
        (text, ground) for text in ("ink", "quiet", "right") for ground in ("paper", "surface", "right-surface")
    ]
    together += [("notice", "notice-surface"), *((f"series-{place}", "surface") for place in range(6))]
    for text, ground in together:
        lighter, darker = sorted((luminance(palette[text]), luminance(palette[ground])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, f"{text} on {ground}"


def luminance(colour: str) -> float:
    """Relative luminance as the web's accessibility guidelines define it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
