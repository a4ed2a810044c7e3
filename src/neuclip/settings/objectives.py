"""The options of every objective with their defaults (the paper's) and help texts, and facts about the objective that a
run needs before torch is loaded. The objective classes inherit them: `class NeuCLIP(Objective, NeuCLIPSettings)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from neuclip.settings.options import OptionError, Section, option

Advice = tuple[str, str, str]  # what, why it matters, remedy


class PlannedRun(NamedTuple):
    """The numbers of a run that an objective's advice depends on."""

    batch_size: int
    steps: int
    pairs: int  # in the data set
    pairs_per_epoch: int  # different from `pairs` if sources have weights

    @property
    def samples(self) -> int:
        return self.steps * self.batch_size


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(Section):
    """Options and facts that all objectives share."""

    prefix = "objective."
    title: ClassVar[str]  # its name in reports
    predicts_normalizers: ClassVar[bool] = True  # if so, its calibration is reported
    uses_bias: ClassVar[bool] = False  # whether the model needs a logit bias
    calibration_advice: ClassVar[str] = ""  # a sentence: how to bring the predicted normalizers closer to the true ones
    needs_reference: ClassVar[bool] = False  # whether it uses the features of a frozen reference model
    reference = ""  # the reference model; an objective that needs one has a field of this name
    eps = 1e-6  # used to measure normalizer errors; an objective with a field of this name overrides it

    mask_duplicates: bool = option(False, "do not use pairs with the same caption as negatives of each other")

    def learns_temperature(self) -> Literal["yes", "no", "per sample"]:
        return "yes"

    def advice(self, run: PlannedRun) -> list[Advice]:
        """Warnings to print before the run starts."""
        return []


@dataclass(frozen=True, kw_only=True)
class CLIPSettings(ObjectiveSettings):
    """The batch is its own normalizer: softmax as in open_clip, or the paper's mini-batch form."""

    title = "CLIP"
    predicts_normalizers = False

    form: Literal["openclip", "minibatch"] = option(
        "openclip",
        "openclip: open_clip's cross-entropy; minibatch: the robust loss (Eq. 1) with the batch as the data set",
    )
    rho: float = option(6.5, "minibatch: constant of the robust loss; above log(batch - 1) tau can only fall")
    eps: float = option(1e-6, "minibatch: added to each normalizer; openclip: used only in reports", at_least=0)

    def advice(self, run: PlannedRun) -> list[Advice]:
        return rho_advice(self.rho, run.batch_size, "a batch") if self.form == "minibatch" else []


@dataclass(frozen=True, kw_only=True)
class SigLIPSettings(ObjectiveSettings):
    """Classifies every image-text combination of the batch as a pair or not; has no normalizer."""

    title = "SigLIP"
    predicts_normalizers = False
    uses_bias = True


@dataclass(frozen=True, kw_only=True)
class FastCLIPSettings(ObjectiveSettings):
    """Keeps a moving average of each sample's normalizer, updated when the sample is seen."""

    title = "FastCLIP"
    calibration_advice = "Try a larger objective.gamma."

    gamma: float = option(
        0.2, "weight of the newest value in the moving average, at the end of the schedule", above=0, at_most=1
    )
    gamma_schedule: Literal["cosine", "constant"] = option(
        "cosine", "cosine: gamma falls from 1 over gamma_decay_samples; constant: it stays the same (SogCLR, iSogCLR)"
    )
    gamma_decay_samples: int = option(
        0, "cosine: samples after which gamma has its final value; 0: half of the run", at_least=0
    )
    temperature: Literal["global", "constant", "individual"] = option(
        "global",
        "global: one learned tau (v3); constant: a fixed tau (v1, SogCLR); individual: a learned tau per sample "
        "(v2, iSogCLR)",
    )
    rho: float = option(6.5, "constant of the robust loss if tau is learned; a larger rho drives tau lower")
    eps: float = option(1e-6, "added to each normalizer, inside the logarithm", at_least=0)
    temperature_gradient: Literal["paper", "fastclip"] = option(
        "paper", "with a global tau: fastclip counts its gradient through the similarities twice, as FastCLIP's code"
    )
    temperature_initial: float = option(
        0.03, "individual: initial temperature of each sample", at_least=0.01, at_most=1
    )
    temperature_lr: float = option(0.0133, "individual: learning rate of these temperatures", above=0)

    def learns_temperature(self) -> Literal["yes", "no", "per sample"]:
        if self.temperature == "individual":
            return "per sample"
        return "no" if self.temperature == "constant" else "yes"

    def advice(self, run: PlannedRun) -> list[Advice]:
        about_rho = [] if self.temperature == "constant" else rho_advice(self.rho, run.pairs, "the data")
        return [*visits_advice(run, self.title), *about_rho] if self.gamma < 1 else about_rho


