"""The end of a run in a few lines for the terminal. Reads summary.json; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuclip.formatting import byte_size, format_duration, format_number, percent, plural, times_chance
from neuclip.report.evaluations import DIRECTIONS, HeldOutSet, parse_evaluation

MANY_TRUNCATED = 0.05  # of the captions; the report shows any share


def summary_text(summary: dict[str, Any], *, batch_size: int, longer_context: str = "") -> str:
    """What a run reached and cost, one heading per topic that there is something to say about. `longer_context`: what
    to do where captions are truncated."""
    lines = [
        f"Trained on {plural(summary['samples_seen'], 'sample')} in {format_duration(summary['seconds'])} "
        f"({format_number(summary['samples_per_second'])} per second, "
        f"peak memory {byte_size(summary['peak_memory_bytes'])}).",
        *_rows("Recall@1 / top-1 accuracy on held-out images:", _held_out(summary)),
        *_rows("Normalizer:", _normalizer(summary, batch_size)),
        *_rows("Skipped samples, listed in skipped.jsonl:", _skipped(summary)),
    ]
    truncated = summary["truncated_captions"] or 0
    if truncated > MANY_TRUNCATED:
        remedy = f"; {longer_context}" if longer_context else ""
        lines.append(f"Captions that fill the context (possibly truncated): {percent(truncated)}{remedy}")
    return "\n".join(lines)


def headline_text(figures: dict[str, float], not_measured: Mapping[str, str]) -> str:
    """One line during training: recall@1 from image to text, or top-1 accuracy where there is no retrieval."""
    evaluation = parse_evaluation(figures)
    recalls = {held_out.name: held_out["image_to_text_recall_at_1"] for held_out in evaluation.retrieval}
    accuracies = {task.name: task["top1"] for task in evaluation.zero_shot}
    shown = ", ".join(f"{name} {percent(value)}" for name, value in (recalls or accuracies).items())
    parts = [f"{'recall@1' if recalls else 'top-1'} {shown}"] if shown else []
    return "; ".join(parts + [f"{name} not measured: {reason}" for name, reason in not_measured.items()])


def held_out_skipped(figures: Mapping[str, float], skipped: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """By set: "16 of 721 samples could not be used: 9 x image does not decode, 7 x caption is empty"."""
    return {
        name: f"{sum(reasons.values()):,} of {figures[f'{name}.images'] + figures[f'{name}.skipped']:,.0f} samples "
        f"could not be used: {_by_reason(reasons)}"
        for name, reasons in skipped.items()
    }


def _rows(heading: str, rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [heading, *(f"  {name:<{width}}  {text}" for name, text in rows.items())] if rows else []


def _held_out(summary: dict[str, Any]) -> dict[str, str]:
    def retrieval(held_out: HeldOutSet, direction: str) -> str:
        recall, chance = held_out.recall_and_chance(direction)
        return f"{DIRECTIONS[direction]} {percent(recall)} ({times_chance(recall, chance)})"

    evaluation = parse_evaluation(summary["evaluation"])
    rows = {one.name: ", ".join(retrieval(one, direction) for direction in DIRECTIONS) for one in evaluation.retrieval}
    for task in evaluation.zero_shot:
        classes = plural(task["classes"] or 0, "class", "classes")
        rows[task.name] = f"{percent(task['top1'])} (chance {percent(task['chance'])}, {classes})"
    return rows | {name: f"not measured: {reason}" for name, reason in summary["not_measured"].items()}


def _normalizer(summary: dict[str, Any], batch_size: int) -> dict[str, str]:
    rows = {}
    estimators = summary.get("normalizer_error", {}).get("estimators", {})
    if "method" in estimators:
        rows["squared error"] = (
            f"{format_number(estimators['method']['mean'])} of the log-normalizer over the training set "
            f"(a mini-batch of {batch_size}: {format_number(estimators['minibatch']['mean'])})"
        )
    if summary.get("calibration") is not None:
        rows["calibration"] = (
            f"{format_number(summary['calibration'])} (batch mean of true over predicted normalizer; 1 is exact)"
        )
    return rows


def _skipped(summary: dict[str, Any]) -> dict[str, str]:
    """Of the training data and of each held-out set; nothing where nothing was skipped."""
    rows = {}
    if summary["skipped"]:
        shares = {"of those read": summary["skipped_share"], "could not be indexed": summary["lost_share"]}
        known = ", ".join(f"{percent(share)} {what}" for what, share in shares.items() if share)
        rows["training data"] = f"{sum(summary['skipped'].values()):,} ({known}): {_by_reason(summary['skipped'])}"
    return rows | held_out_skipped(summary["evaluation"], summary["skipped_held_out"])


def _by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {reason}" for reason, count in counts.items())
