"""One dataclass per objective: its fields, their defaults (the paper's) and what each means.

The objective classes take their own defaults from here, so a number is never written twice.
Every field's metadata `help` is what `neuclip train --help` prints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from neuclip.errors import UserError
from neuclip.settings.fields import check_at_least, check_positive, described
from neuclip.settings.objective_base import (
    BLOCKS,
    FLOAT,
    Advice,
    ObjectiveSettings,
    PlannedRun,
    feature_bytes,
    mlp_weights,
    rho_advice,
    rho_figures,
    robust_loss_at_chance,
    softplus,
)

if TYPE_CHECKING:
    from neuclip.settings.sections import OptimizerSettings

__all__ = [
    "OBJECTIVES",
    "AmorLIPSettings",
    "CLIPSettings",
    "FastCLIPSettings",
    "NeuCLIPSettings",
    "ObjectiveSettings",
    "PlannedRun",
    "SigLIPSettings",
]

SIGLIP_BUFFERS = 6 * 16 * 2**20  # objectives/siglip.py: chunks of 16 MB, about six of them
MORE_TABLE_COLUMNS = {"v2": 7, "isogclr": 4}  # of FastCLIP, beside two log-normalizers per sample
INDIVIDUAL_START = {"v2": 0.03, "isogclr": 0.01}  # first temperature of a sample in FastCLIP


@dataclass(frozen=True, kw_only=True)
class CLIPSettings(ObjectiveSettings):
    """The batch is its own normalizer: softmax as in open_clip, or the paper's mini-batch form."""

    title = "CLIP"
    predicts_normalizers = False

    form: Literal["openclip", "minibatch"] = described(
        "openclip", "open_clip's cross-entropy; minibatch: the robust loss (Eq. 1) with the batch as the data set"
    )
    rho: float = described(6.5, "minibatch: constant of the robust loss; above log(batch - 1) tau only falls")
    eps: float = described(1e-6, "minibatch: added to each normalizer; openclip: only where normalizers are reported")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("objective.eps", self.eps, 0, "the default is 1e-6")

    def loss_at_chance(self, batch_size: int, temperature: float) -> float:
        if self.form == "openclip":
            return math.log(batch_size)
        return robust_loss_at_chance(temperature, self.rho, self.eps)

    def figures(self, run: PlannedRun) -> dict[str, float]:
        return rho_figures(self.rho, run.batch_size) if self.form == "minibatch" else {}

    def advice(self, run: PlannedRun) -> list[Advice]:
        return rho_advice(self.rho, run.batch_size, "a batch") if self.form == "minibatch" else []