@dataclass(frozen=True, kw_only=True)
class AmorLIPSettings(ObjectiveSettings):
    """Blends sums over the batch with predictions of small networks from the last epoch."""

    title = "AmorLIP"

    rho: tuple[float, ...] = option(
        (8.5, -8.5, -8.5), "one constant per equal part of the run: positive lowers the temperature, negative raises it"
    )
    positive_coefficient: float = option(1e-3, "weight of the positive pair in the denominator", above=0)
    blend_maximum: float = option(
        0.8, "largest share of the prediction (of the last epoch's networks) in an anchor's sum", at_least=0, below=1
    )
    blend_samples: int = option(0, "samples over which that share rises from 0; 0: half of the run", at_least=0)
    epoch_samples: int = option(
        0, "samples per epoch, for the blend and the networks; 0: the size of the data set", at_least=0
    )
    network_lr: float = option(1e-3, "Adam's learning rate for the networks", above=0)
    network_steps: int = option(3, "updates of the networks per batch", at_least=1)
    average_decay: float = option(0.92, "decay of the moving average of the networks' weights", at_least=0, below=1)
    reinitialise: bool = option(True, "reset the networks to random weights at the start of each epoch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rho:
            raise OptionError(f"{self.prefix}rho is empty; give one number, or several such as 8.5,-8.5,-8.5", "rho")

    def advice(self, run: PlannedRun) -> list[Advice]:
        if run.samples > (self.epoch_samples or run.pairs_per_epoch):
            return []
        return [
            (
                "the run ends within AmorLIP's first epoch",
                "its networks are not used before epoch 2",
                f"give --objective.epoch_samples {max(1, run.samples // 10)}",
            )
        ]


@dataclass(frozen=True, kw_only=True)
class NeuCLIPSettings(ObjectiveSettings):
    """Predicts the log-normalizers over the whole data set with two small networks of prototypes."""

    title = "NeuCLIP"
    calibration_advice = "Try more objective.inner_steps or a smaller objective.restart_every."

    num_prototypes: int = option(4096, "prototypes per side (m in the paper)", at_least=1)
    restart: Literal["periodic", "rolling"] = option(
        "periodic", "periodic: reset all every restart_every steps; rolling: replace the oldest with each batch"
    )
    restart_every: int = option(500, "periodic: steps between restarts; 0: only at the start (T_r)", at_least=0)
    inner_steps: int = option(10, "updates of the network per batch (T_u)", at_least=0)
    network_lr: float | None = option(
        None,
        "learning rate of the network; default: 1.0 (AdaGrad) for prototypes, 1e-3 (Adam) for mlp and simultaneous",
        above=0,
    )
    rho: float = option(6.5, "constant of the robust loss; a larger rho drives the temperature lower")
    eps: float = option(1e-6, "added to each normalizer, inside the logarithm", at_least=0)
    network: Literal["prototypes", "mlp"] = option(
        "prototypes", "network that predicts the normalizers; mlp: the paper's ablation"
    )
    fit: Literal["unified", "separate"] = option(
        "unified",
        "unified: the network minimises the loss itself; separate: its squared difference to the batch's normalizers "
        "(ablation)",
    )
    update: Literal["alternating", "simultaneous"] = option(
        "alternating",
        "alternating: inner steps, then the encoders' step; simultaneous: one Adam step for both (Algorithm 3)",
    )
    alpha_gradient: Literal["full", "detached"] = option(
        "full", "whether the encoders also receive the gradient through the predicted normalizer"
    )
    mask_own_positive: bool = option(False, "leave out an anchor's own positive if it is among the prototypes")

    def advice(self, run: PlannedRun) -> list[Advice]:
        advice = rho_advice(self.rho, run.pairs, "the data")
        if self.network == "mlp":
            return advice
        fill = -(-self.num_prototypes // run.batch_size)  # steps
        fewer = f"give --objective.num_prototypes {max(1, min(run.pairs // 2, run.samples // 10))}"
        if fill >= max(2, run.steps):
            what = f"{self.num_prototypes:,} prototypes take {fill:,} steps to fill, the run has {run.steps:,}"
            advice.append((what, "some of them are hardly used", fewer))
        elif self.restart == "periodic" and self.update == "alternating" and self.restart_every >= max(2, run.steps):
            what = f"prototypes are reset every {self.restart_every:,} steps, the run has {run.steps:,}"
            remedy = f"give --objective.restart_every {max(fill, run.steps // 20)}"
            advice.append((what, "they keep the features of untrained encoders", remedy))
        if self.num_prototypes > run.pairs:
            what = f"{self.num_prototypes:,} prototypes for {run.pairs:,} pairs"
            advice.append((what, "some pairs are stored several times and count more", fewer))
        return advice


@dataclass(frozen=True, kw_only=True)
class SCENTSettings(ObjectiveSettings):
    """FastCLIP with a gamma per sample: a proximal step of mirror descent on each log-normalizer."""

    title = "SCENT"
    calibration_advice = "Try a larger objective.log_alpha."

    log_alpha: float = option(
        10.0,
        "log of the step size: the newest value has weight sigmoid(log_alpha + log u); larger: closer to the "
        "mini-batch form",
    )
    rho: float = option(6.5, "constant of the robust loss; a larger rho drives the temperature lower")
    eps: float = option(1e-6, "added to each normalizer, inside the logarithm", at_least=0)
    temperature_gradient: Literal["paper", "fastclip"] = option(
        "paper", "fastclip: counts the gradient of tau through the similarities twice, as FastCLIP's code does"
    )

    def advice(self, run: PlannedRun) -> list[Advice]:
        return [*visits_advice(run, self.title), *rho_advice(self.rho, run.pairs, "the data")]


@dataclass(frozen=True, kw_only=True)
class DRRhoSettings(FastCLIPSettings):
    """FastCLIP with the similarities of a frozen reference model subtracted."""

    title = "DRRho"
    needs_reference = True

    reference: str = option(
        "", "the reference model: a run, a checkpoint, local-dir:FOLDER, hf-hub:NAME or MODEL:WEIGHTS"
    )
    gamma: float = option(
        1.0,
        "weight of the newest value in the moving average, at the end of the schedule; 1: no moving average",
        above=0,
        at_most=1,
    )
    temperature: Literal["global", "constant", "individual"] = option(
        "constant",
        "constant: a fixed tau (the authors use 0.01); global: one learned tau; individual: a learned tau per sample",
    )
    eps: float = option(1e-4, "added to each normalizer, inside the logarithm", at_least=0)


def visits_advice(run: PlannedRun, title: str) -> list[Advice]:
    visits = run.samples / run.pairs_per_epoch
    if visits >= 2:
        return []
    enough = -(-5 * run.pairs_per_epoch // run.batch_size) * run.batch_size
    return [
        (
            f"each pair is seen {visits:.1f} times",
            f"moving averages start when a pair is seen again; before that, {title} is the mini-batch form",
            f"give --train.samples {enough}, or --objective neuclip, which need not see pairs again",
        )
    ]


def rho_advice(rho: float, candidates: int, where: str) -> list[Advice]:
    """Advice if rho is too large. It bounds the divergence of an anchor's weights from equal weights, which is at most
    the log of their number: a larger rho bounds nothing."""
    negatives = max(2, candidates - 1)
    if rho <= math.log(negatives):
        return []
    what = f"rho {rho:g} is above log({negatives:,}) = {math.log(negatives):.1f}"
    why = f"with {negatives:,} negatives in {where} the temperature can only fall"
    return [(what, why, f"give --objective.rho {0.7 * math.log(negatives):.2g}")]


OBJECTIVES: dict[str, type[ObjectiveSettings]] = {
    "clip": CLIPSettings,
    "siglip": SigLIPSettings,
    "fastclip": FastCLIPSettings,
    "amorlip": AmorLIPSettings,
    "neuclip": NeuCLIPSettings,
    "scent": SCENTSettings,
    "drrho": DRRhoSettings,
}
