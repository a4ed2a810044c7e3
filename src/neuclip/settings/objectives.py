"""One dataclass per objective: its fields, their defaults (the paper's) and what each means.

The objective classes take their own defaults from here, so a number is never written twice.
Every field's metadata `help` is what `neuclip train --help` prints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from neuclip.errors import UserError
from neuclip.settings.fields import check_at_least, check_positive, described


class ObjectiveSettings:
    """What every objective's settings say about it beside their fields."""

    uses_bias: ClassVar[bool] = False  # of the model, as SigLIP does

    def initial_bias(self, batch_size: int) -> float | None:
        return None

    @property
    def normalizer_eps(self) -> float:
        """Added to each normalizer where the error of its estimates is measured."""
        return getattr(self, "eps", 1e-6)


@dataclass(frozen=True, kw_only=True)
class CLIPSettings(ObjectiveSettings):
    """The batch is its own normalizer: softmax as in open_clip, or the paper's mini-batch form."""

    title = "CLIP"
    predicts_normalizers = False

    form: Literal["openclip", "minibatch"] = described(
        "openclip", "open_clip's cross-entropy; minibatch: the robust loss (Eq. 1) with the batch as the data set"
    )
    rho: float = described(6.5, "minibatch: the robust loss's constant; above log(batch - 1) tau only falls")
    eps: float = described(1e-6, "minibatch: added to each normalizer; openclip: only where normalizers are reported")
    mask_duplicates: bool = described(False, "pairs with an equal caption are no negatives of each other")

    def __post_init__(self) -> None:
        check_at_least("objective.eps", self.eps, 0, "the default is 1e-6")


