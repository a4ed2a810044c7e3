"""The tiles at the top: what the run reached and what it cost, each with a note to judge it by."""

from __future__ import annotations

from dataclasses import dataclass

from neuclip.formatting import (
    UNKNOWN,
    byte_size,
    format_duration,
    format_number,
    format_samples,
    percent,
    plural,
    times_chance,
)
from neuclip.report.contents import RunContents, as_dict, number
from neuclip.report.evaluations import Evaluation
from neuclip.report.figures import CALIBRATION_MEANING
from neuclip.report.tables import estimator_name


@dataclass(frozen=True)
class Headline:
    label: str
    value: str
    notes: tuple[str, ...]


def headlines(run: RunContents, last: Evaluation | None) -> list[Headline]:
    """What a reader wants to know first. `last` is the newest evaluation, if there was one."""
    return [
        recall_headline(last, "image_to_text", "Image to text, recall at 1"),
        recall_headline(last, "text_to_image", "Text to image, recall at 1"),
        zero_shot_headline(last),
        normalizer_headline(run),
        *cost_headlines(run),
    ]


def recall_headline(last: Evaluation | None, direction: str, label: str) -> Headline:
    if last is None or not last.retrieval:
        return Headline(label, UNKNOWN, ("no held-out retrieval evaluated",))
    first = last.retrieval[0]
    recall, chance = first.recall_and_chance(direction)
    images = plural(first["images"], "image") if first["images"] is not None else ""
    return Headline(label, percent(recall), (times_chance(recall, chance), first.name, images))


def zero_shot_headline(last: Evaluation | None) -> Headline:
    label = "Zero-shot, top 1"
    if last is None or not last.zero_shot:
        return Headline(label, UNKNOWN, ("no zero-shot task evaluated",))
    first = last.zero_shot[0]
    classes = plural(first["classes"], "class", "classes") if first["classes"] is not None else ""
    return Headline(label, percent(first["top1"]), (times_chance(first["top1"], first["chance"]), first.name, classes))


def normalizer_headline(run: RunContents) -> Headline:
    """The error against the exact normalizers where it was measured, else the calibration of the last record."""
    estimators = as_dict(as_dict(run.summary.get("normalizer_error")).get("estimators"))
    method = number(as_dict(estimators.get("method")).get("mean"))
    batch = number(as_dict(estimators.get("minibatch")).get("mean"))
    batch_name = estimator_name("minibatch", run)
    if method is not None:
        against = f"{batch_name} gives {format_number(batch)}" if batch is not None else ""
        return Headline("Normalizer error", format_number(method), ("squared error of the log-normalizer", against))
    if batch is not None:
        note = f"squared error of the log-normalizer that {batch_name} gives"
        return Headline("Normalizer error", format_number(batch), (note,))
    calibration = last_value(run, "calibration")
    if calibration is not None:
        note = CALIBRATION_MEANING[0].lower() + CALIBRATION_MEANING[1:].rstrip(".")
        return Headline("Calibration", format_number(calibration), (note,))
    return Headline("Normalizer", UNKNOWN, ("neither calibration nor normalizer error was recorded",))


def cost_headlines(run: RunContents) -> list[Headline]:
    """Time, speed and memory. While the run goes on, only the speed is known, from its last record."""
    seconds, speed, memory = (
        number(run.summary.get(key)) for key in ("seconds", "samples_per_second", "peak_memory_bytes")
    )
    missing = "not measured" if run.summary else "known when the run has finished"
    when = ""
    if speed is None:
        speed = last_value(run, "samples_per_second")
        when = missing if speed is None else "at the last record"
    device, threads = str(run.environment.get("device") or ""), number(run.environment.get("threads"))
    where = f"on {device}" if device else ""
    if device == "cpu" and threads is not None:
        where += f", {plural(threads, 'thread')}"
    samples = f"for {format_samples(run.samples_seen)} samples"
    return [
        Headline("Time", format_duration(seconds), (missing if seconds is None else samples,)),
        Headline("Samples per second", format_number(speed), (where, when)),
        Headline("Peak memory", byte_size(memory), (missing if memory is None else "",)),
    ]


def last_value(run: RunContents, key: str) -> float | None:
    """The newest record's value that is not null."""
    return next((value for record in reversed(run.records) if (value := number(record.get(key))) is not None), None)
