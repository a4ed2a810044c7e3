"""What a method needs and means on this data: its state, and what data and run do to it."""

from __future__ import annotations

import torch

from neuclip.doctor.findings import Findings
from neuclip.models.facts import ModelFacts
from neuclip.objectives import build_objective
from neuclip.objectives.pairs import KEPT, STRIP
from neuclip.settings.objectives import NeuCLIPSettings, PlannedRun
from neuclip.settings.sections import Settings

FLOAT = 4  # bytes


def note_objective(findings: Findings, settings: Settings, model: ModelFacts, pairs: int, ranks: int) -> None:
    batch_size = settings.train.batch_size
    run = PlannedRun(batch_size, findings["plan.steps"], pairs, findings["plan.pairs_per_epoch"])
    known = {"embed_dim": model.embed_dim, "dataset_size": pairs, "total_samples": run.samples, "epoch_samples": 0}
    with torch.device("meta"):
        replicated, sharded = build_objective(settings.objective_name, settings.objective, **known).state_bytes()
    similarities = 2 * batch_size // ranks * batch_size
    findings.note(
        "objective",
        name=settings.objective_name,
        state_bytes=replicated + sharded,
        state_bytes_per_rank=replicated - (-sharded // ranks),
        # Features as they came and as they are computed with, strips of similarities, and those that are kept.
        working_bytes_per_rank=FLOAT * (4 * batch_size * model.embed_dim + 3 * STRIP["cpu"] + min(similarities, KEPT)),
    )
    note_age(findings, settings, run)
    for advice in settings.objective.advice(run):
        findings.warn(*advice)


def note_age(findings: Findings, settings: Settings, run: PlannedRun) -> None:
    """How old the stored knowledge of a pair gets: FastCLIP's averages and NeuCLIP's prototypes.

    Both are noted for every method, because n/B decides between them.
    """
    chosen = settings.objective
    has_prototypes = isinstance(chosen, NeuCLIPSettings) and chosen.network == "prototypes"
    prototypes = chosen if isinstance(chosen, NeuCLIPSettings) and has_prototypes else NeuCLIPSettings()
    fill = -(-prototypes.num_prototypes // run.batch_size)
    every = 1 if prototypes.restart == "rolling" else max(prototypes.restart_every, fill)
    if prototypes.restart == "periodic" and (not prototypes.restart_every or prototypes.update == "simultaneous"):
        every = 0  # never
    findings.note("objective", has_prototypes=has_prototypes)
    findings.note(
        "fastclip", visits_per_pair=findings["plan.epochs"], steps_between_visits=findings["plan.batches_per_epoch"]
    )
    findings.note(
        "neuclip",
        prototypes=prototypes.num_prototypes,
        prototypes_per_batch=prototypes.num_prototypes / run.batch_size,
        steps_to_fill=fill,
        steps_between_renewals=every or None,
        renewals=run.steps // every if every else None,
    )
