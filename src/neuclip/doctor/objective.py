"""What a method needs and means on this data: its first loss, its state, and what data and run do to it."""

from __future__ import annotations

import math

from neuclip.doctor.findings import Findings
from neuclip.models.facts import ModelFacts
from neuclip.settings.objectives import NeuCLIPSettings
from neuclip.settings.sections import Settings

FLOAT = 4
# The first loss of untrained towers over that at chance: 0.87 to 1.28 over all methods, batches of 16 to 512, 3 seeds.
UNTRAINED = (0.85, 1.3)
SIGLIP_BUFFERS = 6 * 16 * 2**20  # objectives/siglip.py: chunks of 16 MB, about six of them
BLOCKS = 6  # (b, B) matrices that the other losses have alive at a time, about
INDIVIDUAL_START = {"v2": 0.03, "isogclr": 0.01}
TABLE_COLUMNS = {"v2": 9, "isogclr": 6}  # beside 2 for all other variants


def first_loss(settings: Settings) -> float:
    """The loss where all similarities are equal (for SigLIP and AmorLIP: 0), which is about where random towers are."""
    name, o = settings.objective_name, settings.objective
    batch, tau = settings.train.batch_size, settings.temperature.initial
    if name == "siglip":
        bias = o.initial_bias(batch)
        return softplus(-bias) + (batch - 1) * softplus(bias)
    if name == "amorlip":
        value = 2 + o.rho[0]
        if o.adaptive_temperature:
            value += 2 * math.log((batch - 1 + o.positive_coefficient) / batch)
        return tau * value
    if name == "clip" and o.form == "openclip":
        return math.log(batch)
    log_normalizer = math.log1p(o.eps)  # every normalizer is 1
    variant = getattr(o, "variant", "v3")
    if variant == "v0":
        return 2 * log_normalizer
    if variant in ("v1", "sogclr"):
        return 2 * tau * log_normalizer
    if variant in INDIVIDUAL_START:
        tau = o.temperature_initial or INDIVIDUAL_START[variant]
    return 2 * tau * (log_normalizer + o.rho)


def softplus(value: float) -> float:
    return max(value, 0.0) + math.log1p(math.exp(-abs(value)))


def state_bytes(settings: Settings, embed_dim: int, pairs: int) -> int:
    """What the method remembers, over all processes."""
    name, o = settings.objective_name, settings.objective
    if name == "fastclip":
        return FLOAT * TABLE_COLUMNS.get(o.variant, 2) * pairs
    if name == "amorlip":  # weights, two moments, the average, last epoch's average; two sides
        return 2 * FLOAT * 5 * mlp_weights(embed_dim, max(1, round(o.width_factor * embed_dim)))
    if name != "neuclip":
        return 0
    gentle = o.network == "mlp" or o.update == "simultaneous"
    copies = {"adagrad": 2, "adam": 3, "sgd": 1}[o.network_optimizer or ("adam" if gentle else "adagrad")]
    rows = mlp_weights(embed_dim, embed_dim) if o.network == "mlp" else o.num_prototypes * embed_dim
    owners = 16 * o.num_prototypes if o.mask_own_positive or o.mask_duplicates else 0
    return 2 * FLOAT * copies * rows + owners


def working_bytes(settings: Settings, embed_dim: int, ranks: int) -> int:
    """What one step of the method needs beside its state, in one process."""
    batch, local = settings.train.batch_size, settings.train.batch_size // ranks
    features = 2 * 2 * FLOAT * batch * embed_dim
    if settings.objective_name == "siglip":
        return features + min(SIGLIP_BUFFERS, BLOCKS * FLOAT * local * batch)
    inner = 0
    if settings.objective_name == "neuclip" and settings.objective.network == "prototypes":
        slots = settings.objective.num_prototypes // ranks
        inner = FLOAT * batch * slots + 3 * FLOAT * slots * embed_dim
    return features + max(inner, BLOCKS * FLOAT * local * batch)


def mlp_weights(embed_dim: int, width: int) -> int:
    """Of the residual MLP: two matrices, their biases and norms, and the last layer."""
    return 2 * embed_dim * width + 3 * width + 4 * embed_dim + 1


