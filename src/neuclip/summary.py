"""The last words of a run: what a person wants to know, in a few lines. Reads summary.json; imports no torch."""

from __future__ import annotations

from typing import Any

from neuclip.progress import format_duration

CALIBRATION = "batch mean of true over predicted normalizer: 1 when the prediction is right"


def summary_text(summary: dict[str, Any], *, batch_size: int) -> str:
    lines = [
        f"Trained on {summary['samples_seen']:,} pairs in {format_duration(summary['seconds'])} "
        f"({summary['samples_per_second']:.0f} a second, {summary['peak_memory_bytes'] / 1e9:.1f} GB of memory).",
        *_retrieval_lines(summary["evaluation"]),
        *_zero_shot_lines(summary["evaluation"]),
        *_normalizer_lines(summary, batch_size),
    ]
    if summary["skipped"]:
        counts = ", ".join(f"{count} x {reason}" for reason, count in summary["skipped"].items())
        lines.append(f"  skipped samples: {counts} (listed in skipped.jsonl)")
    return "\n".join(lines)


def headline_text(figures: dict[str, float]) -> str:
    """One figure per held-out set: recall@1 from picture to caption, or top-1 accuracy."""
    heads = {".image_to_text_recall_at_1": "recall@1", ".top1": "top-1"}
    return ", ".join(
        f"{key.removesuffix(ending)} {what} {value:.1%}"
        for key, value in figures.items()
        for ending, what in heads.items()
        if key.endswith(ending)
    )


def _retrieval_lines(figures: dict[str, float]) -> list[str]:
    names = [
        key.removesuffix(".image_to_text_recall_at_1") for key in figures if key.endswith(".image_to_text_recall_at_1")
    ]
    return [
        f"  {name}: right caption first of {figures[f'{name}.captions']:,.0f} for "
        f"{_against_chance(figures, name, 'image_to_text')}; right picture first for "
        f"{_against_chance(figures, name, 'text_to_image')}"
        for name in names
    ]


def _against_chance(figures: dict[str, float], name: str, direction: str) -> str:
    got, chance = figures[f"{name}.{direction}_recall_at_1"], figures[f"{name}.{direction}_chance_at_1"]
    return f"{got:.1%} ({got / chance:.0f} times chance)"


def _zero_shot_lines(figures: dict[str, float]) -> list[str]:
    names = [key.removesuffix(".top1") for key in figures if key.endswith(".top1")]
    return [
        f"  {name}: {figures[f'{name}.top1']:.1%} of {figures[f'{name}.images']:,.0f} pictures put into the right one "
        f"of {figures[f'{name}.classes']:.0f} classes (chance {100 * figures[f'{name}.chance']:.2g}%)"
        for name in names
    ]


def _normalizer_lines(summary: dict[str, Any], batch_size: int) -> list[str]:
    lines = []
    if summary.get("calibration") is not None:
        lines.append(f"  calibration {summary['calibration']:.2f} ({CALIBRATION})")
    estimators = summary.get("normalizer_error", {}).get("estimators", {})
    if "method" in estimators:
        lines.append(
            f"  normalizer: squared error of its logarithm over the training set {estimators['method']['mean']:.2f}; "
            f"a batch of {batch_size} alone gives {estimators['minibatch']['mean']:.2f}"
        )
    return lines
