"""The last words of a run: what a person wants to know, in a few lines. Reads summary.json; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neuclip.formatting import format_duration

CALIBRATION = "batch mean of true over predicted normalizer: 1 when the prediction is right"
MANY_FULL = 0.05  # of the captions; the report gives any share


def summary_text(summary: dict[str, Any], *, batch_size: int) -> str:
    lines = [
        f"Trained on {summary['samples_seen']:,} samples in {format_duration(summary['seconds'])} "
        f"({summary['samples_per_second']:.0f} a second, {summary['peak_memory_bytes'] / 1e9:.1f} GB of memory).",
        *_held_out_lines(summary["evaluation"], summary["not_measured"]),
        *_normalizer_lines(summary, batch_size),
        *_skipped_lines(summary),
    ]
    if (summary["truncated_captions"] or 0) > MANY_FULL:
        lines.append(
            f"Captions that fill the model's context, what is longer cut off: {summary['truncated_captions']:.1%}"
        )
    return "\n".join(lines)


def headline_text(figures: dict[str, float], not_measured: Mapping[str, str]) -> str:
    """One line for the way: recall@1 from image to caption, or top-1 accuracy where there is no retrieval."""
    parts = []
    for ending, what in ((".image_to_text_recall_at_1", "recall@1"), (".top1", "top-1")):
        shown = [f"{key.removesuffix(ending)} {value:.1%}" for key, value in figures.items() if key.endswith(ending)]
        if shown:
            parts.append(f"{what} {', '.join(shown)}")
            break
    return "; ".join(parts + [f"{name} not measured: {why}" for name, why in not_measured.items()])


def held_out_skipped(figures: Mapping[str, float], skipped: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """By set: "16 of 721 samples could not be used: 9 x image does not decode, 7 x caption is empty"."""
    return {
        name: f"{sum(reasons.values()):,} of {figures[f'{name}.images'] + figures[f'{name}.skipped']:,.0f} samples "
        f"could not be used: {_by_reason(reasons)}"
        for name, reasons in skipped.items()
    }


def _by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} x {reason}" for reason, count in counts.items())


def _skipped_lines(summary: dict[str, Any]) -> list[str]:
    """Of the training data and of each held-out set; nothing where nothing was skipped."""
    rows = {}
    if summary["skipped"]:
        shares = {"of those read": summary["skipped_share"], "never became samples": summary["lost_share"]}
        told = ", ".join(f"{100 * share:.2g}% {what}" for what, share in shares.items() if share)
        rows["training data"] = f"{sum(summary['skipped'].values()):,} ({told}): {_by_reason(summary['skipped'])}"
    rows |= held_out_skipped(summary["evaluation"], summary["skipped_held_out"])
    return _rows("Skipped samples, listed in skipped.jsonl:", rows)


def _held_out_lines(figures: dict[str, float], not_measured: Mapping[str, str]) -> list[str]:
    """One line per held-out set: how often the right answer came first, against chance."""
    refused = {name: f"not measured: {why}" for name, why in not_measured.items()}
    return _rows(
        "Right answer first, on held-out images:", _retrieval_rows(figures) | _zero_shot_rows(figures) | refused
    )


def _rows(heading: str, rows: Mapping[str, str]) -> list[str]:
    width = max((len(name) for name in rows), default=0)
    return [heading, *(f"  {name:<{width}}  {text}" for name, text in rows.items())] if rows else []


def _retrieval_rows(figures: dict[str, float]) -> dict[str, str]:
    def against_chance(name: str, direction: str) -> str:
        got, chance = figures[f"{name}.{direction}_recall_at_1"], figures[f"{name}.{direction}_chance_at_1"]
        return f"{got:.1%} ({got / chance:.0f} x chance)"

    ending = ".image_to_text_recall_at_1"
    names = [key.removesuffix(ending) for key in figures if key.endswith(ending)]
    return {
        name: f"caption {against_chance(name, 'image_to_text')}, image {against_chance(name, 'text_to_image')}"
        for name in names
    }


def _zero_shot_rows(figures: dict[str, float]) -> dict[str, str]:
    names = [key.removesuffix(".top1") for key in figures if key.endswith(".top1")]
    return {
        name: f"{figures[f'{name}.top1']:.1%} of {figures[f'{name}.classes']:,.0f} classes "
        f"(chance {100 * figures[f'{name}.chance']:.2g}%)"
        for name in names
    }


def _normalizer_lines(summary: dict[str, Any], batch_size: int) -> list[str]:
    lines = []
    estimators = summary.get("normalizer_error", {}).get("estimators", {})
    if "method" in estimators:
        lines.append(
            f"  squared error of its logarithm, over the training set: {estimators['method']['mean']:.2f} "
            f"(a batch of {batch_size} alone: {estimators['minibatch']['mean']:.2f})"
        )
    if summary.get("calibration") is not None:
        lines.append(f"  calibration {summary['calibration']:.2f} ({CALIBRATION})")
    return ["Normalizer:", *lines] if lines else []
