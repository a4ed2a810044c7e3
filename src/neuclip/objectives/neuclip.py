"""NeuCLIP: log-normalizers over the whole data set, predicted by a small network trained in step with the encoders."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from neuclip.objectives.contrast import mean_normalizer_ratio
from neuclip.objectives.formulas import LARGEST_EXPONENT, calibration_ratio, capped_exponent, gradient_only
from neuclip.objectives.normalizers.mlp_network import MLPNetwork
from neuclip.objectives.normalizers.prototype_network import PrototypeNetwork
from neuclip.objectives.objective import NoEstimate, Objective
from neuclip.objectives.pairs import Both, Pairs, batch_log_normalizers
from neuclip.settings.objectives import NeuCLIPSettings


class NeuCLIP(Objective):
    """Algorithm 1 of the paper, with its defaults; `rho` depends on the data (6.5 on CC3M, 8.5 on CC12M, 11 on DFN).

    >>> objective = NeuCLIP(embed_dim=512)
    >>> loss = objective(image_features, text_features, model.logit_scale.exp())        # doctest: +SKIP
    >>> loss.backward()                                                                 # doctest: +SKIP

    Args:
        embed_dim: width d of the features.
        num_prototypes: prototypes per side, m.
        restart: "periodic" resets all prototypes every `restart_every` steps; "rolling" replaces the oldest with each
            batch, like a queue.
        restart_every: steps between restarts from fresh features, T_r; 0 fills once, at the start.
        inner_steps: updates of the network per call in train mode, T_u; 0 keeps the features as they were stored.
        rho: constant of the robust loss (Eq. 1); larger drives the temperature lower.
        eps: added to every normalizer, inside the logarithm.
        network: "prototypes", or "mlp" (ablation: random start, no restarts).
        fit: what the network minimises: "unified" is the loss itself (Eq. 12), "separate" the squared difference to
            the batch's log-normalizers (ablation).
        update: "alternating" (Algorithm 1), or "simultaneous" (Algorithm 3): one AdamW step beside the encoders'.
        network_optimizer, network_lr: None is adagrad, 1.0 for prototypes as in the paper, and adam, 1e-3 for the MLP
            and the simultaneous update.
        network_betas, network_eps: of adam; None is torch's, (0.9, 0.999) and 1e-8. Algorithm 3 is one AdamW for all:
            give the simultaneous update the encoders' rate, betas and eps, and set `learning_rate_factor`, their
            present rate over its peak, before each call. `neuclip train` does both.
        network_weight_decay: of that optimizer; decoupled under adam, as AdamW has it.
        initial_accumulator: initial value of AdaGrad's sums of squared gradients.
        alpha_gradient: "full" is the gradient of Eq. 12 as it stands; "detached" leaves out the part through alpha.
        temperature_gradient: "paper"; "fastclip" counts the part through the similarities twice, as FastCLIP's code.
        reset_optimizer_at_restart: the optimizer forgets the slots being overwritten; rolling always does.
        mask_own_positive: leave an anchor's own partner out of its mean where it is among the prototypes.
        mask_duplicates: pairs with an equal caption are no negatives of each other (`caption_ids`).
    """

    needs = ("embed_dim",)
    metric_names = (
        *Objective.metric_names,
        *("calibration_image", "calibration_text", "calibration_after"),
        *("log_ratio_mean", "log_ratio_deviation", "mean_log_normalizer_image", "mean_log_normalizer_text"),
        *("share_at_eps", "capped"),
    )

    def __init__(
        self,
        embed_dim: int,
        *,
        num_prototypes: int = NeuCLIPSettings.num_prototypes,
        restart: Literal["periodic", "rolling"] = NeuCLIPSettings.restart,
        restart_every: int = NeuCLIPSettings.restart_every,
        inner_steps: int = NeuCLIPSettings.inner_steps,
        rho: float = NeuCLIPSettings.rho,
        eps: float = NeuCLIPSettings.eps,
        network: Literal["prototypes", "mlp"] = NeuCLIPSettings.network,
        fit: Literal["unified", "separate"] = NeuCLIPSettings.fit,
        update: Literal["alternating", "simultaneous"] = NeuCLIPSettings.update,
        network_optimizer: Literal["adagrad", "adam", "sgd"] | None = NeuCLIPSettings.network_optimizer,
        network_lr: float | None = NeuCLIPSettings.network_lr,
        network_betas: tuple[float, float] | None = NeuCLIPSettings.network_betas,
        network_eps: float | None = NeuCLIPSettings.network_eps,
        network_weight_decay: float = NeuCLIPSettings.network_weight_decay,
        initial_accumulator: float = NeuCLIPSettings.initial_accumulator,
        alpha_gradient: Literal["full", "detached"] = NeuCLIPSettings.alpha_gradient,
        temperature_gradient: Literal["paper", "fastclip"] = NeuCLIPSettings.temperature_gradient,
        reset_optimizer_at_restart: bool = NeuCLIPSettings.reset_optimizer_at_restart,
        mask_own_positive: bool = NeuCLIPSettings.mask_own_positive,
        mask_duplicates: bool = NeuCLIPSettings.mask_duplicates,
    ) -> None:
        super().__init__(embed_dim, mask_duplicates=mask_duplicates)
        self.settings = NeuCLIPSettings.from_arguments(locals())
        kind = MLPNetwork if self.settings.network == "mlp" else PrototypeNetwork
        self.network: PrototypeNetwork | MLPNetwork = kind(embed_dim, self.settings)

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        simultaneous = self.settings.update == "simultaneous"
        self.network.reshard()
        log_normalizer = batch_log_normalizers(pairs, tau, self.settings.eps)
        self.record_accuracy(pairs)
        self._measure_calibration(pairs, log_normalizer, tau)
        if self.training:
            self.network.restart(pairs)
        if self.training and not simultaneous:
            self.network.learn(pairs, log_normalizer, tau)
        loss = self._robust_loss(pairs, log_normalizer, tau)
        if self.training and simultaneous:  # after the encoders' gradient was taken with the same network
            self.network.learn(pairs, log_normalizer, tau, self.learning_rate_factor)
        return loss

    def _robust_loss(self, pairs: Pairs, log_normalizer: Both, tau: Tensor) -> Tensor:
        """Eq. 12: tau * mean(exp(log_normalizer - alpha) + alpha), summed over both sides, plus 2 tau (rho - 1).

        With r = exp(log_normalizer - alpha) its gradient has three parts: the bracket times that of the factor tau;
        tau times that of mean g / nu, nu = exp(alpha) held constant; and tau times mean (1 - r) of alpha's.
        """
        # "fastclip": a temperature of the same value and twice the gradient, everywhere but in the factor in front.
        inner_tau = tau if self.settings.temperature_gradient == "paper" else tau.detach() + gradient_only(2 * tau)
        alpha = self._alpha(pairs, inner_tau, log_normalizer)
        bracket, alpha_terms, held_log_nu = tau.new_zeros(()), tau.new_zeros(()), []
        for log_z, a in zip(log_normalizer, alpha, strict=True):
            ratio = torch.exp(capped_exponent(log_z, a.detach()))
            bracket = bracket + (ratio + a.detach()).mean()
            alpha_terms = alpha_terms + ((1 - ratio) * a).mean()
            held_log_nu.append(torch.maximum(a.detach(), log_z - LARGEST_EXPONENT[tau.dtype]))  # capped like the ratio
        bracket = bracket + 2 * (self.settings.rho - 1)
        log_nu = (held_log_nu[0], held_log_nu[1])
        gradient_terms = mean_normalizer_ratio(pairs, inner_tau, log_nu) + alpha_terms
        self.record_weight_deviation(log_normalizer, log_nu)
        self._record_normalizers(log_normalizer, alpha)
        return tau * bracket + tau.detach() * gradient_only(gradient_terms)

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float | None = None) -> Both:
        self.network.reshard()
        if not self.network.ready:
            raise NoEstimate("NeuCLIP has no prototypes yet: call it once in train mode, or load its state")
        return self.network.alpha(pairs, tau, written=False, gradient=False, eps=eps)

    def restart_steps(self, batch_size: int) -> range:
        return self.network.restart_steps(batch_size)

    def _alpha(self, pairs: Pairs, tau: Tensor, log_normalizer: Both) -> Both:
        """Eq. 10 and 11: the network's prediction; before anything is stored, the batch's own log-normalizers."""
        if not self.network.ready:
            return log_normalizer
        return self.network.alpha(pairs, tau, written=self.training, gradient=self.settings.alpha_gradient == "full")

    @torch.no_grad()
    def _measure_calibration(self, pairs: Pairs, log_normalizer: Both, tau: Tensor) -> None:
        """Before restart and inner steps, when the batch is new to the network: the mean ratio is then 1 in expectation
        if the prediction is right."""
        if not self.network.ready:
            self.record_calibration(None)
            return
        alpha = self.network.alpha(pairs, tau, written=False, gradient=False)
        image, text = (calibration_ratio(log_z, a).mean() for log_z, a in zip(log_normalizer, alpha, strict=True))
        self.record_calibration((image, text))
        error = torch.stack(log_normalizer) - torch.stack(alpha)
        self.record(log_ratio_mean=error.mean(), log_ratio_deviation=error.std(correction=0))

    @torch.no_grad()
    def _record_normalizers(self, log_normalizer: Both, alpha: Both) -> None:
        eps = self.settings.eps
        exponent = torch.stack(log_normalizer) - torch.stack(alpha)
        above_floor = torch.stack(log_normalizer) - (math.log(eps) if eps else -math.inf)
        largest = LARGEST_EXPONENT[exponent.dtype]
        self.record(
            calibration_after=torch.exp(exponent.clamp(max=largest)).mean(),
            mean_log_normalizer_image=alpha[0].mean(),
            mean_log_normalizer_text=alpha[1].mean(),
            share_at_eps=(above_floor < 1).float().mean(),  # within a factor e of the floor, eps decides, not the data
            capped=(exponent > largest).float().sum(),
        )
