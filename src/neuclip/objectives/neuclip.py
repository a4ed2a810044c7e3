"""NeuCLIP: log-normalizers over the whole data set, predicted by a small network trained in step with the towers."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from neuclip.objectives.contrast import mean_normalizer_ratio
from neuclip.objectives.formulas.conjugate import LARGEST_EXPONENT, calibration_ratio
from neuclip.objectives.normalizers.mlp_network import MLPNetwork
from neuclip.objectives.normalizers.prototype_network import PrototypeNetwork
from neuclip.objectives.objective import NoEstimate, Objective
from neuclip.objectives.pairs import Both, Pairs, batch_log_normalizers
from neuclip.settings.objectives import NeuCLIPSettings


class NeuCLIP(Objective):
    """Algorithm 1. Defaults are the paper's; `rho` depends on the data (6.5 on CC3M, 8.5 on CC12M, 11 on DFN).

    >>> objective = NeuCLIP(embed_dim=512)
    >>> loss = objective(image_features, text_features, model.logit_scale.exp())        # doctest: +SKIP
    >>> loss.backward()                                                                 # doctest: +SKIP

    Args:
        embed_dim: width d of the features.
        num_prototypes: prototypes per side, m.
        restart: "periodic" renews all prototypes every `restart_every` steps; "rolling" renews the oldest with each
            batch, so that they are a living queue.
        restart_every: steps between restarts from fresh features, T_r; 0 fills once, at the start.
        inner_steps: updates of the network per call in train mode, T_u; 0 leaves the features as they were stored.
        rho: constant of the robust loss (Eq. 1); larger drives the temperature lower.
        eps: added to every normalizer, inside the logarithm.
        network: "prototypes", or "mlp" (ablation: random start, no restarts).
        fit: what the network minimises: "unified" is the loss itself (Eq. 12), "separate" the squared difference to
            the batch's log-normalizers (ablation).
        update: "alternating" (Algorithm 1), or "simultaneous" (Algorithm 3): one AdamW step beside the towers'.
        network_optimizer, network_lr: None is adagrad, 1.0 for prototypes as in the paper, and adam, 1e-3 for the MLP
            and the simultaneous update.
        network_weight_decay, initial_accumulator: of that optimizer; AdaGrad's sums start from the second.
        alpha_gradient: "full" is the gradient of Eq. 12 as it stands; "detached" leaves out the part through alpha.
        temperature_gradient: "paper"; "fastclip" counts the part through the similarities twice, as FastCLIP's code.
        reset_optimizer_at_restart: the optimizer forgets the slots being overwritten; rolling always does.
        mask_own_positive: leave an anchor's own partner out of its mean where it is among the prototypes.
        mask_duplicates: pairs with an equal caption are no negatives of each other (`caption_ids`).
    """

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
        network_weight_decay: float = NeuCLIPSettings.network_weight_decay,
        initial_accumulator: float = NeuCLIPSettings.initial_accumulator,
        alpha_gradient: Literal["full", "detached"] = NeuCLIPSettings.alpha_gradient,
        temperature_gradient: Literal["paper", "fastclip"] = NeuCLIPSettings.temperature_gradient,
        reset_optimizer_at_restart: bool = NeuCLIPSettings.reset_optimizer_at_restart,
        mask_own_positive: bool = NeuCLIPSettings.mask_own_positive,
        mask_duplicates: bool = NeuCLIPSettings.mask_duplicates,
    ) -> None:
        super().__init__(embed_dim, mask_duplicates=mask_duplicates)
        self.rho, self.eps, self.update = rho, eps, update
        self.alpha_gradient, self.temperature_gradient = alpha_gradient, temperature_gradient
        gentle = network == "mlp" or update == "simultaneous"
        self.network_optimizer = network_optimizer or ("adam" if gentle else "adagrad")
        self.network_lr = network_lr or (1e-3 if self.network_optimizer == "adam" else 1.0)
        learning: dict[str, Any] = {
            "eps": eps,
            "fit": fit,
            "inner_steps": inner_steps if update == "alternating" else 1,
            "optimizer": self.network_optimizer,
            "learning_rate": self.network_lr,
            "weight_decay": network_weight_decay,
            "initial_accumulator": initial_accumulator,
        }
        self.network: PrototypeNetwork | MLPNetwork
        if network == "mlp":
            self.network = MLPNetwork(embed_dim, **learning)
        else:
            self.network = PrototypeNetwork(
                num_prototypes,
                embed_dim,
                restart=restart,
                restart_every=restart_every if update == "alternating" else 0,
                reset_at_restart=reset_optimizer_at_restart,
                mask_own_positive=mask_own_positive,
                mask_duplicates=mask_duplicates,
                **learning,
            )

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        self.network.reshard()
        log_normalizer = batch_log_normalizers(pairs, tau, self.eps)
        self._note_accuracy(pairs)
        self._note_calibration(pairs, log_normalizer, tau)
        if self.training:
            self.network.restart(pairs)
        if self.training and self.update == "alternating":
            self.network.learn(pairs, log_normalizer, tau)
        loss = self._robust_loss(pairs, log_normalizer, tau)
        if self.training and self.update == "simultaneous":  # after the towers' gradient has seen the same network
            self.network.learn(pairs, log_normalizer, tau)
        return loss

    def _robust_loss(self, pairs: Pairs, log_normalizer: Both, tau: Tensor) -> Tensor:
        """Eq. 12: tau * mean(r + alpha), r = exp(log-normalizer - alpha), both sides, plus 2 tau (rho - 1).

        Its gradient has three parts: through tau itself, through r at constant alpha, and through alpha.
        """
        # "fastclip": a temperature of the same value whose gradient counts twice, but for the factor in front.
        inside = tau if self.temperature_gradient == "paper" else 2 * tau - tau.detach()
        alpha = self._alpha(pairs, inside, log_normalizer)
        ratio = [calibration_ratio(l, a.detach()) for l, a in zip(log_normalizer, alpha, strict=True)]
        value = sum((r + a.detach()).mean() for r, a in zip(ratio, alpha, strict=True)) + 2 * (self.rho - 1)
        largest = LARGEST_EXPONENT[tau.dtype]
        believed = [torch.maximum(a.detach(), l - largest) for l, a in zip(log_normalizer, alpha, strict=True)]
        self._note_weights(log_normalizer, (believed[0], believed[1]))
        through_ratio = mean_normalizer_ratio(pairs, inside, (believed[0], believed[1]))
        through_alpha = sum(((1 - r) * a).mean() for r, a in zip(ratio, alpha, strict=True))
        through = through_ratio + through_alpha
        self._note_normalizers(log_normalizer, alpha)
        return tau * value + tau.detach() * (through - through.detach())

    def estimates(self, pairs: Pairs, tau: Tensor) -> Both:
        self.network.reshard()
        if not self.network.ready:
            raise NoEstimate("NeuCLIP has no prototypes yet: call it once in train mode, or load its state")
        return self.network.alpha(pairs, tau, written=False, gradient=False)

    def _alpha(self, pairs: Pairs, tau: Tensor, log_normalizer: Both) -> Both:
        """The network's prediction; before anything is stored, the batch's own log-normalizers."""
        if not self.network.ready:
            return log_normalizer
        return self.network.alpha(pairs, tau, written=self.training, gradient=self.alpha_gradient == "full")

    @torch.no_grad()
    def _note_calibration(self, pairs: Pairs, log_normalizer: Both, tau: Tensor) -> None:
        """Before restart and inner steps the batch is new to the network: the mean ratio is then 1 in expectation
        where the prediction is right."""
        if not self.network.ready:
            self._metrics.note(calibration=None, calibration_image=None, calibration_text=None)
            return
        alpha = self.network.alpha(pairs, tau, written=False, gradient=False)
        image, text = (calibration_ratio(l, a).mean() for l, a in zip(log_normalizer, alpha, strict=True))
        error = torch.stack([l - a for l, a in zip(log_normalizer, alpha, strict=True)])
        self._metrics.note(
            calibration=(image + text) / 2,
            calibration_image=image,
            calibration_text=text,
            log_ratio_mean=error.mean(),
            log_ratio_deviation=error.std(correction=0),
        )

    @torch.no_grad()
    def _note_normalizers(self, log_normalizer: Both, alpha: Both) -> None:
        exponent = torch.stack([l - a for l, a in zip(log_normalizer, alpha, strict=True)])
        floor = torch.stack(log_normalizer) - (math.log(self.eps) if self.eps else -math.inf)
        largest = LARGEST_EXPONENT[exponent.dtype]
        self._metrics.note(
            calibration_after=torch.exp(exponent.clamp(max=largest)).mean(),
            mean_log_normalizer_image=alpha[0].mean(),
            mean_log_normalizer_text=alpha[1].mean(),
            share_at_eps=(floor < 1).float().mean(),  # within a factor e of the floor, eps decides, not the data
            capped=(exponent > largest).float().sum(),
        )
