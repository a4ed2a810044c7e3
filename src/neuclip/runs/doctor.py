"""`neuclip doctor`: build the run as training does, but without a folder, read its first pairs, and take one step.

Checks are those of training itself: the same code raises the errors, and the advice before the first step (`advice.py`)
is listed here, too. This file adds only what the pairs and the step show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from neuclip.data.decoding import decode
from neuclip.data.faults import FaultLog, by_reason
from neuclip.data.held_out import HeldOutSets
from neuclip.data.loader import Batch
from neuclip.data.source import BadSample, Fault
from neuclip.errors import RunFailed, UserError
from neuclip.evaluation.gallery import thumbnail
from neuclip.formatting import byte_size, format_duration, format_number, percent, plural
from neuclip.machine import peak_memory_bytes
from neuclip.objectives.drrho import DRRho
from neuclip.plan import Plan
from neuclip.progress import track, waiting
from neuclip.records import RunFolder
from neuclip.report.page import Gallery, Notes, Page, Query, Section
from neuclip.runs import folder as folders
from neuclip.runs.advice import run_advice
from neuclip.runs.build import build_batches, build_run, open_training_source, refuse_single_images, resolve
from neuclip.runs.lifecycle import check_disk, describe, needed_bytes
from neuclip.runs.results import describe_held_out, open_held_out
from neuclip.settings.objectives import Advice
from neuclip.settings.sections import Settings
from neuclip.training.loop import caption_ids, parallel, take_step
from neuclip.training.observer import full_caption_test
from neuclip.training.run import Run

PAIRS, SECONDS = 512, 5.0  # limits of reading
SHOWN = 24  # pairs on the page
STEP_PAIRS = 16  # pairs of the step on a CPU; on a GPU the step has all pairs of a rank
MANY_TRUNCATED, MANY_EQUAL, MANY_SMALL = 0.05, 0.02, 0.5
GRID = 32  # a proposed image size is a multiple of it, because patches and strides divide 32


@dataclass
class Examination:
    """The findings: `figures` is a flat dict with stable keys, for `--json`; `lines` say the same as text."""

    figures: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[Advice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    shown: list[Query] = field(default_factory=list)  # pairs, for the page

    @property
    def ready(self) -> bool:
        return not self.problems

    def note(self, topic: str, line: str, **figures: Any) -> None:
        self.lines.append(line)
        self.figures |= {f"{topic}.{name}": value for name, value in figures.items()}

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Inside, an error that would stop training is noted, and the examination continues after the block."""
        try:
            yield
        except (UserError, RunFailed) as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
        except torch.OutOfMemoryError:
            self.problems.append(
                "one step does not fit into the memory of the GPU; give a smaller --train.micro_batch_size, or "
                "--model.gradient_checkpointing true"
            )

    def as_plain(self) -> dict[str, Any]:
        """The findings as plain values, for JSON."""
        warnings = [dict(zip(("what", "why", "remedy"), advice, strict=True)) for advice in self.warnings]
        return {"ready": self.ready, "problems": self.problems, "warnings": warnings, **self.figures}


def examine(settings: Settings, *, ranks: int = 1) -> Examination:
    """Find out what training with these settings on `ranks` ranks would do, and what would fail. Writes nothing.

    >>> examine(read_settings(None, ["--data.train", "photos"])).ready        # doctest: +SKIP
    True
    """
    findings = Examination()
    sets, run = None, None
    with findings.stage():
        settings = resolve(settings)
    with findings.stage():
        folder = folders.choose_folder(settings)
    with findings.stage():
        sets = open_held_out(settings)
    with findings.stage():
        source = open_training_source(settings)
        with waiting("building the model"):
            run = build_run(settings, source)
        run.plan = Plan.of(run.settings, ranks)
        note_run(findings, run, sets)
        refuse_single_images(run.settings, run.plan, run.built)
        run.batches = build_batches(run.settings, source, run.built, run.plan)
    if run is None:
        return findings
    with findings.stage():
        if not findings.problems:
            run.folder = RunFolder(folder)
            check_disk(run)
    with findings.stage():
        batch, tokens = read_pairs(findings, run)
        note_captions(findings, run, tokens)
        if not findings.problems:
            note_step(findings, run, batch)
    if sets is not None:
        findings.warnings += run_advice(run, sets)
    return findings


