"""Text for the terminal: the figures of an evaluation and the summary of a run. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from neuclip.formatting import byte_size, format_duration, format_number, percent, plural
from neuclip.report.contents import finite
from neuclip.report.findings import MANY_TRUNCATED, judge_calibration, judge_error
from neuclip.report.measures import evaluation_tables, find_measures
from neuclip.report.page import text_table

WIDTH = 110


def summary_text(summary: dict[str, Any], *, batch_size: int, longer_context: str = "") -> str:
    """The results and the cost of a run, under one heading per topic. `longer_context`: a remedy for truncated
    captions."""
    before = headline_text(summary.get("evaluation_at_start", {}), {})
    lines = [
        f"Trained on {plural(summary['samples_seen'], 'sample')} in {format_duration(summary['seconds'])} "
        f"({format_number(summary['samples_per_second'])} per second, "
        f"peak memory {byte_size(summary['peak_memory_bytes'])}).",
        *([f"Read stored {' and '.join(stored)} features."] if (stored := summary.get("stored_features")) else []),
        *_rows("Before training:", {"at 0 samples": before} if before else {}),
        *figures_lines(summary["evaluation"]),
        *_rows("Not measured:", summary["not_measured"]),
        *_rows("Normalizer:", _normalizer(summary, batch_size)),
        *_rows("Skipped samples (training data: listed in skipped.jsonl):", _skipped(summary)),
    ]
    truncated = summary["truncated_captions"] or 0
    if truncated > MANY_TRUNCATED:
        remedy = f"; {longer_context}" if longer_context else ""
        lines.append(f"Captions that fill the context (possibly truncated): {percent(truncated)}{remedy}")
    return "\n".join(lines)


def headline_text(figures: dict[str, float], not_measured: Mapping[str, str]) -> str:
    """One line during training: recall@1 from image to text, or top-1 accuracy if there is no retrieval set."""
    measures = find_measures(finite(figures))
    recalls = {one.dataset: x for one, x in measures.items() if one.metric == "image_to_text_recall_at_1"}
    accuracies = {one.dataset: x for one, x in measures.items() if one.metric == "top1"}
    shown = ", ".join(f"{name} {percent(value)}" for name, value in (recalls or accuracies).items())
    parts = [f"{'recall@1' if recalls else 'top-1'} {shown}"] if shown else []
    return "; ".join(parts + [f"{name} not measured: {reason}" for name, reason in not_measured.items()])


def figures_lines(figures: Mapping[str, Any]) -> list[str]:
    """The tables of an evaluation, in which every figure has its chance level or another baseline."""
    lines = []
    for table in evaluation_tables(figures):
        notes = [textwrap.fill(f"({note})", WIDTH) for note in table.notes if note]
        below = "\n".join([text_table(table).rstrip("\n"), *notes])
        lines += [f"{table.caption}:", *textwrap.indent(below, "  ").splitlines()]
    return lines


def held_out_skipped(figures: Mapping[str, float], skipped: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """A text for each set: "16 of 721 samples could not be used: 9 x image does not decode, 7 x caption is empty"."""
    return {
        name: f"{sum(reasons.values()):,} of {figures[f'{name}.images'] + figures[f'{name}.skipped']:,.0f} samples "
        f"could not be used: {_by_reason(reasons)}"
        for name, reasons in skipped.items()
    }


def _rows(heading: str, rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [heading, *(f"  {name:<{width}}  {text}" for name, text in rows.items())] if rows else []


def _normalizer(summary: dict[str, Any], batch_size: int) -> dict[str, str]:
    rows = {}
    estimators = summary.get("normalizer_error", {}).get("estimators", {})
    if "method" in estimators:
        method, batch = estimators["method"]["mean"], estimators["minibatch"]["mean"]
        rows["squared error"] = (
            f"{format_number(method)} of the log-normalizer, {judge_error(method, batch)} "
            f"({format_number(batch)} with {batch_size} pairs)"
        )
    calibration = summary.get("calibration")
    if calibration is not None:
        rows["calibration"] = (
            f"{format_number(calibration, keep_zeros=True)}, {judge_calibration(calibration)} "
            "(mean ratio of true to predicted normalizers in a batch, ideally 1)"
        )
    return rows


def _skipped(summary: dict[str, Any]) -> dict[str, str]:
    """A text for the training data and for each held-out set, if samples were skipped."""
    rows = {}
    if summary["skipped"]:
        shares = {"of those read": summary["skipped_share"], "could not be indexed": summary["lost_share"]}
        known = ", ".join(f"{percent(share)} {what}" for what, share in shares.items() if share)
        rows["training data"] = f"{sum(summary['skipped'].values()):,} ({known}): {_by_reason(summary['skipped'])}"
    return rows | held_out_skipped(summary["evaluation"], summary["skipped_held_out"])


def _by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {reason}" for reason, count in counts.items())
