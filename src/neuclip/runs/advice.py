"""Advice before the first step of a run, which never stops it. `train` prints it, `neuclip doctor` lists it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from neuclip.data.held_out import HeldOutSets, named
from neuclip.data.mixture import Selection
from neuclip.data.open import open_as
from neuclip.data.source import fingerprint
from neuclip.formatting import percent, plural
from neuclip.machine import available_cores
from neuclip.settings.objectives import Advice, PlannedRun
from neuclip.training.run import Run

LONG_WARMUP = 0.5  # share of the run
HARDLY_MOVES = 0.8  # lowest temperature that the run can reach, divided by the initial one


def run_advice(run: Run, sets: HeldOutSets) -> list[Advice]:
    """All advice for a run, each item with what was noticed, why it matters, and what to do."""
    plan = run.plan
    planned = PlannedRun(plan.batch_size, plan.steps, len(run.source), run.epoch_samples)
    advice = [*_about_data(run, sets), *_about_plan(run), *_about_temperature(run)]
    return advice + run.settings.objective.advice(planned)


def _about_data(run: Run, sets: HeldOutSets) -> Iterator[Advice]:
    workers, cores, ranks = run.settings.data.workers, available_cores(), run.plan.ranks
    if workers * ranks > cores:
        where = f" if all {ranks} ranks are on this machine" if ranks > 1 else ""
        yield (
            f"{plural(workers * ranks, 'worker')} on {plural(cores, 'core')}{where}",
            "workers will compete with training for CPU",
            f"give --data.workers {max(1 if ranks == 1 else 0, cores // ranks - 1)}",
        )
    if not (sets.retrieval or sets.zero_shot):
        yield (
            "there is no held-out data",
            "the loss alone does not show quality",
            f"give --data.hold_out {min(1000, max(1, len(run.source) // 10))}, or --evaluation.retrieval DATA",
        )
    if any(_is_training_data(run, sets, path) for path in run.settings.evaluation.retrieval):
        yield (
            "evaluation.retrieval names the training data",
            "recall on it says nothing about unseen images",
            "hold some pairs out of training with --data.hold_out, or give other files: --evaluation.retrieval DATA",
        )


def _is_training_data(run: Run, sets: HeldOutSets, named_path: str) -> bool:
    """Whether a held-out set is the training data. Both may be splits of one file: compare captions and images, too."""
    (name, path), data = named(named_path), run.settings.data
    if path != data.train:
        return False
    training, held_out = open_as(data.train, data), sets.retrieval[name]
    ungrouped = held_out.source if isinstance(held_out, Selection) else held_out
    return fingerprint(ungrouped) == fingerprint(training) and ungrouped.images_version() == training.images_version()


def _about_plan(run: Run) -> Iterator[Advice]:
    plan, epoch = run.plan, run.epoch_samples
    if plan.samples < epoch - epoch % plan.batch_size:
        yield (
            f"the run sees {percent(plan.samples / epoch)} of the data",
            "the other pairs are never read",
            f"give --train.samples {-(-epoch // plan.batch_size) * plan.batch_size} for one epoch",
        )
    if plan.warmup_steps > LONG_WARMUP * plan.steps:
        yield (
            f"warm-up of {plural(plan.warmup_steps, 'step')} in a run of {plan.steps:,}",
            f"the learning rate {'never reaches' if plan.warmup_steps > plan.steps else 'hardly stays at'} its peak",
            "give --optimizer.warmup 0.05",
        )
    if plan.batch_size == 1:
        yield "train.batch_size is 1", "there are no negatives", f"give --train.batch_size {min(128, len(run.source))}"


def _about_temperature(run: Run) -> Iterator[Advice]:
    """Adam moves ln(1/tau) by at most the learning rate per step: a short run cannot move it far."""
    temperature, steps = run.settings.temperature, run.plan.steps
    if run.settings.objective.learns_temperature() != "yes" or temperature.learning_rate == 0:
        return
    share = math.exp(-temperature.learning_rate * steps * (0.5 if temperature.schedule == "cosine" else 1))
    if share > HARDLY_MOVES and temperature.minimum < HARDLY_MOVES * temperature.initial:
        lowest = max(temperature.minimum, temperature.initial * share)
        yield (
            f"the temperature can only fall from {temperature.initial:g} to {lowest:.3g}",
            f"its learning rate {temperature.learning_rate:g} is too small for {plural(steps, 'step')}",
            f"give --temperature.learning_rate {1.5 / steps:.2g}",
        )
    if temperature.initial == temperature.minimum:
        yield (
            f"the temperature starts at its minimum {temperature.minimum:g}",
            "it can only rise",
            f"give --temperature.initial {2 * temperature.minimum:g}, or a lower --temperature.minimum",
        )
