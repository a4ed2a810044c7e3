"""What a run would do: steps and epochs, shares of processes and workers, warm-up, and how far the temperature gets."""

from __future__ import annotations

import math

from neuclip.data.cores import available_cores
from neuclip.doctor.findings import Findings
from neuclip.doctor.wording import percent
from neuclip.settings.sections import Settings

LONG_WARMUP = 0.5
HARDLY_MOVES = 0.8  # the lowest temperature within reach over the initial one


def note_plan(findings: Findings, settings: Settings, pairs: int, ranks: int) -> None:
    """An epoch of weighted data has another length than the data: `plan.pairs_per_epoch` is noted when it is opened."""
    batch, train = settings.train.batch_size, settings.train
    epoch = findings["plan.pairs_per_epoch"]
    steps = train.samples // batch
    local = batch // ranks
    findings.note(
        "plan",
        batch_size=batch,
        steps=steps,
        samples=steps * batch,
        epochs=steps * batch / epoch,
        batches_per_epoch=epoch / batch,
        ranks=ranks,
        batch_per_rank=local,
        micro_batch=min(local, train.micro_batch_size or local),
        samples_per_rank=steps * local,
        workers_per_rank=settings.data.workers,
    )
    if batch > pairs:
        findings.fail(
            f"train.batch_size {batch:,} is larger than the data set",
            f"there are {pairs:,} pairs",
            f"give --train.batch_size {pairs} or less",
        )
    if batch % ranks:
        choices = f"{batch // ranks * ranks} or {(batch // ranks + 1) * ranks}" if local else f"{ranks}"
        findings.fail(
            f"train.batch_size {batch:,} does not divide over {ranks} processes",
            "each takes an equal share",
            f"give --train.batch_size {choices}",
        )
    _note_extremes(findings, settings, pairs, epoch)


def _note_extremes(findings: Findings, settings: Settings, pairs: int, epoch: int) -> None:
    batch, cores = settings.train.batch_size, available_cores()
    seen = findings["plan.samples"]
    if batch == 1:
        findings.warn("train.batch_size is 1", "a pair has nothing to differ from", "give --train.batch_size 128")
    if batch <= pairs and seen < epoch:
        findings.warn(
            f"the run sees {percent(seen / epoch)} of the data",
            "the other pairs are never read",
            f"give --train.samples {epoch} for one epoch",
        )
    if settings.data.workers > cores:
        findings.warn(
            f"{settings.data.workers} workers per process on {cores} cores",
            "they take turns, and take them from the towers",
            f"give --data.workers {max(1, cores - 1)}",
        )


def note_warmup(findings: Findings, settings: Settings, steps: int) -> None:
    """A share of the run below 1, a number of steps from 1 on, as training/schedule.py has it."""
    asked = settings.optimizer.warmup
    warmup = round(asked * steps) if asked < 1 else int(asked)
    findings.note("plan", warmup_steps=warmup, warmup_share=warmup / steps)
    if warmup > LONG_WARMUP * steps:
        reached = "the rate never reaches its peak" if warmup > steps else "the rate is at its peak for a moment only"
        findings.warn(
            f"warm-up of {warmup:,} steps in a run of {steps:,}",
            reached,
            "give --optimizer.warmup 0.05",
        )


def note_temperature(findings: Findings, settings: Settings, steps: int) -> None:
    """Adam moves ln(1/tau) by at most its rate per step, so a short run cannot reach a far temperature."""
    asked = settings.temperature
    constant = asked.learning_rate == 0 or getattr(settings.objective, "variant", "") in ("v1", "sogclr")
    individual = getattr(settings.objective, "variant", "") in ("v2", "isogclr")
    total = 0.0 if constant else asked.learning_rate * steps * (0.5 if asked.schedule == "cosine" else 1)
    reach = max(asked.minimum, asked.initial * math.exp(-total))
    findings.note(
        "temperature",
        initial=asked.initial,
        minimum=asked.minimum,
        maximum=asked.maximum,
        lowest_in_reach=None if individual else reach,
        learned="per sample" if individual else "no" if constant else "yes",
    )
    if (
        not (constant or individual)
        and math.exp(-total) > HARDLY_MOVES
        and asked.minimum < HARDLY_MOVES * asked.initial
    ):
        findings.warn(
            f"the temperature can fall from {asked.initial:g} to {reach:.3g} at most",
            f"its rate {asked.learning_rate:g} is made for more than {steps:,} steps",
            f"give --temperature.learning_rate {1.5 / steps:.2g}",
        )
    if asked.initial == asked.minimum and not constant:
        findings.warn(
            f"the temperature starts at its minimum {asked.minimum:g}",
            "it can only rise",
            "give --temperature.initial 0.07, or a lower --temperature.minimum",
        )