@dataclass(frozen=True, kw_only=True)
class SigLIPSettings(ObjectiveSettings):
    """Every image-text combination of the batch is a yes-or-no question; no normalizer."""

    uses_bias = True

    bias_initial: str = described("-10", "where the model's bias starts; auto: -ln(batch - 1), the share of true pairs")
    mask_duplicates: bool = described(False, "pairs with an equal caption are no negatives of each other")

    def __post_init__(self) -> None:
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
    rho: float = described(6.5, "v2, v3, isogclr: the robust loss's constant: larger drives temperatures lower")
    eps: float = described(1e-6, "added to each normalizer, inside the logarithm")
    temperature_gradient: Literal["paper", "fastclip"] = described(
        "paper", "v0, v3: fastclip counts the part through the similarities twice, as FastCLIP's code does"
    )
    temperature_initial: float = described(0.0, "v2, isogclr: individual temperatures begin here; 0: 0.03, 0.01")
    temperature_lr: float = described(0.0, "v2, isogclr: their rate; 0: 0.0133, 0.01")
    temperature_range: tuple[float, float] = described(
        (0.0, 0.0), "v2, isogclr: their limits; 0,0: 0.01,1 and 0.005,0.05"
    )
    table_path: str = described("", "keep the moving averages in a memory-mapped file there; '': in memory")
    mask_duplicates: bool = described(False, "pairs with an equal caption are no negatives of each other")

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, kw_only=True)
class AmorLIPSettings(ObjectiveSettings):
    """Sums over the batch, blended with what small networks learnt of them the epoch before."""

    title = "AmorLIP"

    rho: tuple[float, ...] = described(
        (8.5, -8.5, -8.5), "one constant per equal part of the run: positive lowers the temperature, negative raises it"
    )
    adaptive_temperature: bool = described(False, "the temperature also follows the value of the loss")
    positive_coefficient: float = described(1e-3, "how much of its own partner an anchor's sum contains")
    blend_maximum: float = described(0.8, "largest share of the last epoch's prediction in an anchor's sum")
    blend_samples: int = described(0, "samples over which that share rises from 0; 0: half of the run")
    epoch_samples: int = described(0, "samples per epoch of blend and networks; 0: the size of the data set")
    divergence: Literal["log_l2", "kl_asymmetric", "kl_symmetric", "js"] = described(
        "log_l2", "the networks' loss: squared difference of logarithms, or a divergence over the batch plus 0.1 of it"
    )
    width_factor: float = described(1.0, "the networks' hidden width over that of the features")
    network_lr: float = described(1e-3, "Adam's rate for the networks")
    network_steps: int = described(3, "updates of the networks per batch")
    clip_network_gradient: float = described(1.0, "largest gradient norm of the networks; 0: no clipping")
    average_decay: float = described(0.92, "decay of the moving average of the networks' weights")
    average_every: int = described(2, "steps between updates of that average")
    reinitialise_every: int = described(1, "epochs after which the networks start anew; 0: never")
    eps: float = described(1e-6, "only where normalizers are reported: added to each")
    seed: int = described(0, "of the networks' initial weights")
    mask_duplicates: bool = described(False, "pairs with an equal caption are no negatives of each other")

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, kw_only=True)
class NeuCLIPSettings(ObjectiveSettings):
    """Log-normalizers over the whole data set, predicted by two small networks of prototypes."""

    title = "NeuCLIP"

    num_prototypes: int = described(4096, "prototypes per side (m in the paper)")
    restart: Literal["periodic", "rolling"] = described(
        "periodic", "rolling renews the oldest prototypes with each batch instead of all every so often"
    )
    restart_every: int = described(500, "periodic: steps between restarts; 0: only at the start (T_r)")
    inner_steps: int = described(10, "updates of the prototypes per batch (T_u)")
    rho: float = described(6.5, "the robust loss's constant: larger drives the temperature lower")
    eps: float = described(1e-6, "added to each normalizer, inside the logarithm")
    network: Literal["prototypes", "mlp"] = described("prototypes", "what predicts the normalizers; mlp: the ablation")
    fit: Literal["unified", "separate"] = described(
        "unified", "the network minimises the loss itself; separate: squared difference to the batch's (ablation)"
    )
    update: Literal["alternating", "simultaneous"] = described(
        "alternating", "inner steps before the towers' step; simultaneous: one AdamW step beside it (Algorithm 3)"
    )
    network_optimizer: Literal["adagrad", "adam", "sgd"] | None = described(
        None, "of the network; default: adagrad for prototypes, adam for mlp and simultaneous"
    )
    network_lr: float | None = described(None, "its rate; default: 1.0 for adagrad and sgd, 1e-3 for adam")
    network_weight_decay: float = described(0.0, "weight decay of the network")
    initial_accumulator: float = described(0.0, "what AdaGrad's sums of squared gradients start from")
    alpha_gradient: Literal["full", "detached"] = described(
        "full", "whether the towers also receive the gradient through the predicted normalizer"
    )
    temperature_gradient: Literal["paper", "fastclip"] = described(
        "paper", "fastclip counts the part through the similarities twice, as FastCLIP's code does"
    )
    reset_optimizer_at_restart: bool = described(False, "clear AdaGrad's sums of the slots a restart overwrites")
    mask_own_positive: bool = described(False, "leave out an anchor's own partner where it is among the prototypes")
    mask_duplicates: bool = described(False, "pairs with an equal caption are no negatives of each other")

    def __post_init__(self) -> None:
        check_at_least("objective.num_prototypes", self.num_prototypes, 1, "the paper uses 4096")
        check_at_least("objective.restart_every", self.restart_every, 0, "0 restarts only at the start")
        check_at_least("objective.inner_steps", self.inner_steps, 0, "the paper uses 10")
        if self.network_lr is not None:
            check_positive("objective.network_lr", self.network_lr, "the paper uses 1.0")
        check_at_least("objective.network_weight_decay", self.network_weight_decay, 0, "0 for none")
        check_at_least("objective.initial_accumulator", self.initial_accumulator, 0, "0 as torch.optim.Adagrad")
        check_at_least("objective.eps", self.eps, 0, "the default is 1e-6")


OBJECTIVES: dict[str, type[ObjectiveSettings]] = {
    "clip": CLIPSettings,
    "siglip": SigLIPSettings,
    "fastclip": FastCLIPSettings,
    "amorlip": AmorLIPSettings,
    "neuclip": NeuCLIPSettings,
}
