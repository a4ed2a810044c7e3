"""One dataclass per objective: its fields, their defaults (the paper's) and what each means.

The objective classes take their own defaults from here, so a number is never written twice.
Every field's metadata `help` is what `neuclip train --help` prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from neuclip.settings.fields import check_at_least, check_positive, described


@dataclass(frozen=True, kw_only=True)
class CLIPSettings:
    """The batch is its own normalizer: softmax as in open_clip, or the paper's mini-batch form."""

    form: Literal["openclip", "minibatch"] = described(
        "openclip", "open_clip's cross-entropy; minibatch: the robust loss (Eq. 1) with the batch as the data set"
    )
    rho: float = described(6.5, "minibatch: the robust loss's constant; above log(batch - 1) tau only falls")
    eps: float = described(1e-6, "minibatch: added to each normalizer; openclip: only where normalizers are reported")

    def __post_init__(self) -> None:
        check_at_least("objective.eps", self.eps, 0, "the default is 1e-6")


@dataclass(frozen=True, kw_only=True)
class NeuCLIPSettings:
    """Log-normalizers over the whole data set, predicted by two small networks of prototypes."""

    num_prototypes: int = described(4096, "prototypes per side (m in the paper)")
    restart_every: int = described(500, "steps between restarts of the prototypes; 0: only at the start (T_r)")
    inner_steps: int = described(10, "updates of the prototypes per batch (T_u)")
    rho: float = described(6.5, "the robust loss's constant: larger drives the temperature lower")
    eps: float = described(1e-6, "added to each normalizer, inside the logarithm")
    network_lr: float = described(1.0, "AdaGrad's rate for the prototypes")
    network_weight_decay: float = described(0.0, "AdaGrad's weight decay for the prototypes")
    initial_accumulator: float = described(0.0, "what AdaGrad's sums of squared gradients start from")
    alpha_gradient: Literal["full", "detached"] = described(
        "full", "whether the towers also receive the gradient through the predicted normalizer"
    )
    reset_optimizer_at_restart: bool = described(False, "clear AdaGrad's sums of the slots a restart overwrites")

    def __post_init__(self) -> None:
        check_at_least("objective.num_prototypes", self.num_prototypes, 1, "the paper uses 4096")
        check_at_least("objective.restart_every", self.restart_every, 0, "0 restarts only at the start")
        check_at_least("objective.inner_steps", self.inner_steps, 0, "the paper uses 10")
        check_positive("objective.network_lr", self.network_lr, "the paper uses 1.0")
        check_at_least("objective.network_weight_decay", self.network_weight_decay, 0, "0 for none")
        check_at_least("objective.initial_accumulator", self.initial_accumulator, 0, "0 as torch.optim.Adagrad")
        check_at_least("objective.eps", self.eps, 0, "the default is 1e-6")


OBJECTIVES: dict[str, type] = {"clip": CLIPSettings, "neuclip": NeuCLIPSettings}
