"""The page itself: one self-contained HTML file beside the run's records."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from neuclip.errors import RunFailed
from neuclip.files import write_text
from neuclip.formatting import format_count, format_number, format_samples, percent
from neuclip.records import RunFolder
from neuclip.report.contents import RunContents, as_dict, read_contents
from neuclip.report.evaluations import all_evaluations, before_training
from neuclip.report.figures import all_figures
from neuclip.report.gallery import read_gallery
from neuclip.report.headline import tiles
from neuclip.report.tables import (
    evaluation_tables,
    files_table,
    mapping_table,
    normalizer_note,
    normalizer_table,
    skipped_sentences,
    truncated_captions_sentence,
)
from neuclip.report.verdict import verdict
from neuclip.secrets import without_queries

TEMPLATES = Environment(
    loader=PackageLoader("neuclip.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    "format_count": format_count,
    "format_number": format_number,
    "format_samples": format_samples,
    "percent": percent,
}


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run's folder from whatever files there are, and return its path.

    >>> write_report(RunFolder("runs/first"))  # doctest: +SKIP
    PosixPath('runs/first/report.html')
    """
    page = render_page(read_contents(folder))
    try:
        write_text(folder.report, page)
    except OSError as error:
        raise RunFailed(f"cannot write {folder.report}: {error.strerror}; make room or give write access") from error
    return folder.report


def render_page(run: RunContents) -> str:
    """The whole document as text."""
    evaluations = all_evaluations(run)
    last, before = evaluations[-1] if evaluations else None, before_training(evaluations)
    script = own_file("hover.js")
    return TEMPLATES.get_template("page.html").render(
        run=run,
        last=last,
        style=own_file("style.css"),
        script=script,
        policy=security_policy(script),
        facts=facts(run),
        notices=notices(run),
        verdict=verdict(run, evaluations),
        tiles=tiles(run, last, before),
        figures=all_figures(run, evaluations),
        evaluation_tables=evaluation_tables(last, before) if last else [],
        normalizer_table=normalizer_table(run),
        normalizer_note=normalizer_note(run),
        gallery=read_gallery(run),
        sentences=[*skipped_sentences(run, last), truncated_captions_sentence(run)],
        details={
            "Settings": [mapping_table(str(name), fields) for name, fields in run.settings.items()],
            "Environment": [mapping_table("Versions, device and data", run.environment)] if run.environment else [],
            "Files": [files_table(run)],
        },
    )


def facts(run: RunContents) -> list[str]:
    """What was trained on what, and when."""
    written = run.last_written
    return [
        run.objective,
        str(run.setting("model", "name") or ""),
        without_queries(str(run.setting("data", "train") or "")),
        str(as_dict(run.environment.get("data")).get("captions") or ""),
        f"{written.day} {written:%B %Y, %H:%M} UTC" if written else "",
    ]


def notices(run: RunContents) -> list[str]:
    """What a reader must know before reading on: how far an unfinished run is, and what is missing."""
    sentences = [] if run.finished else [unfinished_sentence(run)]
    not_measured = as_dict(run.summary.get("not_measured"))
    sentences += [f"{name} was not measured: {reason}." for name, reason in not_measured.items()]
    return sentences + [f"{name} could not be read; its contents are missing below." for name in run.unreadable]


def unfinished_sentence(run: RunContents) -> str:
    seen, planned = run.samples_seen, run.samples_planned
    if not seen:
        return "This run has not finished: it has not logged a step so far."
    progress = f"{format_samples(seen)} samples seen"
    if planned:
        progress = f"{format_samples(seen)} of {format_samples(planned)} samples seen ({percent(seen / planned)})"
    return f"This run has not finished: {progress}. The page shows what was written so far."


def own_file(name: str) -> str:
    return resources.files("neuclip.report").joinpath("templates", name).read_text(encoding="utf-8")


def security_policy(script: str) -> str:
    """Tells the browser to load nothing from anywhere and to run no script but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
