"""What a method needs and means on this data: its first loss, its state, and what data and run do to it."""

from __future__ import annotations

from neuclip.doctor.findings import Findings
from neuclip.models.facts import ModelFacts
from neuclip.settings.objectives import NeuCLIPSettings, PlannedRun
from neuclip.settings.sections import Settings

# First loss of untrained encoders over that at chance: 0.87 to 1.28 over all methods, batches of 16 to 512, 3 seeds.
UNTRAINED = (0.85, 1.3)


def note_objective(findings: Findings, settings: Settings, model: ModelFacts, pairs: int, ranks: int) -> None:
    objective, batch_size = settings.objective, settings.train.batch_size
    run = PlannedRun(batch_size, findings["plan.steps"], pairs, findings["plan.pairs_per_epoch"])
    state = objective.state_bytes(model.embed_dim, pairs)
    chance = objective.loss_at_chance(batch_size, settings.temperature.initial)
    findings.note(
        "objective",
        name=settings.objective_name,
        first_loss=chance,
        first_loss_from=UNTRAINED[0] * chance,
        first_loss_to=UNTRAINED[1] * chance,
        state_bytes=state,
        state_bytes_per_rank=-(-state // ranks) if objective.state_is_sharded else state,
        working_bytes_per_rank=objective.working_bytes(batch_size, ranks, model.embed_dim),
        **objective.figures(run),
    )
    note_age(findings, settings, run)
    for advice in objective.advice(run):
        findings.warn(*advice)


def note_age(findings: Findings, settings: Settings, run: PlannedRun) -> None:
    """How old the stored knowledge of a pair gets: FastCLIP's averages and NeuCLIP's prototypes.

    Both are noted for every method, because n/B decides between them.
    """
    chosen = settings.objective
    has_prototypes = isinstance(chosen, NeuCLIPSettings) and chosen.network == "prototypes"
    prototypes = chosen if isinstance(chosen, NeuCLIPSettings) and has_prototypes else NeuCLIPSettings()
    every = prototypes.steps_between_renewals(run.batch_size)
    findings.note("objective", has_prototypes=has_prototypes)
    findings.note(
        "fastclip", visits_per_pair=findings["plan.epochs"], steps_between_visits=findings["plan.batches_per_epoch"]
    )
    findings.note(
        "neuclip",
        prototypes=prototypes.num_prototypes,
        prototypes_per_batch=prototypes.num_prototypes / run.batch_size,
        steps_to_fill=prototypes.steps_to_fill(run.batch_size),
        steps_between_renewals=every,
        renewals=None if every is None else run.steps // every,
    )
