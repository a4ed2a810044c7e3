"""FastCLIP: each sample's normalizer over the whole data set, as a moving average over its visits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from neuclip.distributed.collectives import gather_values
from neuclip.objectives.contrast import mean_normalizer_ratio
from neuclip.objectives.formulas import LARGEST_EXPONENT, calibration_ratio, gradient_only
from neuclip.objectives.normalizers.table import SampleTable
from neuclip.objectives.objective import NoEstimate, Objective
from neuclip.objectives.pairs import Both, Pairs, batch_log_normalizers
from neuclip.settings.fields import check_at_least
from neuclip.settings.objectives import FastCLIPSettings

# Of u, that g must be to be known after eps is taken off: float32 keeps log u to about 1e-6.
SMALLEST_PART = 1e-4


class FastCLIP(Objective):
    """u_i <- (1 - gamma) u_i + gamma (eps + g_i) at each visit of sample i, per side; u_i estimates its normalizer.

    >>> objective = FastCLIP(dataset_size=3_000_000, total_samples=100_000_000)
    >>> loss = objective(image_features, text_features, logit_scale, sample_ids=ids)        # doctest: +SKIP

    | variant | loss; its gradient in the features is that of g / u, u constant | temperature |
    | --- | --- | --- |
    | v3 | tau (mean log u1 + mean log u2 + 2 rho), Eq. 1 | global, learnt by the caller's optimizer |
    | v0 | mean log u1 + mean log u2 | the same |
    | v1, sogclr | tau (mean log u1 + mean log u2) | global, constant: `logit_scale` receives zero |
    | v2, isogclr | mean tau_i (log u_i + rho), both sides | one per sample and side, learnt here; no `logit_scale` |

    sogclr and isogclr are v1 and v2 with a constant gamma; isogclr moves its temperatures by plain momentum as LibAUC
    does, v2 by Adam with moments per sample. Where the authors' codes differ from what they mean, the meaning holds:
    the factor tau_i of v2's gradient is there, Adam divides by the root of its second moment, eps is inside u, and
    everything is kept as logarithms. A sample twice in one batch is one visit with the mean of both values.

    Args:
        dataset_size: number of samples; `sample_ids` are 0..dataset_size-1.
        epoch_samples: samples of one pass over the data; default dataset_size. With weights it is another number.
        total_samples: samples of the whole run; only where gamma_decay_samples is not given.
        gamma: weight of a visit, after the decay.
        gamma_schedule: from 1 to gamma by samples seen: "cosine"; "staircase", the same once per pass over the data;
            "constant". It is 1 during the first pass, except when constant. sogclr and isogclr are always constant.
        gamma_decay_samples: where the decay ends; default half of total_samples, if unknown the end of the first pass.
        rho: constant of the robust loss (v2, v3, isogclr); larger drives temperatures lower.
        temperature_gradient: "paper", or "fastclip": the part through g counted twice, as the authors' code does (v0,
            v3); it settles at a lower temperature for the same rho.
        temperature_initial, temperature_lr, temperature_range: individual temperatures; default the variant's own.
        temperature_correction: what Adam's bias correction counts (v2): "visits" of the sample, or "epochs" as the
            authors' code does: no memory in the first, then the epoch's number, so that later steps are 4 to 6 times
            smaller.
        table_path: memory-mapped file for the table, one per rank; None keeps it in memory.
        mask_duplicates: pairs with an equal caption are no negatives of each other (`caption_ids`).
    """

    needs = ("dataset_size", "epoch_samples", "total_samples")
    metric_names = (
        *Objective.metric_names,
        *("calibration_image", "calibration_text", "unvisited", "gamma", "share_at_eps", "capped"),
        *("mean_log_normalizer_image", "mean_log_normalizer_text", "mean_temperature_image", "mean_temperature_text"),
        *("temperatures_at_limit", "temperature_gradients_capped"),
    )

    def __init__(
        self,
        dataset_size: int,
        *,
        epoch_samples: int | None = None,
        total_samples: int | None = None,
        variant: Literal["v0", "v1", "v2", "v3", "sogclr", "isogclr"] = FastCLIPSettings.variant,
        gamma: float = FastCLIPSettings.gamma,
        gamma_schedule: Literal["cosine", "staircase", "constant"] = FastCLIPSettings.gamma_schedule,
        gamma_decay_samples: int | None = None,
        rho: float = FastCLIPSettings.rho,
        eps: float = FastCLIPSettings.eps,
        temperature_gradient: Literal["paper", "fastclip"] = FastCLIPSettings.temperature_gradient,
        temperature_initial: float | None = None,
        temperature_lr: float | None = None,
        temperature_range: tuple[float, float] | None = None,
        temperature_correction: Literal["visits", "epochs"] = FastCLIPSettings.temperature_correction,
        table_path: str | Path | None = None,
        mask_duplicates: bool = FastCLIPSettings.mask_duplicates,
    ) -> None:
        super().__init__(mask_duplicates=mask_duplicates)
        self.settings = FastCLIPSettings.from_arguments(locals())
        check_at_least("dataset_size", dataset_size, 1, "the number of samples in the data set")
        check_at_least("epoch_samples", epoch_samples or 0, 0, "None for dataset_size")
        check_at_least("total_samples", total_samples or 0, 0, "None if unknown")
        self.dataset_size, self.epoch_samples = dataset_size, epoch_samples or dataset_size
        self.gamma_schedule = "constant" if variant in ("sogclr", "isogclr") else gamma_schedule
        self.gamma_decay_samples = gamma_decay_samples or (total_samples or 0) // 2
        self.individual = individual_temperatures(self.settings)
        columns = ("log_u_image", "log_u_text", *(self.individual.columns if self.individual else ()))
        self.table = SampleTable(dataset_size, columns, table_path)
        self.samples_seen = 0

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        ids = self._ids(pairs)
        stored = self.table.read(ids)  # (B, columns), on the host
        temperature = self._temperature(stored, pairs, tau)
        batch = batch_log_normalizers(pairs, temperature, self.settings.eps)
        target = gather_values(torch.stack(batch, dim=1)).cpu()  # (B, 2)
        self.record_accuracy(pairs)
        self._measure_calibration(stored[:, :2], target)
        all_log_u = self._average(ids, stored[:, :2], target)
        self._record_normalizers(all_log_u, target)
        log_u = local_sides(all_log_u, pairs)
        if self.training:
            row = [all_log_u]
            if isinstance(temperature, tuple):
                row.append(self._step_temperatures(pairs, temperature, log_u, ids, stored))
            self.table.write(ids, torch.cat(row, dim=1))
            self.samples_seen += len(ids)
        return self._variant_loss(pairs, tau, temperature, log_u, batch)

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float | None = None) -> Both:
        """log u as it is stored, of whatever age; NaN for samples never visited. With another eps also NaN where the
        stored one hides g."""
        if self.individual:
            raise NoEstimate(
                f"FastCLIP {self.settings.variant}: each sample's normalizer is at a temperature of its own"
            )
        if self.samples_seen == 0:
            raise NoEstimate("FastCLIP has visited no sample yet: call it once in train mode, or load its state")
        log_u = self.table.read(self._ids(pairs))
        own = self.settings.eps
        return local_sides(log_u if eps is None else exchange_eps(log_u, own, eps), pairs)

    def gamma_now(self) -> float:
        """The weight of the next visit."""
        gamma = self.settings.gamma
        if self.gamma_schedule == "constant":
            return gamma
        seen = self.samples_seen
        if self.gamma_schedule == "staircase":
            seen -= seen % self.epoch_samples
        if seen < self.epoch_samples:
            return 1.0
        if seen >= self.gamma_decay_samples:
            return gamma
        return gamma + (1 - gamma) * (1 + math.cos(math.pi * seen / self.gamma_decay_samples)) / 2

    def get_extra_state(self) -> dict[str, int]:
        return {"samples_seen": self.samples_seen}

    def set_extra_state(self, state: Any) -> None:
        self.samples_seen = int(state["samples_seen"])

    def match_state_to(self, features: Tensor) -> torch.dtype:
        """The table changes its type only: it stays on the host."""
        self.table.change_type(torch.promote_types(features.dtype, self.table.dtype))
        return self.table.dtype

    def _ids(self, pairs: Pairs) -> Tensor:  # (B,) on the host
        if pairs.all_sample_ids is None:
            raise ValueError(
                "FastCLIP remembers each sample: pass sample_ids, the (batch,) numbers 0..dataset_size-1 of the pairs"
            )
        return pairs.all_sample_ids.cpu()

    def _temperature(self, stored: Tensor, pairs: Pairs, tau: Tensor) -> Tensor | Both:
        if self.individual is None:
            return tau
        return local_sides(self.individual.current(stored[:, 2:]), pairs)

    def _average(self, ids: Tensor, stored: Tensor, target: Tensor) -> Tensor:  # (B,), (B, 2), (B, 2) -> (B, 2)
        """The normalizers to use for this batch; in eval mode the stored ones, or the batch's where there are none."""
        if not self.training:
            return torch.where(stored.isnan(), target, stored)
        self.record(gamma=torch.tensor(self.gamma_now()))
        return moving_average(stored, log_mean_by_id(ids, target), self.gamma_now())

    def _step_temperatures(self, pairs: Pairs, temperature: Both, log_u: Both, ids: Tensor, stored: Tensor) -> Tensor:
        """The individual temperatures after this visit, and their moments: (B, columns after log u)."""
        assert self.individual is not None
        gradient = mean_by_id(
            ids, gather_values(individual_gradient(pairs, temperature, log_u, self.settings.rho)).cpu()
        )
        after = self.individual.step(stored[:, 2:], gradient, epoch=self.samples_seen // self.epoch_samples)
        moved, lowest, highest = after[:, :2], self.individual.lowest, self.individual.highest
        self.record(
            mean_temperature_image=moved[:, 0].mean(),
            mean_temperature_text=moved[:, 1].mean(),
            temperatures_at_limit=((moved <= lowest) | (moved >= highest)).float().mean(),
            temperature_gradients_capped=(gradient.abs() > self.individual.largest_gradient).float().mean(),
        )
        return after

    def _variant_loss(self, pairs: Pairs, tau: Tensor, temperature: Tensor | Both, log_u: Both, batch: Both) -> Tensor:
        """The loss of the variant: its value, and the gradient of g / u with u held constant."""
        # In train mode g / u is below B / gamma. In eval mode u may be old and g far larger: the exponent is capped.
        limit, rho, variant = LARGEST_EXPONENT[tau.dtype], self.settings.rho, self.settings.variant
        held_log_nu = (torch.maximum(log_u[0], batch[0] - limit), torch.maximum(log_u[1], batch[1] - limit))
        self.record_weight_deviation(batch, held_log_nu)
        if isinstance(temperature, tuple):
            image, text = temperature
            value = ((log_u[0] + rho) * image).mean() + ((log_u[1] + rho) * text).mean()
            weighted = (held_log_nu[0] - image.log(), held_log_nu[1] - text.log())  # tau_i g_i / u_i
            ratio = mean_normalizer_ratio(pairs, temperature, weighted)
            return value + gradient_only(ratio) + 0 * tau  # DDP wants every parameter in the graph
        mean = log_u[0].mean() + log_u[1].mean()
        if variant in ("v1", "sogclr"):
            ratio = mean_normalizer_ratio(pairs, tau.detach(), held_log_nu)
            return tau.detach() * (mean + gradient_only(ratio)) + 0 * tau
        # "fastclip": a temperature of the same value and twice the gradient.
        inner_tau = tau if self.settings.temperature_gradient == "paper" else tau.detach() + gradient_only(2 * tau)
        ratio = mean_normalizer_ratio(pairs, inner_tau, held_log_nu)
        if variant == "v0":
            return mean + gradient_only(ratio)
        return tau * (mean + 2 * rho) + tau.detach() * gradient_only(ratio)  # v3, Eq. 1

    def _measure_calibration(self, stored: Tensor, target: Tensor) -> None:  # (B, 2), (B, 2)
        """Before the update, of the samples that were visited before."""
        known = ~stored[:, 0].isnan()
        self.record(unvisited=(~known).float().mean())
        if not known.any():
            self.record_calibration(None)
            return
        image, text = calibration_ratio(target[known], stored[known]).mean(dim=0)
        self.record_calibration((image, text))

    def _record_normalizers(self, log_u: Tensor, target: Tensor) -> None:  # (B, 2), (B, 2)
        floor = math.log(self.settings.eps) if self.settings.eps else -math.inf
        self.record(
            mean_log_normalizer_image=log_u[:, 0].mean(),
            mean_log_normalizer_text=log_u[:, 1].mean(),
            share_at_eps=(target - floor < 1).float().mean(),  # within a factor e of the floor, eps decides
            capped=(target - log_u > LARGEST_EXPONENT[log_u.dtype]).float().sum(),
        )


def moving_average(log_u: Tensor, target: Tensor, gamma: float) -> Tensor:
    """log((1 - gamma) u + gamma exp(target)); the target itself where u is NaN."""
    if gamma == 1:
        return target
    moved = torch.logaddexp(log_u + math.log1p(-gamma), target + math.log(gamma))
    return torch.where(log_u.isnan(), target, moved)


def exchange_eps(log_u: Tensor, stored: float, eps: float) -> Tensor:
    """log(eps + u - stored): u is a moving average of `stored` + g, so u - `stored` is one of g.

    A larger eps is exact. A smaller one needs g itself: NaN where it is too small a part of u to be read off it.

    >>> exchange_eps(torch.tensor([0.01 + 0.02, 0.01]).log(), 0.01, 0.001).exp()
    tensor([0.0210,    nan])
    """
    if eps == stored:
        return log_u
    u = log_u.double().exp()
    g = (u - stored).clamp(min=0)
    known = (g > SMALLEST_PART * u) | (eps > stored)
    return torch.where(known, (eps + g).log(), math.nan).to(log_u.dtype)


def log_mean_by_id(ids: Tensor, logs: Tensor) -> Tensor:  # (B,), (B, k) -> (B, k)
    """Rows of equal id all receive the logarithm of their mean: a sample twice in a batch has one normalizer."""
    _, group = ids.unique(return_inverse=True)
    peak = torch.full_like(logs, torch.finfo(logs.dtype).min)
    peak = peak.scatter_reduce_(0, group[:, None].expand_as(logs), logs, "amax")[group]
    return peak + mean_by_id(ids, (logs - peak).exp()).log()


def mean_by_id(ids: Tensor, values: Tensor) -> Tensor:  # (B,), (B, k) -> (B, k)
    _, group, count = ids.unique(return_inverse=True, return_counts=True)
    total = torch.zeros_like(values).index_add_(0, group, values)
    return total[group] / count[group, None]


def local_sides(values: Tensor, pairs: Pairs) -> Both:  # (B, 2) -> (b,), (b,)
    """The rows of this rank on the device of its features, image side and text side."""
    image, text = values[pairs.local_rows].to(pairs.image.device).unbind(dim=1)
    return image, text


@torch.no_grad()
def individual_gradient(pairs: Pairs, temperature: Both, log_u: Both, rho: float) -> Tensor:  # -> (b, 2)
    """d/dtau_i of tau_i (log u_i + rho): log u_i + rho - mean_j z_ij exp(z_ij) / u_i, z_ij = (s_ij - s_ii) / tau_i."""
    sides = []
    for similarity, tau, log_nu in zip(pairs.similarities, temperature, log_u, strict=True):
        excess = (similarity - pairs.positive[:, None]) / tau[:, None]
        weight = (excess - (log_nu + pairs.num_negatives.log())[:, None]).exp().masked_fill(pairs.excluded, 0.0)
        sides.append(log_nu + rho - (weight * excess).sum(dim=1))
    return torch.stack(sides, dim=1)


@dataclass(frozen=True)
class MomentumTemperatures:
    """isogclr: v <- (1 - 0.9) v + 0.9 gradient, from v = 0; tau_i <- tau_i - lr v, kept within the range."""

    initial: float
    learning_rate: float = 0.01
    lowest: float = 0.005
    highest: float = 0.05

    columns: ClassVar[tuple[str, ...]] = ("temperature_image", "temperature_text", "momentum_image", "momentum_text")
    largest_gradient: ClassVar[float] = math.inf

    def current(self, stored: Tensor) -> Tensor:  # (B, columns) -> (B, 2)
        return stored[:, :2].nan_to_num(nan=self.initial)

    def step(self, stored: Tensor, gradient: Tensor, *, epoch: int) -> Tensor:  # (B, columns), (B, 2) -> (B, columns)
        momentum = 0.1 * stored[:, 2:4].nan_to_num(nan=0.0) + 0.9 * gradient
        moved = self.current(stored) - self.learning_rate * momentum
        return torch.cat([moved.clamp(self.lowest, self.highest), momentum], dim=1)


@dataclass(frozen=True)
class AdamTemperatures(MomentumTemperatures):
    """v2: Adam with one pair of moments per sample and side, corrected for bias by the sample's own visits.

    With `count_epochs` as the authors do it: in the first epoch moments have no memory, later the exponent of the
    correction is the number of the epoch.
    """

    learning_rate: float = 0.0133
    lowest: float = 0.01
    highest: float = 1.0
    count_epochs: bool = False

    columns: ClassVar[tuple[str, ...]] = (*MomentumTemperatures.columns, "square_image", "square_text", "visits")
    largest_gradient: ClassVar[float] = 5.0  # as its authors cap it

    def step(self, stored: Tensor, gradient: Tensor, *, epoch: int) -> Tensor:
        beta1, beta2 = (0.0, 0.0) if self.count_epochs and epoch == 0 else (0.9, 0.999)
        gradient = gradient.clamp(-self.largest_gradient, self.largest_gradient)
        first, second, visits = stored[:, 2:].nan_to_num(nan=0.0).split([2, 2, 1], dim=1)
        visits = visits + 1
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient.square()
        count = torch.full_like(visits, epoch + 1) if self.count_epochs else visits
        step = first / (1 - beta1**count) / ((second / (1 - beta2**count)).sqrt() + 1e-8)
        moved = (self.current(stored) - self.learning_rate * step).clamp(self.lowest, self.highest)
        return torch.cat([moved, first, second, visits], dim=1)


def individual_temperatures(settings: FastCLIPSettings) -> MomentumTemperatures | None:
    """How the variant moves its individual temperatures, if it has them; 0 in the settings is the variant's own."""
    initial = settings.individual_start
    if initial is None:
        return None
    kind = AdamTemperatures if settings.variant == "v2" else MomentumTemperatures
    lowest, highest = settings.temperature_range if any(settings.temperature_range) else (kind.lowest, kind.highest)
    if not 0 < lowest <= initial <= highest:
        raise ValueError(
            f"temperature_initial {initial} is not within temperature_range {lowest}, {highest} above 0; give both"
        )
    rate = settings.temperature_lr or kind.learning_rate
    if kind is MomentumTemperatures:
        return MomentumTemperatures(initial, rate, lowest, highest)
    return AdamTemperatures(initial, rate, lowest, highest, settings.temperature_correction == "epochs")
