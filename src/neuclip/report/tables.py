"""The tables: evaluation, normalizer error, settings, environment, files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from neuclip.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_samples,
    plural,
    times_chance,
)
from neuclip.report.contents import RunContents, number, section
from neuclip.report.evaluations import DIRECTIONS, Evaluation, Retrieval
from neuclip.settings.secrets import without_queries

ESTIMATOR_NAMES = {"method": "this run's method", "minibatch": "a mini-batch"}
FEW_COLUMNS = 5  # such a table, stretched over the whole page, would tear its rows apart
Row = Sequence[str]


def table(caption: str, head: Row, rows: Iterable[Row], *, words: int = 1) -> str:
    """A table whose first `words` columns are words and whose other columns are figures. It scrolls within itself."""
    width = ' class="few"' if len(head) <= FEW_COLUMNS else ""
    kinds = ['class="words"' if place < words else 'class="figures"' for place in range(len(head))]
    header = "".join(f'<th scope="col" {kind}>{escape(name)}</th>' for kind, name in zip(kinds, head, strict=True))
    body = ""
    for row in rows:
        first = f'<th scope="row" {kinds[0]}>{escape(row[0])}</th>'
        rest = "".join(f"<td {kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:], strict=True))
        body += f"<tr>{first}{rest}</tr>"
    return (
        # Focusable, so that a keyboard can scroll what does not fit.
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table{width}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def evaluation_tables(last: Evaluation | None) -> str:
    """Every figure of the newest evaluation, beside what guessing gives."""
    if last is None:
        return '<p class="absence">Nothing was evaluated.</p>'
    parts = []
    if last.retrieval:
        parts.append(retrieval_table(last.retrieval))
    if last.zero_shot:
        rows = [
            [
                task.dataset,
                format_percent(task["top1"]),
                times_chance(task["top1"], task["chance"]).removesuffix(" chance") or UNKNOWN,
                format_percent(task["top5"]),
                format_percent(task["mean_per_class"]),
                format_percent(task["chance"]),
                format_count(task["classes"]),
                format_count(task["images"]),
                format_count(task["skipped"]),
            ]
            for task in last.zero_shot
        ]
        head = ["task", "top 1", "over chance", "top 5", "mean per class", "chance", "classes", "images", "skipped"]
        parts.append(table("Zero-shot classification", head, rows))
    if last.others:
        rows = [[key, format_number(value)] for key, value in last.others.items()]
        parts.append(table("Other figures", ["figure", "value"], rows))
    when = f'<p class="lead">Measured at {format_samples(last.samples)} samples seen.</p>' if last.samples else ""
    return when + "".join(parts)


def retrieval_table(found: list[Retrieval]) -> str:
    """One row per held-out set and direction; each recall is followed by what guessing gives."""
    depths = sorted({k for retrieval in found for _, k in (*retrieval.recall, *retrieval.chance)})
    head = ["held-out set", "direction", "over chance"]
    head += [name for k in depths for name in (f"recall at {k}", "chance")] + ["images", "skipped"]
    rows = []
    for retrieval in found:
        for direction, words in DIRECTIONS.items():
            figures = [(retrieval.recall.get((direction, k)), retrieval.chance.get((direction, k))) for k in depths]
            if all(recall is None for recall, _ in figures):
                continue
            ratio = times_chance(*figures[0]).removesuffix(" chance") or UNKNOWN
            cells = [format_percent(value) for pair in figures for value in pair]
            counts = [format_count(retrieval.images), format_count(retrieval.skipped)]
            rows.append([retrieval.dataset, words, ratio, *cells, *counts])
    return table("Retrieval", head, rows, words=2)


def normalizer_table(run: RunContents) -> str:
    """The error of each estimator against the exact normalizers, or a sentence that says why there is none."""
    measured = section(run.summary.get("normalizer_error"))
    estimators = section(measured.get("estimators"))
    if not estimators:
        return (
            '<p class="absence">The normalizer error was not measured. <code>neuclip error RUN</code> measures it, '
            "as does a run with <code>evaluation.error_anchors</code> set.</p>"
        )
    columns = {"image": "image", "text": "text", "mean": "mean", "mean_without_duplicates": "mean without duplicates"}
    rows = [
        [
            estimator_name(name, run),
            *(format_number(number(section(errors).get(key)), keep_zeros=True) for key in columns),
        ]
        for name, errors in estimators.items()
    ]
    anchors, duplicates = number(measured.get("anchors")), number(measured.get("duplicates"))
    facts = [
        f"{plural(anchors, 'anchor')} of the training set" if anchors is not None else "",
        f"{format_count(duplicates)} of them with a caption that others share" if duplicates is not None else "",
        fact("temperature", format_number(number(measured.get("temperature")))),
        fact("eps", format_number(number(measured.get("eps")))),
        fact("at the eps floor", format_percent(number(measured.get("share_at_floor")))),
    ]
    sentence = (
        "Mean squared difference between the estimated and the exact log-normalizer over the whole training set: "
        "0 is exact, and smaller is better."
    )
    return (
        f'<p class="lead">{sentence}</p>'
        + table("Normalizer error by estimator", ["estimator", *columns.values()], rows)
        + f'<p class="note">{escape("; ".join(part for part in facts if part))}.</p>'
    )


def fact(name: str, value: str) -> str:
    return "" if value == UNKNOWN else f"{name} {value}"


def estimator_name(name: str, run: RunContents) -> str:
    if name == "minibatch" and run.batch_size:
        return f"a mini-batch of {format_count(run.batch_size)}"
    if name == "method" and run.objective:
        return f"{run.objective}, this run"
    return ESTIMATOR_NAMES.get(name, name)


def skipped_sentences(run: RunContents, last: Evaluation | None) -> list[str]:
    """What skipped.jsonl lists: how many samples could not be used, and why, in training and in each held-out set."""
    if run.folder.skipped.name in run.unreadable:
        return []  # said at the top of the page
    if not run.skipped and any(section(run.summary.get("skipped")).values()):
        return ["Samples were skipped; skipped.jsonl, which listed them, is gone."]
    so_far = "" if run.summary else " so far"
    found = [
        f"{plural(reasons.total(), 'sample')} of {f'the held-out {name}' if name else 'the training data'} skipped"
        f"{so_far}: {', '.join(f'{reason} {format_count(count)}' for reason, count in reasons.most_common())}."
        for name, reasons in run.skipped.items()
    ]
    if "" not in run.skipped:
        found.insert(0, f"No sample of the training data was skipped{so_far}.")
    if last is not None and last.counts_skipped and not run.skipped.keys() - {""}:
        found.append(f"No held-out sample was skipped{so_far}.")
    return found


def full_captions_sentence(run: RunContents) -> str:
    """Of the summary, or while the run goes on of its last record."""
    last = run.records[-1] if run.records else {}
    share = number((run.summary or last).get("truncated_captions"))
    if share is None:
        return ""
    return f"{format_percent(share)} of the captions fill the model's context; what is longer was cut off there."


def settings_tables(settings: Mapping[str, Any]) -> str:
    if not settings:
        return '<p class="absence">settings.yaml is missing or could not be read.</p>'
    return "".join(
        table(str(name), ["setting", "value"], flatten(fields if isinstance(fields, dict) else {"": fields}), words=2)
        for name, fields in settings.items()
    )


def environment_table(environment: Mapping[str, Any]) -> str:
    if not environment:
        return '<p class="absence">environment.json is missing or could not be read.</p>'
    return table("Where the run was made", ["what", "value"], flatten(environment), words=2)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[Row]:
    """Nested mappings as dotted names: `{"data": {"count": 3}}` gives ("data.count", "3")."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            shown = value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
            yield [f"{prefix}{key}", without_queries(shown)]


def files_table(run: RunContents) -> str:
    """What lies in the run's folder, and what each file is for."""
    folder = run.folder
    meanings = {
        folder.settings: "everything the run was told; enough to repeat it",
        folder.environment: "versions, device, fingerprint of the data",
        folder.records: f"{plural(len(run.records), 'line')}, one per logged step",
        folder.evaluation: f"{plural(len(run.evaluations), 'line')}, one per evaluation",
        folder.summary: "final figures",
        folder.gallery: "the queries shown above",
        folder.skipped: "samples that could not be used, with the reason",
        folder.checkpoints: "to resume from",
        folder.model: "the trained towers, as open_clip loads them",
    }
    rows = [[path.name + ("/" if path.is_dir() else ""), size_in_words(path), text] for path, text in meanings.items()]
    return table("Files of the run", ["file", "size", "what it is"], rows, words=3)


def size_in_words(path: Path) -> str:
    try:
        if path.is_dir():
            return format_bytes(sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file()))
        return format_bytes(path.stat().st_size)
    except OSError:  # absent, or removed by the running training between two looks
        return "not there"
