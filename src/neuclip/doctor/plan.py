"""What a run would do: steps and epochs, shares of ranks and workers, warm-up, and how far the temperature can move."""

from __future__ import annotations

import math

from neuclip.doctor.findings import Findings
from neuclip.doctor.probe import SampleProbe
from neuclip.formatting import percent, plural
from neuclip.machine import available_cores
from neuclip.models.facts import ModelFacts
from neuclip.plan import Plan, stored_sides
from neuclip.settings.sections import Settings

LONG_WARMUP = 0.5
HARDLY_MOVES = 0.8  # the lowest temperature within reach over the initial one


def note_plan(findings: Findings, settings: Settings, pairs: int, ranks: int) -> None:
    """`plan.pairs_per_epoch` is already noted: with weighted data an epoch is not as long as the data."""
    plan, epoch = Plan.of(settings, ranks), findings["plan.pairs_per_epoch"]
    findings.note(
        "plan",
        batch_size=plan.batch_size,
        steps=plan.steps,
        samples=plan.samples,
        epochs=plan.samples / epoch,
        batches_per_epoch=epoch / plan.batch_size,
        ranks=ranks,
        batch_per_rank=plan.local_batch,
        micro_batch=plan.micro_batch,
        samples_per_rank=plan.steps * plan.local_batch,
        workers_per_rank=settings.data.workers,
        warmup_steps=plan.warmup_steps,
        warmup_share=plan.warmup_steps / plan.steps,
    )
    if plan.batch_size <= pairs and plan.samples < epoch:
        findings.warn(
            f"the run sees {percent(plan.samples / epoch)} of the data",
            "the other pairs are never read",
            f"give --train.samples {-(-epoch // plan.batch_size) * plan.batch_size} for one epoch",
        )


def note_batch_size(findings: Findings, settings: Settings, model: ModelFacts, pairs: int) -> None:
    """A batch larger than the data, one that ranks cannot share, or pairs that go through the model one by one."""
    train, plan = settings.train, Plan.of(settings, findings["plan.ranks"])
    batch, ranks, local = plan.batch_size, plan.ranks, plan.local_batch
    enough = max(2, min(128, train.samples, pairs))
    alone = f"{settings.model.name} has BatchNorm, which cannot train on one image at a time"
    if batch > pairs:
        findings.fail(
            f"train.batch_size {batch:,} is larger than the data set",
            f"it has {plural(pairs, 'pair')}",
            f"give --train.batch_size {pairs // ranks * ranks or pairs} or less",
        )
    elif batch % ranks:
        choices = [str(size) for size in (local * ranks, (local + 1) * ranks) if 0 < size <= pairs]
        findings.fail(
            f"train.batch_size {batch:,} is not divisible by {ranks} ranks",
            "every rank takes an equal share",
            f"give --train.batch_size {' or '.join(choices)}" if choices else "use fewer ranks",
        )
    if model.batch_norm and local == 1:
        findings.fail(
            f"train.batch_size {batch:,} leaves one pair per rank and step",
            alone,
            f"give --train.batch_size {max(enough // ranks, 2) * ranks}",
        )
    elif model.batch_norm and plan.smallest_chunk == 1:
        findings.fail(
            f"train.micro_batch_size {train.micro_batch_size} leaves a forward pass of one pair",
            alone,
            f"give --train.micro_batch_size {4 if local > 4 else 0}",
        )
    elif batch == 1:
        findings.warn("train.batch_size is 1", "there are no negatives", f"give --train.batch_size {enough}")


def note_loading(findings: Findings, settings: Settings, probe: SampleProbe) -> None:
    """How fast a worker reads and decodes pairs, without the transform, and whether there are cores for all workers."""
    workers, ranks, cores = settings.data.workers, findings["plan.ranks"], available_cores()
    rate = probe.read / probe.seconds if probe.seconds else None
    findings.note("loading", cores=cores, pairs_per_second_and_worker=rate)
    if workers * ranks > cores:
        where = f" if all {ranks} ranks are on this machine" if ranks > 1 else ""
        findings.warn(
            f"{plural(workers * ranks, 'worker')} on {plural(cores, 'core')}{where}",
            "workers will compete with training for CPU",
            f"give --data.workers {max(1 if ranks == 1 else 0, cores // ranks - 1)}",
        )


def note_storing(findings: Findings, settings: Settings) -> None:
    epoch = findings["plan.pairs_per_epoch"]
    findings.note("plan", stored_features=stored_sides(settings, epoch))


def note_warmup(findings: Findings) -> None:
    warmup, steps = findings["plan.warmup_steps"], findings["plan.steps"]
    if warmup > LONG_WARMUP * steps:
        findings.warn(
            f"warm-up of {plural(warmup, 'step')} in a run of {steps:,}",
            f"the learning rate {'never reaches' if warmup > steps else 'hardly stays at'} its peak",
            "give --optimizer.warmup 0.05",
        )


def note_temperature(findings: Findings, settings: Settings, steps: int) -> None:
    """Adam moves ln(1/tau) by at most its rate per step, a short run cannot move it far."""
    temperature = settings.temperature
    learns = settings.objective.learns_temperature()
    individual, constant = learns == "per sample", learns == "no" or temperature.learning_rate == 0
    total = 0.0 if constant else temperature.learning_rate * steps * (0.5 if temperature.schedule == "cosine" else 1)
    reach = max(temperature.minimum, temperature.initial * math.exp(-total))
    findings.note(
        "temperature",
        initial=temperature.initial,
        minimum=temperature.minimum,
        maximum=temperature.maximum,
        lowest_in_reach=None if individual else reach,
        learned="per sample" if individual else "no" if constant else "yes",
    )
    if (
        not (constant or individual)
        and math.exp(-total) > HARDLY_MOVES
        and temperature.minimum < HARDLY_MOVES * temperature.initial
    ):
        findings.warn(
            f"the temperature can only fall from {temperature.initial:g} to {reach:.3g}",
            f"its learning rate {temperature.learning_rate:g} is too small for {plural(steps, 'step')}",
            f"give --temperature.learning_rate {1.5 / steps:.2g}",
        )
    if temperature.initial == temperature.minimum and not constant:
        findings.warn(
            f"the temperature starts at its minimum {temperature.minimum:g}",
            "it can only rise",
            "give --temperature.initial 0.07, or a lower --temperature.minimum",
        )
