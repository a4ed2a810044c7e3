"""NeuCLIP: log-normalizers over the whole data set, predicted by prototypes trained in step with the towers."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from neuclip.distributed import gather_values
from neuclip.objectives.formulas.conjugate import LARGEST_EXPONENT, calibration_ratio, unified_objective
from neuclip.objectives.normalizers.inner_loop import adagrad_step, prototype_gradient
from neuclip.objectives.normalizers.prototypes import Prototypes, Refill
from neuclip.objectives.objective import NoEstimate, Objective
from neuclip.objectives.pairs import Pairs, batch_log_normalizers
from neuclip.settings.objectives import NeuCLIPSettings


class NeuCLIP(Objective):
    """Algorithm 1. Defaults are the paper's; `rho` depends on the data (6.5 on CC3M, 8.5 on CC12M, 11 on DFN).

    >>> objective = NeuCLIP(embed_dim=512)
    >>> loss = objective(image_features, text_features, model.logit_scale.exp())        # doctest: +SKIP
    >>> loss.backward()                                                                 # doctest: +SKIP

    Args:
        embed_dim: width d of the features.
        num_prototypes: prototypes per side, m.
        restart_every: steps between restarts from fresh features, T_r; 0 fills once, at the start.
        inner_steps: prototype updates per call in train mode, T_u.
        rho: constant of the robust loss (Eq. 1); larger drives the temperature lower.
        eps: added to every normalizer, inside the logarithm.
        network_lr, network_weight_decay, initial_accumulator: AdaGrad on the prototypes.
        alpha_gradient: "full" is the gradient of Eq. 12 as it stands; "detached" leaves out the part through alpha.
        reset_optimizer_at_restart: also clear AdaGrad's sums of the slots being overwritten.
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        num_prototypes: int = NeuCLIPSettings.num_prototypes,
        restart_every: int = NeuCLIPSettings.restart_every,
        inner_steps: int = NeuCLIPSettings.inner_steps,
        rho: float = NeuCLIPSettings.rho,
        eps: float = NeuCLIPSettings.eps,
        network_lr: float = NeuCLIPSettings.network_lr,
        network_weight_decay: float = NeuCLIPSettings.network_weight_decay,
        initial_accumulator: float = NeuCLIPSettings.initial_accumulator,
        alpha_gradient: Literal["full", "detached"] = NeuCLIPSettings.alpha_gradient,
        reset_optimizer_at_restart: bool = NeuCLIPSettings.reset_optimizer_at_restart,
    ) -> None:
        super().__init__(embed_dim)
        self.inner_steps = inner_steps
        self.rho = rho
        self.eps = eps
        self.network_lr = network_lr
        self.network_weight_decay = network_weight_decay
        self.alpha_gradient = alpha_gradient
        self.reset_optimizer_at_restart = reset_optimizer_at_restart
        self.prototypes_for_image = Prototypes(num_prototypes, embed_dim, initial_accumulator)
        self.prototypes_for_text = Prototypes(num_prototypes, embed_dim, initial_accumulator)
        self.refill = Refill(num_prototypes, restart_every)

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        by_image, by_text = pairs.similarities()
        target = batch_log_normalizers(by_image, by_text, pairs, tau=tau, eps=self.eps)
        self._note_accuracy(by_image, pairs)
        self._note_calibration(pairs, target, tau)
        if self.training:
            self._restart(pairs)
            self._learn(pairs, target, tau)
        alpha = self._alpha(pairs, tau) if self.refill.active else target
        if self.alpha_gradient == "detached" or not self.refill.active:
            alpha = alpha[0].detach(), alpha[1].detach()
        self._note_normalizers(target, alpha)
        return unified_objective(target, alpha, tau=tau, rho=self.rho)

    def estimates(self, pairs: Pairs, tau: Tensor) -> tuple[Tensor, Tensor]:
        if not self.refill.active:
            raise NoEstimate("NeuCLIP has no prototypes yet: call it once in train mode, or load its state")
        return self._alpha(pairs, tau)

    def _alpha(self, pairs: Pairs, tau: Tensor) -> tuple[Tensor, Tensor]:  # (b,), (b,)
        active, eps = self.refill.active, self.eps
        return (
            self.prototypes_for_image.alpha(pairs.image, pairs.positive, active=active, tau=tau, eps=eps),
            self.prototypes_for_text.alpha(pairs.text, pairs.positive, active=active, tau=tau, eps=eps),
        )

    @torch.no_grad()
    def _restart(self, pairs: Pairs) -> None:
        """Algorithm 1, lines 3-4: prototypes for images come from texts, prototypes for texts from images."""
        renewal = self.refill.advance(len(pairs.all_image))
        if renewal is None:
            return
        slots, rows = (index.to(pairs.image.device) for index in renewal)
        reset = self.reset_optimizer_at_restart
        self.prototypes_for_image.write(slots, pairs.all_text[rows], reset_sums=reset)
        self.prototypes_for_text.write(slots, pairs.all_image[rows], reset_sums=reset)

    @torch.no_grad()
    def _learn(self, pairs: Pairs, target: tuple[Tensor, Tensor], tau: Tensor) -> None:
        """Algorithm 1, lines 6-8: features, log-normalizers and temperature of the global batch held constant."""
        positive, *targets = gather_values(torch.stack([pairs.positive, *target], dim=1)).unbind(dim=1)
        sides = ((self.prototypes_for_image, pairs.all_image), (self.prototypes_for_text, pairs.all_text))
        for (prototypes, anchors), target_of_side in zip(sides, targets, strict=True):
            rows, sums = prototypes.rows[: self.refill.active], prototypes.sums[: self.refill.active]
            for _ in range(self.inner_steps):
                gradient = prototype_gradient(rows, anchors, positive, target_of_side, tau=tau, eps=self.eps)
                adagrad_step(
                    rows, sums, gradient, learning_rate=self.network_lr, weight_decay=self.network_weight_decay
                )

    @torch.no_grad()
    def _note_calibration(self, pairs: Pairs, target: tuple[Tensor, Tensor], tau: Tensor) -> None:
        """Before restart and inner steps the batch is new to the prototypes: the mean ratio is then 1 in expectation
        where the prediction is right."""
        if not self.refill.active:
            self._metrics.note(calibration=None, calibration_image=None, calibration_text=None)
            return
        alpha = self._alpha(pairs, tau)
        image, text = (calibration_ratio(t, a).mean() for t, a in zip(target, alpha, strict=True))
        error = torch.stack([t - a for t, a in zip(target, alpha, strict=True)])
        self._metrics.note(
            calibration=(image + text) / 2,
            calibration_image=image,
            calibration_text=text,
            log_ratio_mean=error.mean(),
            log_ratio_deviation=error.std(correction=0),
        )

    @torch.no_grad()
    def _note_normalizers(self, target: tuple[Tensor, Tensor], alpha: tuple[Tensor, Tensor]) -> None:
        exponent = torch.stack([t - a for t, a in zip(target, alpha, strict=True)])
        floor = torch.stack(target) - (math.log(self.eps) if self.eps else -math.inf)
        self._metrics.note(
            calibration_after=torch.exp(exponent.clamp(max=LARGEST_EXPONENT[exponent.dtype])).mean(),
            mean_log_normalizer_image=alpha[0].mean(),
            mean_log_normalizer_text=alpha[1].mean(),
            share_at_eps=(floor < 1).float().mean(),  # within a factor e of the floor, eps decides, not the data
            capped=(exponent > LARGEST_EXPONENT[exponent.dtype]).float().sum(),
        )

    def get_extra_state(self) -> dict[str, int]:
        return self.refill.state()

    def set_extra_state(self, state: Any) -> None:
        self.refill.load_state(state)
