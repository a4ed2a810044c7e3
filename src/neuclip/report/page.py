"""The page itself: one self-contained HTML file beside the run's records."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib import resources
from pathlib import Path

from neuclip.errors import RunFailed
from neuclip.formatting import format_percent, format_samples
from neuclip.records import RunFolder, write_text_safely
from neuclip.report.contents import RunContents, read_contents, section
from neuclip.report.curves import all_curves
from neuclip.report.evaluations import Evaluation, all_evaluations
from neuclip.report.gallery import gallery_section
from neuclip.report.headline import headline_row, headlines
from neuclip.report.tables import (
    environment_table,
    evaluation_tables,
    files_table,
    full_captions_sentence,
    normalizer_table,
    settings_tables,
    skipped_sentences,
)
from neuclip.settings.secrets import without_queries


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run's folder, whatever of the run there is, and answer its path.

    >>> write_report(RunFolder("runs/first"))  # doctest: +SKIP
    PosixPath('runs/first/report.html')
    """
    page = make_page(read_contents(folder))
    try:
        write_text_safely(folder.report, page)
    except OSError as error:
        raise RunFailed(f"cannot write {folder.report}: {error.strerror}; make room or give write access") from error
    return folder.report


def make_page(run: RunContents) -> str:
    """The whole document as text."""
    evaluations = all_evaluations(run)
    last = evaluations[-1] if evaluations else None
    body = "".join(
        [
            header(run),
            headline_row(headlines(run, last)),
            section_of("Curves", all_curves(run, evaluations)),
            section_of("Evaluation", evaluation_tables(last)),
            section_of("Normalizer error", normalizer_table(run)),
            section_of("What it finds", gallery_section(run)),
            section_of("The run", particulars(run, last)),
        ]
    )
    style, script = own_file("style.css"), own_file("hover.js")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{security_policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(run.name)} – neuclip</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def header(run: RunContents) -> str:
    """Name, what was trained on what, when; and how far it is, if it is not done."""
    written = run.last_written
    facts = [
        run.objective,
        str(run.setting("model", "name") or ""),
        without_queries(str(run.setting("data", "train") or "")),
        f"{written.day} {written:%B %Y, %H:%M} UTC" if written else "",
    ]
    listed = "".join(f"<li>{escape(fact)}</li>" for fact in facts if fact)
    notices = [unfinished_sentence(run)] if not run.finished else []
    notices += [f"{name} was not measured: {why}." for name, why in section(run.summary.get("not_measured")).items()]
    notices += [f"{name} could not be read; what it holds is missing below." for name in run.unreadable]
    boxes = "".join(f'<p class="notice" role="status">{escape(notice)}</p>' for notice in notices)
    return (
        '<header><p class="kind">neuclip training run</p>'
        f'<h1>{escape(run.name)}</h1><ul class="facts">{listed}</ul>{boxes}</header>'
    )


def unfinished_sentence(run: RunContents) -> str:
    seen, planned = run.samples_seen, run.samples_planned
    if not seen:
        return "This run has not finished: it has not logged a step so far."
    reached = f"{format_samples(seen)} samples seen"
    if planned:
        reached = f"{format_samples(seen)} of {format_samples(planned)} samples seen ({format_percent(seen / planned)})"
    return f"This run has not finished: {reached}. The page shows what was written so far."


def section_of(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n"


def particulars(run: RunContents, last: Evaluation | None) -> str:
    """What the run was told, where it ran, what it left behind."""
    sentences = [*skipped_sentences(run, last), full_captions_sentence(run)]
    return (
        "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence)
        + f'<details><summary>Settings</summary><div class="settings">{settings_tables(run.settings)}</div></details>'
        f"<details><summary>Environment</summary>{environment_table(run.environment)}</details>"
        f"<details><summary>Files</summary>{files_table(run)}</details>"
    )


def own_file(name: str) -> str:
    return resources.files("neuclip.report").joinpath(name).read_text(encoding="utf-8")


def security_policy(script: str) -> str:
    """Tells the browser to load nothing from anywhere and to run no script but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
