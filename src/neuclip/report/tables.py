"""The tables and sentences of the page: evaluation, normalizer error, skipped samples, settings, environment, files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuclip.formatting import UNKNOWN, byte_size, format_count, format_number, percent, plural, times_chance
from neuclip.report.contents import RunContents, as_dict, number
from neuclip.report.evaluations import ALL_DIRECTIONS, DIFFERENT, Evaluation
from neuclip.secrets import without_queries

Row = list[str]


@dataclass(frozen=True)
class Table:
    """The first `text_columns` columns are text, the others numbers."""

    caption: str
    head: Row
    rows: list[Row]
    text_columns: int = 1
    note: str = ""


def evaluation_tables(last: Evaluation, before: Evaluation | None = None) -> list[Table]:
    """What training changed, then every figure of the newest evaluation, beside chance."""
    others = Table(
        "Other figures", ["figure", "value"], [[key, format_number(last.others[key])] for key in last.others]
    )
    found = (change_table(before, last), retrieval_table(last), zero_shot_table(last), others)
    return [table for table in found if table.rows]


def change_table(before: Evaluation | None, last: Evaluation) -> Table:
    """The first figures of each set before and after training; no rows where nothing was measured at the start."""
    rows = []
    for held_out in (*last.retrieval, *last.zero_shot):
        start = before.find(held_out.name) if before else None
        for words, value in held_out.first_figures.items():
            if start and (first := start.first_figures.get(words)) is not None:
                change = f"{100 * (value - first):+.1f}".replace("-", "−")
                rows.append([held_out.name, words, percent(first), percent(value), change])
    head = ["held-out set", "figure", "before", "after", "points"]
    return Table("Before and after training", head, rows, text_columns=2)


def retrieval_table(last: Evaluation) -> Table:
    """One row per held-out set and direction; chance is in parentheses."""
    depths = sorted({k for one in last.retrieval for direction in ALL_DIRECTIONS for k in one.depths(direction)})
    head = ["held-out set", "direction", "over chance", *(f"recall@{k} (chance)" for k in depths)]
    head += ["median rank", "images", "captions", "skipped"]
    rows = []
    for held_out in last.retrieval:
        for direction, words in ALL_DIRECTIONS.items():
            figures = [held_out.recall_and_chance(direction, k) for k in depths]
            if any(recall is not None for recall, _ in figures):
                cells = [f"{percent(recall)} ({percent(chance)})" for recall, chance in figures]
                cells += [format_count(held_out[f"{direction}_median_rank"])]
                captions = "different_captions" if direction in DIFFERENT else "captions"
                cells += [format_count(held_out[name]) for name in ("images", captions, "skipped")]
                rows.append([held_out.name, words, over_chance(*figures[0]), *cells])
    definitions = dict.fromkeys(text for held_out in last.retrieval for text in held_out.definitions)
    return Table("Retrieval", head, rows, text_columns=2, note=f"Recall@k: {'; '.join(definitions)}.")


def zero_shot_table(last: Evaluation) -> Table:
    rows = [
        [
            task.name,
            percent(task["top1"]),
            over_chance(task["top1"], task["chance"]),
            *(percent(task[metric]) for metric in ("top5", "mean_per_class", "chance", "largest_class")),
            *(format_count(task[name]) for name in ("classes", "images", "skipped")),
        ]
        for task in last.zero_shot
    ]
    head = ["task", "top-1", "over chance", "top-5", "mean per class", "chance", "largest class"]
    head += ["classes", "images", "skipped"]
    return Table("Zero-shot classification", head, rows)


def over_chance(value: float | None, chance: float | None) -> str:
    return times_chance(value, chance).removesuffix(" chance") or UNKNOWN


def normalizer_table(run: RunContents) -> Table:
    """The error of each estimator against the exact normalizers; no rows where it was not measured."""
    columns = {"image": "image", "text": "text", "mean": "mean", "mean_without_duplicates": "mean without duplicates"}
    estimators = as_dict(as_dict(run.summary.get("normalizer_error")).get("estimators"))
    rows = [
        [
            estimator_name(name, run),
            *(format_number(number(as_dict(errors).get(key)), keep_zeros=True) for key in columns),
        ]
        for name, errors in estimators.items()
    ]
    return Table("Normalizer error by estimator", ["estimator", *columns.values()], rows)


def estimator_name(name: str, run: RunContents) -> str:
    if name == "minibatch":
        return f"a mini-batch of {format_count(run.batch_size)}" if run.batch_size else "a mini-batch"
    if name == "method":
        return f"{run.objective}, this run" if run.objective else "this run's method"
    return name


def normalizer_note(run: RunContents) -> str:
    """How the normalizer error was measured."""
    measured = as_dict(run.summary.get("normalizer_error"))
    anchors, duplicates, floor = (number(measured.get(key)) for key in ("anchors", "duplicates", "share_at_floor"))
    facts = []
    if anchors is not None:
        facts.append(f"{plural(anchors, 'anchor')} of the training set")
    if duplicates is not None:
        facts.append(f"{format_count(duplicates)} of them with a caption that others share")
    for key in ("temperature", "eps"):
        if (value := number(measured.get(key))) is not None:
            facts.append(f"{key} {format_number(value)}")
    if floor is not None:
        facts.append(f"at the eps floor {percent(floor)}")
    return "; ".join(facts)


def skipped_sentences(run: RunContents, last: Evaluation | None) -> list[str]:
    """How many samples skipped.jsonl lists, and why: of the training data and of each held-out set."""
    if run.folder.skipped.name in run.unreadable:
        return []  # a notice at the top of the page says so
    if not run.skipped and any(as_dict(run.summary.get("skipped")).values()):
        return ["Samples were skipped, but skipped.jsonl, which listed them, is missing."]
    so_far = "" if run.summary else " so far"
    sentences = [
        f"{plural(reasons.total(), 'sample')} of {f'the held-out {name}' if name else 'the training data'} skipped"
        f"{so_far}: {', '.join(f'{reason} {format_count(count)}' for reason, count in reasons.most_common())}."
        for name, reasons in run.skipped.items()
    ]
    if "" not in run.skipped:
        sentences.insert(0, f"No sample of the training data was skipped{so_far}.")
    if last is not None and last.counts_skipped and not run.skipped.keys() - {""}:
        sentences.append(f"No held-out sample was skipped{so_far}.")
    return sentences


def truncated_captions_sentence(run: RunContents) -> str:
    share = run.truncated_captions
    return "" if share is None else f"{percent(share)} of the captions fill the context (possibly truncated)."


def mapping_table(caption: str, values: Any) -> Table:
    return Table(caption, ["name", "value"], flatten(values if isinstance(values, dict) else {"": values}), 2)


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[Row]:
    """Nested mappings as dotted names: `{"data": {"count": 3}}` gives ["data.count", "3"]."""
    rows: list[Row] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
            rows.append([f"{prefix}{key}", without_queries(text)])
    return rows


def files_table(run: RunContents) -> Table:
    """What is in the run's folder, and what each file is for."""
    folder = run.folder
    purposes = {
        folder.settings: "all settings; enough to repeat the run",
        folder.environment: "versions, device, fingerprint of the data",
        folder.records: f"{plural(len(run.records), 'line')}, one per logged step",
        folder.evaluation: f"{plural(len(run.evaluations), 'line')}, one per evaluation",
        folder.summary: "final figures",
        folder.gallery: "the retrieval examples above",
        folder.skipped: "samples that could not be used, with the reason",
        folder.checkpoints: "to resume from",
        folder.model: "the trained towers, as open_clip loads them",
    }
    rows = [[path.name + ("/" if path.is_dir() else ""), size_of(path), text] for path, text in purposes.items()]
    return Table("Files of the run", ["file", "size", "what it is"], rows, text_columns=3)


def size_of(path: Path) -> str:
    try:
        if path.is_dir():
            return byte_size(sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file()))
        return byte_size(path.stat().st_size)
    except OSError:  # absent, or just removed by the running training
        return "missing"