@dataclass(frozen=True, kw_only=True)
class SigLIPSettings(ObjectiveSettings):
    """Every image-text combination of the batch is a yes-or-no question; no normalizer."""

    title = "SigLIP"
    predicts_normalizers = False
    uses_bias = True
    model_fields = ("bias_initial",)

    bias_initial: str = described("-10", "initial bias of the model; auto: -ln(batch - 1), the share of true pairs")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.initial_bias(batch_size=2)

    def initial_bias(self, batch_size: int) -> float:
        """`bias_initial` as a number: at `auto` the loss starts from what guessing by frequency costs."""
        if self.bias_initial == "auto":
            return -math.log(max(1, batch_size - 1))
        try:
            value = float(self.bias_initial)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"objective.bias_initial is {self.bias_initial!r}; give auto or a number such as -10")
        return value

    def loss_at_chance(self, batch_size: int, temperature: float) -> float:
        bias = self.initial_bias(batch_size)
        return softplus(-bias) + (batch_size - 1) * softplus(bias)

    def working_bytes(self, batch_size: int, ranks: int, embed_dim: int) -> int:
        logits = BLOCKS * FLOAT * (batch_size // ranks) * batch_size
        return feature_bytes(batch_size, embed_dim) + min(SIGLIP_BUFFERS, logits)


@dataclass(frozen=True, kw_only=True)
class FastCLIPSettings(ObjectiveSettings):
    """Each sample's normalizer remembered as a moving average over its visits."""

    title = "FastCLIP"

    variant: Literal["v0", "v1", "v2", "v3", "sogclr", "isogclr"] = described(
        "v3", "v3: the robust loss; v0: without factor tau; v1, sogclr: constant tau; v2, isogclr: one per sample"
    )
    gamma: float = described(0.2, "weight of a visit in the moving average, at the end of the schedule")
    gamma_schedule: Literal["cosine", "staircase", "constant"] = described(
        "cosine", "how gamma falls from 1, by samples seen; staircase: once per epoch; sogclr, isogclr: constant"
    )
    gamma_decay_samples: int = described(0, "samples after which gamma has fallen; 0: half of the run")
    rho: float = described(6.5, "v2, v3, isogclr: constant of the robust loss; larger drives temperatures lower")
    eps: float = described(1e-6, "added to each normalizer, inside the logarithm")
    temperature_gradient: Literal["paper", "fastclip"] = described(
        "paper", "v0, v3: fastclip counts the part through the similarities twice, as FastCLIP's code does"
    )
    temperature_initial: float = described(0.0, "v2, isogclr: first temperature of a sample; 0: 0.03, 0.01")
    temperature_lr: float = described(0.0, "v2, isogclr: learning rate of these temperatures; 0: 0.0133, 0.01")
    temperature_range: tuple[float, float] = described(
        (0.0, 0.0), "v2, isogclr: limits of these temperatures; 0,0: 0.01,1 and 0.005,0.05"
    )
    temperature_correction: Literal["visits", "epochs"] = described(
        "visits",
        "v2: what Adam's bias correction counts; epochs: as FastCLIP's code, smaller steps from the second epoch",
    )
    table_path: str = described("", "memory-mapped file for the moving averages; '': they stay in memory")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gamma <= 1:
            raise UserError(f"objective.gamma is {self.gamma}; give a number above 0, at most 1 (default 0.2)")
        check_at_least("objective.gamma_decay_samples", self.gamma_decay_samples, 0, "0: half of the run")
        check_at_least("objective.eps", self.eps, 0, "the default is 1e-6")
        check_at_least("objective.temperature_initial", self.temperature_initial, 0, "0: the variant's own")
        check_at_least("objective.temperature_lr", self.temperature_lr, 0, "0: the variant's own")
        if any(self.temperature_range) and min(self.temperature_range) <= 0:
            raise UserError(
                f"objective.temperature_range is {self.temperature_range}; give two numbers above 0, such as 0.01,1"
            )

    @property
    def individual_start(self) -> float | None:
        """The first temperature of a sample; None in variants with one temperature for all."""
        return (self.temperature_initial or INDIVIDUAL_START[self.variant]) if self.per_sample else None

    @property
    def per_sample(self) -> bool:
        return self.variant in INDIVIDUAL_START

    @property
    def state_is_sharded(self) -> bool:
        return True

    def learns_temperature(self) -> Literal["yes", "no", "per sample"]:
        if self.per_sample:
            return "per sample"
        return "no" if self.variant in ("v1", "sogclr") else "yes"

    def loss_at_chance(self, batch_size: int, temperature: float) -> float:
        if self.variant == "v0":
            return 2 * math.log1p(self.eps)
        rho = 0.0 if self.variant in ("v1", "sogclr") else self.rho
        return robust_loss_at_chance(self.individual_start or temperature, rho, self.eps)

    def state_bytes(self, embed_dim: int, dataset_size: int) -> int:
        return FLOAT * (2 + MORE_TABLE_COLUMNS.get(self.variant, 0)) * dataset_size

    def figures(self, run: PlannedRun) -> dict[str, float]:
        return rho_figures(self.rho, run.pairs) if self.variant in ("v2", "v3", "isogclr") else {}

    def advice(self, run: PlannedRun) -> list[Advice]:
        found: list[Advice] = []
        visits = run.samples / run.pairs_per_epoch
        if visits < 2:
            enough = -(-5 * run.pairs_per_epoch // run.batch_size) * run.batch_size
            found.append(
                (
                    f"each pair is visited {visits:.1f} times",
                    "moving averages begin with the second visit; before it FastCLIP is the mini-batch form",
                    f"give --train.samples {enough}, or --objective neuclip, which needs no visits",
                )
            )
        if self.variant in ("v2", "v3", "isogclr"):
            found += rho_advice(self.rho, run.pairs, "the data")
        return found


@dataclass(frozen=True, kw_only=True)
class AmorLIPSettings(ObjectiveSettings):
    """Sums over the batch, blended with what small networks learnt of them the epoch before."""

    title = "AmorLIP"

    rho: tuple[float, ...] = described(
        (8.5, -8.5, -8.5), "one constant per equal part of the run: positive lowers the temperature, negative raises it"
    )
    adaptive_temperature: bool = described(False, "the temperature also follows the value of the loss")
    positive_coefficient: float = described(1e-3, "weight of the positive pair in the denominator")
    blend_maximum: float = described(0.8, "largest share of the last epoch's prediction in an anchor's sum")
    blend_samples: int = described(0, "samples over which that share rises from 0; 0: half of the run")
    epoch_samples: int = described(0, "samples per epoch of blend and networks; 0: the size of the data set")
    divergence: Literal["log_l2", "kl_asymmetric", "kl_symmetric", "js"] = described(
        "log_l2",
        "loss of the networks: squared difference of logarithms, or a divergence over the batch plus 0.1 of it",
    )
    width_factor: float = described(1.0, "hidden width of the networks over the width of the features")
    network_lr: float = described(1e-3, "Adam's learning rate for the networks")
    network_lr_times_ranks: bool = described(False, "multiply that rate by the number of ranks, as AmorLIP's code does")
    network_steps: int = described(3, "updates of the networks per batch")
    clip_network_gradient: float = described(1.0, "largest gradient norm of the networks; 0: no clipping")
    average_decay: float = described(0.92, "decay of the moving average of the networks' weights")
    average_every: int = described(2, "steps between updates of that average, from the first of each epoch")
    reinitialise_every: int = described(1, "epochs after which the networks start anew; 0: never")
    eps: float = described(1e-6, "only where normalizers are reported: added to each")
    seed: int = described(0, "seed of the networks' initial weights")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rho:
            raise UserError("objective.rho is empty; give one number, or several such as 8.5,-8.5,-8.5")
        if not 0 <= self.blend_maximum < 1:
            raise UserError(f"objective.blend_maximum is {self.blend_maximum}; give 0 or more and less than 1")
        if not 0 <= self.average_decay < 1:
            raise UserError(f"objective.average_decay is {self.average_decay}; give 0 or more and less than 1")
        check_positive("objective.positive_coefficient", self.positive_coefficient, "1 counts it like the others")
        check_at_least("objective.blend_samples", self.blend_samples, 0, "0 for half of the run")
        check_at_least("objective.epoch_samples", self.epoch_samples, 0, "0 for the size of the data set")
        check_positive("objective.width_factor", self.width_factor, "the default is 1")
        check_positive("objective.network_lr", self.network_lr, "the default is 1e-3")
        check_at_least("objective.network_steps", self.network_steps, 1, "the default is 3")
        check_at_least("objective.clip_network_gradient", self.clip_network_gradient, 0, "0 for none")
        check_at_least("objective.average_every", self.average_every, 1, "the default is 2")
        check_at_least("objective.reinitialise_every", self.reinitialise_every, 0, "0 for never")
        check_positive("objective.eps", self.eps, "the default is 1e-6")
        check_at_least("objective.seed", self.seed, 0, "the default is 0")

    def loss_at_chance(self, batch_size: int, temperature: float) -> float:
        value = 2 + self.rho[0]
        if self.adaptive_temperature:
            value += 2 * math.log((batch_size - 1 + self.positive_coefficient) / batch_size)
        return temperature * value

    def state_bytes(self, embed_dim: int, dataset_size: int) -> int:
        # weights, two moments, the average, last epoch's average; two sides
        return 2 * FLOAT * 5 * mlp_weights(embed_dim, max(1, round(self.width_factor * embed_dim)))

    def figures(self, run: PlannedRun) -> dict[str, float]:
        return {"blending_epochs": max(0.0, self._epochs(run) - 1)}

    def advice(self, run: PlannedRun) -> list[Advice]:
        if self._epochs(run) > 1:
            return []
        return [
            (
                "the run ends within AmorLIP's first epoch",
                "its networks are not used before epoch 2",
                f"give --objective.epoch_samples {max(1, run.samples // 10)}",
            )
        ]

    def _epochs(self, run: PlannedRun) -> float:
        return run.samples / (self.epoch_samples or run.pairs_per_epoch)


@dataclass(frozen=True, kw_only=True)
class NeuCLIPSettings(ObjectiveSettings):
    """Log-normalizers over the whole data set, predicted by two small networks of prototypes."""

    title = "NeuCLIP"

    num_prototypes: int = described(4096, "prototypes per side (m in the paper)")
    restart: Literal["periodic", "rolling"] = described(
        "periodic", "periodic: reset all every restart_every steps; rolling: replace the oldest with each batch"
    )
    restart_every: int = described(500, "periodic: steps between restarts; 0: only at the start (T_r)")
    inner_steps: int = described(10, "updates of the prototypes per batch (T_u)")
    rho: float = described(6.5, "constant of the robust loss; larger drives the temperature lower")
    eps: float = described(1e-6, "added to each normalizer, inside the logarithm")
    network: Literal["prototypes", "mlp"] = described("prototypes", "what predicts the normalizers; mlp: the ablation")
    fit: Literal["unified", "separate"] = described(
        "unified", "the network minimises the loss itself; separate: squared difference to the batch's (ablation)"
    )
    update: Literal["alternating", "simultaneous"] = described(
        "alternating", "inner steps before the encoders' step; simultaneous: one AdamW step beside it (Algorithm 3)"
    )
    network_optimizer: Literal["adagrad", "adam", "sgd"] | None = described(
        None, "optimizer of the network; default: adagrad for prototypes, adam for mlp and simultaneous"
    )
    network_lr: float | None = described(
        None,
        "its learning rate; default: 1.0 for adagrad and sgd, 1e-3 for adam, for simultaneous that of optimizer, whose "
        "warm-up and decay it then follows",
    )
    network_betas: tuple[float, float] | None = described(
        None, "adam's betas; default: 0.9,0.999, for simultaneous those of optimizer"
    )
    network_eps: float | None = described(None, "adam's epsilon; default: 1e-8, for simultaneous that of optimizer")
    network_weight_decay: float = described(0.0, "weight decay of the network; decoupled under adam")
    initial_accumulator: float = described(0.0, "initial value of AdaGrad's sums of squared gradients")
    alpha_gradient: Literal["full", "detached"] = described(
        "full", "whether the encoders also receive the gradient through the predicted normalizer"
    )
    temperature_gradient: Literal["paper", "fastclip"] = described(
        "paper", "fastclip counts the part through the similarities twice, as FastCLIP's code does"
    )
    reset_optimizer_at_restart: bool = described(False, "clear AdaGrad's sums of the slots a restart overwrites")
    mask_own_positive: bool = described(False, "leave out an anchor's own partner where it is among the prototypes")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("objective.num_prototypes", self.num_prototypes, 1, "the paper uses 4096")
        check_at_least("objective.restart_every", self.restart_every, 0, "0 restarts only at the start")
        check_at_least("objective.inner_steps", self.inner_steps, 0, "the paper uses 10")
        if self.network_lr is not None:
            check_positive("objective.network_lr", self.network_lr, "the paper uses 1.0")
        if self.network_eps is not None:
            check_positive("objective.network_eps", self.network_eps, "1e-8 as torch.optim.AdamW")
        if self.network_betas is not None and not all(0 <= beta < 1 for beta in self.network_betas):
            raise UserError(f"objective.network_betas is {self.network_betas}; give two numbers from 0 to below 1")
        check_at_least("objective.network_weight_decay", self.network_weight_decay, 0, "0 for none")
        check_at_least("objective.initial_accumulator", self.initial_accumulator, 0, "0 as torch.optim.Adagrad")
        check_at_least("objective.eps", self.eps, 0, "the default is 1e-6")

    @property
    def optimizer(self) -> Literal["adagrad", "adam", "sgd"]:
        """`network_optimizer`, or what suits the network."""
        adam_by_default = self.network == "mlp" or self.update == "simultaneous"
        return self.network_optimizer or ("adam" if adam_by_default else "adagrad")

    @property
    def learning_rate(self) -> float:
        return self.network_lr or (1e-3 if self.optimizer == "adam" else 1.0)

    def with_defaults_of(self, optimizer: OptimizerSettings) -> Self:
        """Algorithm 3 is one AdamW for encoders and prototypes."""
        if self.update == "alternating" or self.optimizer != "adam":
            return self
        return replace(
            self,
            network_lr=self.network_lr or optimizer.learning_rate,
            network_betas=self.network_betas or (optimizer.beta1, optimizer.beta2),
            network_eps=self.network_eps or optimizer.eps,
        )

    @property
    def network_updates(self) -> int:
        """Updates of the network per batch."""
        return self.inner_steps if self.update == "alternating" else 1

    @property
    def state_is_sharded(self) -> bool:
        return self.network == "prototypes"

    def loss_at_chance(self, batch_size: int, temperature: float) -> float:
        return robust_loss_at_chance(temperature, self.rho, self.eps)

    def state_bytes(self, embed_dim: int, dataset_size: int) -> int:
        copies = {"adagrad": 2, "adam": 3, "sgd": 1}[self.optimizer]
        if self.network == "mlp":
            return 2 * FLOAT * copies * mlp_weights(embed_dim, embed_dim)
        owners = 16 * self.num_prototypes if self.mask_own_positive or self.mask_duplicates else 0
        return 2 * FLOAT * copies * self.num_prototypes * embed_dim + owners

    def working_bytes(self, batch_size: int, ranks: int, embed_dim: int) -> int:
        features, others = feature_bytes(batch_size, embed_dim), super().working_bytes(batch_size, ranks, embed_dim)
        if self.network == "mlp":
            return others
        slots = self.num_prototypes // ranks
        inner = FLOAT * batch_size * slots + 3 * FLOAT * slots * embed_dim
        return max(features + inner, others)

    def steps_to_fill(self, batch_size: int) -> int:
        return -(-self.num_prototypes // batch_size)

    def steps_between_renewals(self, batch_size: int) -> int | None:
        """None: prototypes are filled once and stay."""
        if self.restart == "rolling":
            return 1
        if self.update == "alternating" and self.restart_every:
            return max(self.restart_every, self.steps_to_fill(batch_size))
        return None

    def figures(self, run: PlannedRun) -> dict[str, float]:
        return rho_figures(self.rho, run.pairs)

    def advice(self, run: PlannedRun) -> list[Advice]:
        prototypes = self._prototype_advice(run) if self.network == "prototypes" else []
        return prototypes + rho_advice(self.rho, run.pairs, "the data")

    def _prototype_advice(self, run: PlannedRun) -> list[Advice]:
        found: list[Advice] = []
        fill = self.steps_to_fill(run.batch_size)
        fitting = max(1, min(run.pairs // 2, run.samples // 10))  # one remedy for every wrong number
        if fill >= max(2, run.steps):
            found.append(
                (
                    f"{self.num_prototypes:,} prototypes take {fill:,} steps to fill, the run has {run.steps:,}",
                    "part of them is hardly used",
                    f"give --objective.num_prototypes {fitting}",
                )
            )
        elif self.restart == "periodic" and self.update == "alternating" and self.restart_every >= max(2, run.steps):
            found.append(
                (
                    f"prototypes are renewed every {self.restart_every:,} steps, the run has {run.steps:,}",
                    "they keep the features of untrained encoders",
                    f"give --objective.restart_every {max(fill, run.steps // 20)}",
                )
            )
        if self.num_prototypes > run.pairs:
            found.append(
                (
                    f"{self.num_prototypes:,} prototypes for {run.pairs:,} pairs",
                    "some pairs are stored several times and count more",
                    f"give --objective.num_prototypes {fitting}",
                )
            )
        return found


OBJECTIVES: dict[str, type[ObjectiveSettings]] = {
    "clip": CLIPSettings,
    "siglip": SigLIPSettings,
    "fastclip": FastCLIPSettings,
    "amorlip": AmorLIPSettings,
    "neuclip": NeuCLIPSettings,
}
