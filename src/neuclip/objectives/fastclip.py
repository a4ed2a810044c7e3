"""FastCLIP: each sample's normalizer over the whole data set is a moving average over its visits."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY

import torch
from torch import Tensor

from neuclip.objectives.contrast import Contrast
from neuclip.objectives.formulas import ratio
from neuclip.objectives.objective import NoEstimate, objective
from neuclip.objectives.pairs import Pairs, gather_sides
from neuclip.objectives.state import ADAM_BETAS, ADAM_EPS
from neuclip.objectives.table import TableObjective, mean_by_id
from neuclip.settings.objectives import FastCLIPSettings
from neuclip.settings.options import option

LARGEST_GRADIENT = 5.0  # of an individual temperature; larger ones are clipped, as by FastCLIP's authors
TEMPERATURES = (0.01, 1.0)  # the range of individual temperatures


@objective
class FastCLIP(TableObjective, FastCLIPSettings):
    """u_i <- (1 - gamma) u_i + gamma (eps + g_i) at each visit of sample i, per side; u_i estimates its normalizer.

    >>> objective = FastCLIP(dataset_size=3_000_000, total_samples=100_000_000)
    >>> loss = objective(image_features, text_features, logit_scale, sample_ids=ids)        # doctest: +SKIP

    | temperature | loss; its gradient in the features is that of g / u, u constant | gamma falls | gamma constant |
    | --- | --- | --- | --- |
    | global | tau (mean log u1 + mean log u2 + 2 rho), Eq. 1 | FastCLIP-v3 | - |
    | constant | tau (mean log u1 + mean log u2); `logit_scale` receives zero | FastCLIP-v1 | SogCLR |
    | individual | mean tau_i (log u_i + rho), both sides; tau_i is learnt here | FastCLIP-v2 | iSogCLR |

    Where the authors' code differs from their papers, this class follows the papers: eps is inside u, individual
    temperatures move by Adam with moments per sample, and u is stored as a logarithm. If a sample is twice in a batch,
    this is one visit with the mean of both values.
    """

    dataset_size: int = option(help="number of samples; `sample_ids` are 0..dataset_size-1", at_least=1)
    _: KW_ONLY
    epoch_samples: int = option(0, "samples of one pass over the data; 0: dataset_size", at_least=0)
    total_samples: int = option(0, "samples of the whole run: gamma falls over half of it", at_least=0)

    def columns(self) -> int:
        """Columns of the table: log u of both sides; with individual temperatures also tau, first and second moment of
        both sides, and the number of visits."""
        return 9 if self.temperature == "individual" else 2

    def renew(self, log_u: Tensor, target: Tensor) -> Tensor:  # (2, B), (2, B) -> (2, B)
        """Eq. 3: log((1 - gamma) u + gamma exp(target))."""
        gamma = self.gamma_now()
        self.record(gamma=torch.tensor(gamma))
        if gamma == 1:
            return target
        return torch.logaddexp(log_u + math.log1p(-gamma), target + math.log(gamma))

    def gamma_now(self) -> float:
        """The weight of the next visit. Unless gamma is constant, it is 1 during the first pass over the data."""
        if self.gamma_schedule == "constant":
            return self.gamma
        epoch, seen = self.epoch_samples or self.dataset_size, self.samples_seen
        end = self.gamma_decay_samples or self.total_samples // 2
        if seen < epoch:
            return 1.0
        if seen >= end:
            return self.gamma
        return self.gamma + (1 - self.gamma) * (1 + math.cos(math.pi * seen / end)) / 2

    def inner_tau(self, pairs: Pairs, tau: Tensor, stored: Tensor) -> Tensor:  # () or (2, b)
        if self.temperature == "individual":
            return stored[2:4, pairs.local].nan_to_num(nan=self.temperature_initial)
        if self.temperature == "constant":
            return tau.detach()
        return tau if self.temperature_gradient == "paper" else 2 * tau - tau.detach()  # has twice the gradient

    def total(self, term: Tensor, tau: Tensor, tau_inside: Tensor) -> Tensor:
        if self.temperature == "global":
            return super().total(term, tau, tau_inside)
        rho = self.rho if self.temperature == "individual" else 0.0
        return (tau_inside * (term + rho)).mean(dim=1).sum() + 0 * tau  # DDP needs every parameter in the graph

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:
        if self.temperature == "individual":
            raise NoEstimate(
                f"{self.title} with individual temperatures: each sample's normalizer is at a temperature of its own"
            )
        return super().estimates(pairs, tau, eps)

    @torch.no_grad()
    def other_columns(
        self, ids: Tensor, batch: Contrast, tau: Tensor, log_u: Tensor, stored: Tensor
    ) -> Tensor:  # (B,), ..., (2, b), (2, b), (9, B) -> (7, B)
        """Take an Adam step on tau_i (log u_i + rho).

        Its derivative is log u_i + rho - g_i / u_i mean_j (s_ij - s_ii) / tau_i.
        """
        if self.temperature != "individual":
            return stored[2:]
        gradient = log_u + self.rho - ratio(batch.log_g, log_u) * batch.mean_excess / tau
        gradient = mean_by_id(ids, gather_sides(gradient)).clamp(-LARGEST_GRADIENT, LARGEST_GRADIENT)
        before = stored[2:4].nan_to_num(nan=self.temperature_initial)
        first, second, visits = stored[4:].nan_to_num(nan=0.0).split([2, 2, 1])
        beta1, beta2 = ADAM_BETAS
        visits, first, second = visits + 1, first.lerp(gradient, 1 - beta1), second.lerp(gradient.square(), 1 - beta2)
        step = first / (1 - beta1**visits) / ((second / (1 - beta2**visits)).sqrt() + ADAM_EPS)
        moved = (before - self.temperature_lr * step).clamp(*TEMPERATURES)
        self.record(mean_temperature_image=moved[0].mean(), mean_temperature_text=moved[1].mean())
        return torch.cat([moved, first, second, visits])
