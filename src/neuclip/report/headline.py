"""The tiles at the top: what the run reached and what it cost, each figure with a note to judge it by."""

from __future__ import annotations

from dataclasses import dataclass

from neuclip.formatting import (
    byte_size,
    format_count,
    format_duration,
    format_number,
    format_samples,
    percent,
    plural,
    times_chance,
)
from neuclip.report.contents import RunContents, number
from neuclip.report.evaluations import CANDIDATES, DIRECTIONS, Evaluation
from neuclip.report.tables import estimator_name
from neuclip.report.verdict import judge_calibration, judge_error


@dataclass(frozen=True)
class Headline:
    value: str
    notes: tuple[str, ...] = ()
    name: str = ""  # where a tile has several


@dataclass(frozen=True)
class Tile:
    label: str
    headlines: list[Headline]
    note: str = ""


def tiles(run: RunContents, last: Evaluation | None, before: Evaluation | None = None) -> list[Tile]:
    """What a reader wants to know first; nothing that is not known. `last` is the newest evaluation, `before` that of
    the model before training."""
    recalls = [retrieval_tile(last, direction, before) for direction in DIRECTIONS]
    found = [*recalls, zero_shot_tile(last, before), error_tile(run)]
    return [tile for tile in (*found, calibration_tile(run), *cost_tiles(run)) if tile is not None]


def retrieval_tile(last: Evaluation | None, direction: str, before: Evaluation | None) -> Tile | None:
    """Recall at each k and the median rank on the first held-out set."""
    if last is None or not last.retrieval:
        return None
    first = last.retrieval[0]
    figures = {k: first.recall_and_chance(direction, k) for k in first.depths(direction)}
    headlines = [
        Headline(
            percent(recall),
            (before_text(before, first.name, f"{direction}_recall_at_{k}"), times_chance(recall, chance)),
            f"recall@{k}",
        )
        for k, (recall, chance) in figures.items()
    ]
    if (rank := first[f"{direction}_median_rank"]) is not None:
        candidates = first.candidates(direction)
        note = f"of {plural(candidates, CANDIDATES[direction][:-1])}" if candidates is not None else ""
        headlines.append(Headline(format_count(rank), (note,), "median rank"))
    label = DIRECTIONS[direction].capitalize()
    where = ", ".join(filter(None, (first.name, first.size)))
    return Tile(label, headlines, where) if headlines else None


def before_text(before: Evaluation | None, name: str, metric: str) -> str:
    """'before 12.1 %', where it was measured before training."""
    start = before.find(name) if before else None
    value = start[metric] if start else None
    return "" if value is None else f"before {percent(value)}"


def zero_shot_tile(last: Evaluation | None, before: Evaluation | None) -> Tile | None:
    first = last.zero_shot[0] if last and last.zero_shot else None
    if first is None or first["top1"] is None:
        return None
    chance = times_chance(first["top1"], first["chance"])
    classes = plural(first["classes"], "class", "classes") if first["classes"] is not None else ""
    largest = f"largest class {percent(first['largest_class'])}" if first["largest_class"] is not None else ""
    standards = ", ".join(filter(None, (chance, largest)))
    where = ", ".join(filter(None, (first.name, classes)))
    start = before_text(before, first.name, "top1")
    return Tile("Zero-shot, top-1", [Headline(percent(first["top1"]), (start, standards, where))])


def error_tile(run: RunContents) -> Tile | None:
    """The error against the exact normalizers, where it was measured."""
    method, batch = run.normalizer_errors
    batch_name, what = estimator_name("minibatch", run), "squared error of the log-normalizer"
    if method is None:
        notes = (f"{what} that {batch_name} gives",)
        return Tile("Normalizer error", [Headline(format_number(batch), notes)]) if batch is not None else None
    against = f"; {batch_name} gives {format_number(batch)}" if batch is not None else ""
    return Tile("Normalizer error", [Headline(format_number(method), (judge_error(method, batch), what + against))])


def calibration_tile(run: RunContents) -> Tile | None:
    calibration = run.calibration
    if calibration is None:
        return None
    notes = (judge_calibration(calibration), "true over predicted normalizer, 1 is right")
    return Tile("Calibration", [Headline(format_number(calibration), notes)])


def cost_tiles(run: RunContents) -> list[Tile | None]:
    """Time, speed and memory. While the run goes on, only the speed is known, from its last record."""
    seconds, speed, memory = (
        number(run.summary.get(key)) for key in ("seconds", "samples_per_second", "peak_memory_bytes")
    )
    when = ""
    if speed is None:
        speed, when = run.last_value("samples_per_second"), "at the last record"
    device, threads = str(run.environment.get("device") or ""), number(run.environment.get("threads"))
    where = f"on {device}" if device else ""
    if device == "cpu" and threads is not None:
        where += f", {plural(threads, 'thread')}"
    notes = (f"for {format_samples(run.samples_seen)} samples",)
    return [
        None if seconds is None else Tile("Time", [Headline(format_duration(seconds), notes)]),
        None if speed is None else Tile("Samples per second", [Headline(format_number(speed), (where, when))]),
        None if memory is None else Tile("Peak memory", [Headline(byte_size(memory))]),
    ]
