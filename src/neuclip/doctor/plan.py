"""What a run would do: steps and epochs, shares of processes and workers, warm-up, and how far the temperature gets."""

from __future__ import annotations

import math

from neuclip.data.cores import available_cores
from neuclip.doctor.findings import Findings
from neuclip.doctor.probe import Look
from neuclip.formatting import percent, plural
from neuclip.models.facts import ModelFacts
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
            f"give --train.batch_size {pairs // ranks * ranks or pairs} or less",
        )
    elif batch % ranks:
        choices = [str(size) for size in (local * ranks, (local + 1) * ranks) if 0 < size <= pairs]
        findings.fail(
            f"train.batch_size {batch:,} does not divide over {ranks} processes",
            "each takes an equal share",
            f"give --train.batch_size {' or '.join(choices)}" if choices else "give fewer processes",
        )
    if batch <= pairs and steps * batch < epoch:
        findings.warn(
            f"the run sees {percent(steps * batch / epoch)} of the data",
            "the other pairs are never read",
            f"give --train.samples {-(-epoch // batch) * batch} for one epoch",
        )


def note_small_batch(findings: Findings, settings: Settings, model: ModelFacts, pairs: int) -> None:
    """One pair at a time: nothing to be unlike to, and with BatchNorm a failure."""
    train, ranks, local = settings.train, findings["plan.ranks"], findings["plan.batch_per_rank"]
    enough = max(2, min(128, train.samples, pairs))
    if model.batch_norm and local == 1:
        findings.fail(
            f"train.batch_size {train.batch_size:,} leaves each process one pair a step",
            f"{settings.model.name} has BatchNorm, which cannot train on one image at a time",
            f"give --train.batch_size {max(enough // ranks, 2) * ranks}",
        )
    elif model.batch_norm and smallest_chunk(local, findings["plan.micro_batch"]) == 1:
        findings.fail(
            f"train.micro_batch_size {train.micro_batch_size} leaves a forward pass of one pair",
            f"{settings.model.name} has BatchNorm, which cannot train on one image at a time",
            f"give --train.micro_batch_size {4 if local > 4 else 0}",
        )
    elif train.batch_size == 1:
        findings.warn("train.batch_size is 1", "a pair has nothing to differ from", f"give --train.batch_size {enough}")


def smallest_chunk(local: int, micro: int) -> int:
    """Pairs in the smallest forward pass: training cuts its share into nearly equal parts (training/accumulation.py).

    >>> smallest_chunk(128, 48), smallest_chunk(3, 2)
    (42, 1)
    """
    return local // max(1, -(-local // max(1, micro)))


def note_loading(findings: Findings, settings: Settings, look: Look) -> None:
    """How fast pairs come: what a worker reads and decodes, the transform aside, and how many may work at a time."""
    workers, ranks, cores = settings.data.workers, findings["plan.ranks"], available_cores()
    rate = look.read / look.seconds if look.seconds else None
    findings.note("loading", cores=cores, pairs_per_second_and_worker=rate)
    if workers * ranks > cores:
        together = f" if all {ranks} processes are on this machine" if ranks > 1 else ""
        findings.warn(
            f"{plural(workers * ranks, 'worker')} on {plural(cores, 'core')}{together}",
            "they take turns, and take them from the towers",
            f"give --data.workers {max(1 if ranks == 1 else 0, cores // ranks - 1)}",
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
    learns = settings.objective.learns_temperature()
    individual, constant = learns == "per sample", learns == "no" or asked.learning_rate == 0
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
