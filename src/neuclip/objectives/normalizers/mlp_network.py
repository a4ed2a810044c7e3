"""The ablation's network: one residual MLP per side in place of prototypes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neuclip.objectives.formulas import add_eps, calibration_ratio
from neuclip.objectives.normalizers.residual_mlp import Loss, ResidualMLP, step_together
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from neuclip.objectives.pairs import Both, Pairs
from neuclip.settings.objectives import NeuCLIPSettings


class MLPNetwork(nn.Module):
    """alpha = log(eps + exp(MLP(e) - s_ii / tau)): where eps is negligible the log-normalizer splits into a function of
    the anchor and its positive, and a network of one feature cannot know the second.

    Starts from random weights and is never restarted, as in the paper's ablation. It has the methods of
    `PrototypeNetwork`.
    """

    ready = True

    def __init__(self, embed_dim: int, settings: NeuCLIPSettings):
        super().__init__()
        self.eps, self.fit, self.inner_steps = settings.eps, settings.fit, settings.network_updates
        optimizer = RowOptimizer.of(settings)
        self.for_image, self.for_text = (ResidualMLP(embed_dim, optimizer=optimizer, seed=seed) for seed in (0, 1))

    def reshard(self) -> None:
        """Small enough to be whole on every rank."""

    def restart(self, pairs: Pairs) -> None:
        """Features cannot become weights of an MLP."""

    def learn(self, pairs: Pairs, log_normalizer: Both, tau: Tensor, rate_factor: float = 1.0) -> None:
        """Algorithm 1, lines 6-8; the gradient is averaged over ranks."""
        losses = [self._loss(pairs.positive.detach(), target, tau.detach()) for target in log_normalizer]
        for _ in range(self.inner_steps):
            step_together(
                [(self.for_image, pairs.image, losses[0]), (self.for_text, pairs.text, losses[1])],
                rate_factor=rate_factor,
            )

    def _loss(self, positive: Tensor, log_normalizer: Tensor, tau: Tensor) -> Loss:
        def loss(output: Tensor) -> Tensor:  # (b,) -> scalar
            alpha = add_eps(output - positive / tau, self.eps)
            if self.fit == "unified":  # Eq. 12
                return tau * (calibration_ratio(log_normalizer, alpha) + alpha).mean()
            return (alpha - log_normalizer).square().mean() / 2

        return loss

    def restart_steps(self, batch_size: int) -> range:
        return range(0)

    def alpha(
        self, pairs: Pairs, tau: Tensor, *, written: bool, gradient: bool, eps: float | None = None
    ) -> Both:  # (b,), (b,)
        eps = self.eps if eps is None else eps
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            share = pairs.positive / tau
            image, text = self.for_image(pairs.image), self.for_text(pairs.text)
            return add_eps(image - share, eps), add_eps(text - share, eps)