def note_objective(findings: Findings, settings: Settings, model: ModelFacts, pairs: int, ranks: int) -> None:
    state, chance = state_bytes(settings, model.embed_dim, pairs), first_loss(settings)
    chosen = settings.objective_name == "neuclip" and settings.objective.network == "prototypes"
    sharded = chosen or settings.objective_name == "fastclip"
    findings.note(
        "objective",
        name=settings.objective_name,
        has_prototypes=chosen,
        first_loss=chance,
        first_loss_from=UNTRAINED[0] * chance,
        first_loss_to=UNTRAINED[1] * chance,
        state_bytes=state,
        state_bytes_per_rank=-(-state // ranks) if sharded else state,
        working_bytes_per_rank=working_bytes(settings, model.embed_dim, ranks),
    )
    batch, steps = settings.train.batch_size, findings["plan.steps"]
    prototypes = settings.objective if chosen else NeuCLIPSettings()
    note_age(findings, prototypes, batch, steps)
    if chosen:
        _note_prototypes(findings, prototypes, batch, steps, pairs)
    elif settings.objective_name == "fastclip":
        _note_averages(findings, batch)
    elif settings.objective_name == "amorlip":
        _note_epochs(findings, settings)
    _note_rho(findings, settings, pairs)


def note_age(findings: Findings, o: NeuCLIPSettings, batch: int, steps: int) -> None:
    """How old what is known of a pair gets: in FastCLIP its average, in NeuCLIP the prototypes. Both are told whatever
    the method is, for n/B decides between them."""
    fill = -(-o.num_prototypes // batch)
    periodic = o.restart == "periodic" and o.update == "alternating"
    every = max(o.restart_every, fill) if periodic and o.restart_every else 1 if o.restart == "rolling" else None
    findings.note(
        "fastclip", visits_per_pair=findings["plan.epochs"], steps_between_visits=findings["plan.batches_per_epoch"]
    )
    findings.note(
        "neuclip",
        prototypes=o.num_prototypes,
        prototypes_per_batch=o.num_prototypes / batch,
        steps_to_fill=fill,
        steps_between_renewals=every,
        renewals=None if every is None else steps // every,
    )


def _note_prototypes(findings: Findings, o: NeuCLIPSettings, batch: int, steps: int, pairs: int) -> None:
    fill = findings["neuclip.steps_to_fill"]
    fitting = max(1, min(pairs // 2, steps * batch // 10))  # one figure for all that may be wrong with the number
    if fill >= max(2, steps):
        findings.warn(
            f"{o.num_prototypes:,} prototypes take {fill:,} steps to fill, the run has {steps:,}",
            "part of them is hardly used",
            f"give --objective.num_prototypes {fitting}",
        )
    elif o.restart == "periodic" and o.update == "alternating" and o.restart_every >= max(2, steps):
        findings.warn(
            f"prototypes are renewed every {o.restart_every:,} steps, the run has {steps:,}",
            "they keep the features of towers that had learnt nothing",
            f"give --objective.restart_every {max(fill, steps // 20)}",
        )
    if o.num_prototypes > pairs:
        findings.warn(
            f"{o.num_prototypes:,} prototypes for {pairs:,} pairs",
            "some pairs are stored several times and count more",
            f"give --objective.num_prototypes {fitting}",
        )


def _note_averages(findings: Findings, batch: int) -> None:
    visits, epoch = findings["fastclip.visits_per_pair"], findings["plan.pairs_per_epoch"]
    if visits < 2:
        findings.warn(
            f"each pair is visited {visits:.1f} times",
            "moving averages begin with the second visit; before it FastCLIP is the mini-batch form",
            f"give --train.samples {-(-5 * epoch // batch) * batch}, or --objective neuclip, which needs no visits",
        )


def _note_epochs(findings: Findings, settings: Settings) -> None:
    epochs = findings["plan.samples"] / (settings.objective.epoch_samples or findings["plan.pairs_per_epoch"])
    findings.note("objective", blending_epochs=max(0.0, epochs - 1))
    if epochs <= 1:
        findings.warn(
            "the run ends within AmorLIP's first epoch",
            "its networks lend nothing before the second",
            f"give --objective.epoch_samples {max(1, findings['plan.samples'] // 10)}",
        )


def _note_rho(findings: Findings, settings: Settings, pairs: int) -> None:
    """rho bounds how far an anchor's weights may be from equal: their divergence ends at the log of their number."""
    o = settings.objective
    of_batch = settings.objective_name == "clip" and o.form == "minibatch"
    of_data = settings.objective_name == "neuclip" or getattr(o, "variant", "") in ("v2", "v3", "isogclr")
    if not (of_batch or of_data):
        return
    others = max(2, (settings.train.batch_size if of_batch else pairs) - 1)
    findings.note("objective", rho=o.rho, largest_useful_rho=math.log(others))
    if o.rho > math.log(others):
        findings.warn(
            f"rho {o.rho:g} is above log({others:,}) = {math.log(others):.1f}",
            f"with {others:,} others in {'a batch' if of_batch else 'the data'} the temperature can only fall",
            f"give --objective.rho {0.7 * math.log(others):.2g}",
        )
