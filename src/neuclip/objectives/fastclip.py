"""FastCLIP: each sample's normalizer over the whole data set, as a moving average over its visits."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY

import torch
from torch import Tensor

from neuclip.objectives.contrast import Contrast, contrast
from neuclip.objectives.formulas import add_eps, gradient_only, ratio, robust_loss
from neuclip.objectives.objective import NoEstimate, Objective, objective
from neuclip.objectives.pairs import NOBODY, Pairs, gather_sides
from neuclip.objectives.state import ADAM_BETAS, ADAM_EPS, SampleTable
from neuclip.settings.objectives import FastCLIPSettings
from neuclip.settings.options import option

SMALLEST_PART = 1e-4  # of u, that g must be to be known after eps is taken off: float32 keeps log u to about 1e-6
LARGEST_GRADIENT = 5.0  # of an individual temperature, as FastCLIP's authors cap it
TEMPERATURES = (0.01, 1.0)  # the range of individual temperatures


@objective
class FastCLIP(Objective, FastCLIPSettings):
    """u_i <- (1 - gamma) u_i + gamma (eps + g_i) at each visit of sample i, per side; u_i estimates its normalizer.

    >>> objective = FastCLIP(dataset_size=3_000_000, total_samples=100_000_000)
    >>> loss = objective(image_features, text_features, logit_scale, sample_ids=ids)        # doctest: +SKIP

    | temperature | loss; its gradient in the features is that of g / u, u constant | gamma falls | gamma constant |
    | --- | --- | --- | --- |
    | global | tau (mean log u1 + mean log u2 + 2 rho), Eq. 1 | FastCLIP-v3 | - |
    | constant | tau (mean log u1 + mean log u2); `logit_scale` receives zero | FastCLIP-v1 | SogCLR |
    | individual | mean tau_i (log u_i + rho), both sides; tau_i is learnt here | FastCLIP-v2 | iSogCLR |

    Where the authors' codes differ from what they mean, the meaning holds: eps is inside u, individual temperatures
    move by Adam with moments per sample, everything is kept as logarithms. A sample twice in one batch is one visit
    with the mean of both values.
    """

    dataset_size: int = option(help="number of samples; `sample_ids` are 0..dataset_size-1", at_least=1)
    _: KW_ONLY
    epoch_samples: int = option(0, "samples of one pass over the data; 0: dataset_size", at_least=0)
    total_samples: int = option(0, "samples of the whole run: gamma falls over half of it", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        # log u of both sides; individual temperatures: tau, first and second moment of both sides, visits
        self.table = SampleTable(self.dataset_size, columns=9 if self.temperature == "individual" else 2)

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        stored = self.table.read(self._ids(pairs)).T  # (columns, B)
        ids = torch.where(pairs.sound, self._ids(pairs), NOBODY)  # of those that are visited
        tau_inside = self._tau_inside(pairs, tau, stored)
        batch = contrast(pairs, tau_inside)
        log_normalizer = add_eps(batch.log_g, self.eps)

        target = log_mean_by_id(ids, gather_sides(log_normalizer.detach()))  # (2, B)
        visited = ~stored[:2].isnan()
        renewed = self.renew(stored[:2], target) if self.training else stored[:2]
        row = torch.where(visited, renewed, target)
        log_u = row[:, pairs.local]
        if self.training:
            if self.temperature == "individual":
                row = torch.cat([row, self._step_temperatures(ids, batch, tau_inside, log_u, stored)])
            self.table.write(ids, row.T)

        self.record(accuracy=batch.accuracy, unvisited=1 - visited.to(tau.dtype).mean())
        self.record_normalizers(log_normalizer, stored[:2, pairs.local], log_u)
        term = log_u + gradient_only(ratio(log_normalizer, log_u))  # Eq. 4: log u, with the gradient of g / u
        if self.temperature == "global":
            return robust_loss(term, tau, self.rho)
        rho = self.rho if self.temperature == "individual" else 0.0
        return (tau_inside * (term + rho)).mean(dim=1).sum() + 0 * tau  # DDP wants every parameter in the graph

    def renew(self, log_u: Tensor, target: Tensor) -> Tensor:  # (2, B), (2, B) -> (2, B)
        """Eq. 3: log((1 - gamma) u + gamma exp(target))."""
        gamma = self.gamma_now()
        self.record(gamma=torch.tensor(gamma))
        if gamma == 1:
            return target
        return torch.logaddexp(log_u + math.log1p(-gamma), target + math.log(gamma))

    def gamma_now(self) -> float:
        """The weight of the next visit: 1 during the first pass over the data, except when constant."""
        if self.gamma_schedule == "constant":
            return self.gamma
        epoch, seen = self.epoch_samples or self.dataset_size, self.samples_seen
        end = self.gamma_decay_samples or self.total_samples // 2
        if seen < epoch:
            return 1.0
        if seen >= end:
            return self.gamma
        return self.gamma + (1 - self.gamma) * (1 + math.cos(math.pi * seen / end)) / 2

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:
        """log u as it is stored, of whatever age; NaN for samples never visited. u is a moving average of its own eps
        plus g: with a smaller one NaN also where g is too small a part of u to be read off it."""
        if self.temperature == "individual":
            raise NoEstimate("FastCLIP with individual temperatures: each sample's normalizer is at one of its own")
        if self.samples_seen == 0:
            raise NoEstimate("FastCLIP has visited no sample yet: call it once in train mode, or load its state")
        log_u = self.table.read(self._ids(pairs)).T[:, pairs.local]
        if eps == self.eps:
            return log_u
        u = log_u.double().exp()
        g = (u - self.eps).clamp(min=0)
        return torch.where((g > SMALLEST_PART * u) | (eps > self.eps), (eps + g).log(), math.nan).to(log_u.dtype)

    def _ids(self, pairs: Pairs) -> Tensor:  # (B,)
        if pairs.sample_ids is None:
            raise ValueError(
                "FastCLIP remembers each sample: pass sample_ids, the (batch,) numbers 0..dataset_size-1 of the pairs"
            )
        return pairs.sample_ids

    def _tau_inside(self, pairs: Pairs, tau: Tensor, stored: Tensor) -> Tensor:  # () or (2, b)
        if self.temperature == "individual":
            return stored[2:4, pairs.local].nan_to_num(nan=self.temperature_initial)
        if self.temperature == "constant":
            return tau.detach()
        return tau if self.temperature_gradient == "paper" else 2 * tau - tau.detach()  # has twice the gradient

    @torch.no_grad()
    def _step_temperatures(
        self, ids: Tensor, batch: Contrast, tau: Tensor, log_u: Tensor, stored: Tensor
    ) -> Tensor:  # (B,), ..., (2, b), (2, b), (9, B) -> (7, B)
        """Adam on tau_i (log u_i + rho), whose derivative is log u_i + rho - g_i / u_i mean_j (s_ij - s_ii) / tau_i."""
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


def groups(ids: Tensor) -> Tensor:  # (B,) -> (B,)
    """A number below B for each id, equal for equal ids; without waiting for the device, as `unique` would."""
    ordered, order = ids.sort()
    return torch.empty_like(ids).scatter_(0, order, ordered.diff(prepend=ordered[:1]).ne(0).cumsum(0))


def mean_by_id(ids: Tensor, values: Tensor) -> Tensor:  # (B,), (k, B) -> (k, B)
    """Columns of equal id all receive their mean."""
    group = groups(ids)
    total = torch.zeros_like(values).index_add_(1, group, values)
    return (total / torch.zeros_like(values).index_add_(1, group, torch.ones_like(values)))[:, group]


def log_mean_by_id(ids: Tensor, logs: Tensor) -> Tensor:  # (B,), (k, B) -> (k, B)
    """Columns of equal id all receive the logarithm of their mean: a sample twice in a batch has one normalizer."""
    group = groups(ids).expand_as(logs)
    peak = torch.full_like(logs, torch.finfo(logs.dtype).min).scatter_reduce(1, group, logs, "amax").gather(1, group)
    return peak + mean_by_id(ids, (logs - peak).exp()).log()