def note_run(findings: Examination, run: Run, sets: HeldOutSets | None) -> None:
    plan, source = run.plan, run.source
    for line in describe(run):
        findings.note("plan", line)
    for name, size in describe_held_out(sets).items() if sets else ():
        findings.note("plan", f"held out {name}: {size}")
    findings.note(
        "plan",
        f"{plan.local_batch:,} pairs per rank and step, {plan.micro_batch:,} per forward pass; warm-up "
        f"{plural(plan.warmup_steps, 'step')}; at most {byte_size(needed_bytes(run))} on disk",
        **{name: getattr(plan, name) for name in ("ranks", "batch_size", "local_batch", "micro_batch", "steps")},
        samples=plan.samples,
        epochs=plan.samples / run.epoch_samples,
        warmup_steps=plan.warmup_steps,
        disk_bytes=needed_bytes(run),
        held_out=len(sets.retrieval) + len(sets.zero_shot) if sets else 0,
    )
    findings.figures |= {
        "data.kind": source.kind,
        "data.pairs": len(source),
        "data.captions": run.caption_counts._asdict(),
        "model.parameters": sum(p.numel() for p in run.built.towers.parameters()),
        "model.device": str(run.device),
        "model.precision": str(run.precision).removeprefix("torch."),
    }


def read_pairs(findings: Examination, run: Run) -> tuple[Batch, Tensor]:
    """Read the first pairs of the run, as training does. Returns the batch for the step, and the tokens (b, L) of the
    run's first batch, or of the part that was read."""
    first = build_batches(run.settings, run.source, run.built, replace(run.plan, batch_size=STEP_PAIRS, ranks=1))
    log, faults, read, batches = FaultLog(None, run.settings.data.max_bad_share), list[Fault](), 0, list[Batch]()
    count = max(1, min(PAIRS, len(run.source)) // STEP_PAIRS)
    start = time.monotonic()
    for batch in track(first.steps(0, count), "reading pairs", count):
        batches.append(batch)
        faults += batch.faults
        read += len(batch.ids)
        log.add(batch.faults)
        if message := log.note(len(batch.ids), len(batch.faults)):
            raise RunFailed(message)
        if time.monotonic() - start > SECONDS and read >= SHOWN:
            break
    rate, reasons = read / (time.monotonic() - start), by_reason(faults)
    bad = ", ".join(f"{times:,} x {reason}" for reason, times in reasons.items()) or "none bad"
    findings.note(
        "read",
        f"read {plural(read, 'pair')} at {format_number(rate)} per second; {bad}",
        pairs=read,
        pairs_per_second=rate,
        bad=dict(reasons),
    )
    if faults:
        what, where = f"{percent(len(faults) / read)} of the pairs read are bad", faults[0].where
        findings.warnings.append((what, "each is replaced by the next", f"repair them, first: {where}"))
    show_pairs(findings, run, [id for batch in batches for id in batch.ids.tolist()])
    tokens = torch.cat([batch.tokens for batch in batches])[: run.plan.batch_size]
    return batches[0] if run.device.type == "cpu" else next(run.batches.steps(0, 1)), tokens


def show_pairs(findings: Examination, run: Run, ids: list[int]) -> None:
    """Show some of the pairs as they are stored, and check that their images are large enough."""
    sides = []
    for id in ids[:SHOWN]:
        try:
            sample = run.source[id]
            sides.append(min(decode(sample.image, run.source.where(id)).size))
            findings.shown.append(Query("; ".join(sample.captions), thumbnail(sample.image)))
        except BadSample:
            continue
    for pair in findings.shown[:3]:
        findings.note("pairs", f"for example: {' '.join(pair.caption.split())}")
    findings.figures["pairs.captions"] = [pair.caption for pair in findings.shown]
    needed = run.built.image_size
    if not sides:
        return
    findings.figures |= {"pairs.shorter_side": median(sides), "model.image_size": needed}
    fitting = -(-round(median(sides)) // GRID) * GRID
    if sum(side < needed for side in sides) > MANY_SMALL * len(sides) and fitting < needed:
        what = f"most images are smaller than the model's {needed} pixels ({median(sides):g} in the median)"
        why, remedy = "they are upscaled, which costs time and adds no detail", f"give --model.image_size {fitting}"
        findings.warnings.append((what, why, remedy))


def note_captions(findings: Examination, run: Run, tokens: Tensor) -> None:  # (b, L)
    """Note how many captions of a batch fill the context or repeat."""
    truncated = full_caption_test(run.built.tokenize)(tokens).double().mean().item()
    _, counts = caption_ids(tokens).unique(return_counts=True)
    equal = int(counts[counts > 1].sum()) / len(tokens)
    findings.note(
        "captions",
        f"captions of the first {len(tokens):,} pairs: {percent(truncated)} fill the context, {percent(equal)} are "
        "shared with another pair",
        truncated=truncated,
        equal=equal,
    )
    if truncated > MANY_TRUNCATED:
        what = f"{percent(truncated)} of the captions fill the context of {tokens.shape[1]} tokens"
        remedy = f"give --model.context_length {2 * tokens.shape[1]}, or shorten them"
        findings.warnings.append((what, "their ends are cut off", remedy))
    if equal > MANY_EQUAL and not run.settings.objective.mask_duplicates:
        what = f"{percent(equal)} of a batch share their caption with another pair"
        why, remedy = "they are false negatives of each other", "give --objective.mask_duplicates true"
        findings.warnings.append((what, why, remedy))


def note_step(findings: Examination, run: Run, batch: Batch) -> None:
    """Take one step of the training loop; note its loss, time and memory."""
    pairs = min(len(batch.ids), run.plan.local_batch)
    if isinstance(run.objective, DRRho) and run.reference is not None:  # no features are stored: use equal rows
        row = torch.eye(run.reference.embed_dim, device=run.device)[0]
        run.objective.look_up = lambda ids: row.expand(2, len(ids), -1)
    if pairs < len(batch.ids):  # the run's batch is smaller than the batch that was read
        batch = batch._replace(images=batch.images[:pairs], tokens=batch.tokens[:pairs], ids=batch.ids[:pairs])
    with waiting("taking one step"):
        encode, start = parallel(run), time.perf_counter()
        loss, _ = take_step(run, encode, batch)
        value, seconds = loss.item(), time.perf_counter() - start
    rate, memory = pairs / seconds, peak_memory_bytes(run.device)
    takes = format_duration(run.plan.samples / run.plan.ranks / rate)
    findings.note(
        "step",
        f"one step of {plural(pairs, 'pair')}: loss {format_number(value)}, {format_number(seconds)} s; at this pace "
        f"the run takes {takes}; peak memory {byte_size(memory)}",
        pairs=pairs,
        loss=value,
        seconds=seconds,
        run_seconds=run.plan.samples / run.plan.ranks / rate,
        peak_memory_bytes=memory,
    )


def pairs_page(findings: Examination, name: str) -> Page:
    """The page with the pairs, and the findings above them."""
    warnings = ["{}: {}; {}".format(*advice) for advice in findings.warnings]
    sections = [
        Section("", [Notes(findings.problems, as_list=True), Notes(warnings, as_list=True)]),
        Section("Pairs", [Gallery("The first that training would read", findings.shown)]),
        Section("Findings", [Notes(findings.lines, as_list=True)], folded=True),
    ]
    return Page("doctor", name, ["ready" if findings.ready else "not ready"], sections=sections)
