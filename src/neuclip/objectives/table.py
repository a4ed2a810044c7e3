"""The base class of methods that store a normalizer per sample: FastCLIP, SCENT, DRRho."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from neuclip.objectives.contrast import Contrast, contrast
from neuclip.objectives.formulas import add_eps, gradient_only, ratio, robust_loss
from neuclip.objectives.objective import NoEstimate, Objective
from neuclip.objectives.pairs import NO_KEY, Pairs, gather_sides
from neuclip.objectives.state import SampleTable

SMALLEST_PART = 1e-4  # the smallest g / u at which g = u - eps is accurate: float32 stores log u to about 1e-6


class TableObjective(Objective):
    """Stores log u of every sample, per side, in a table by sample id. The first visit of a sample sets it to the
    batch's log(eps + g); later visits call `renew`, which a method defines. If a sample is twice in a batch, this is
    one visit with the mean of both values.

    The loss is Eq. 1 with u as the normalizer; its gradient in the features is that of g / u with constant u.
    """

    dataset_size: int
    rho: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table = SampleTable(self.dataset_size, self.columns())

    def columns(self) -> int:
        """The number of columns of the table: log u of both sides, then whatever else a method stores."""
        return 2

    @abstractmethod
    def renew(self, log_u: Tensor, target: Tensor) -> Tensor:  # (2, B), (2, B) -> (2, B)
        """The new log u after a visit at which the batch's log(eps + g) is `target`; NaN where `log_u` is NaN."""

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        stored = self.table.read(self._ids(pairs)).T  # (columns, B)
        ids = torch.where(pairs.sound, self._ids(pairs), NO_KEY)  # unsound pairs are not visited
        tau_inside = self.inner_tau(pairs, tau, stored)
        batch = contrast(pairs, tau_inside)
        log_normalizer = add_eps(batch.log_g, self.eps)

        target = log_mean_by_id(ids, gather_sides(log_normalizer.detach()))  # (2, B)
        visited = ~stored[:2].isnan()
        renewed = self.renew(stored[:2], target) if self.training else stored[:2]
        row = torch.where(visited, renewed, target)
        log_u = row[:, pairs.local]
        if self.training:
            others = self.other_columns(ids, batch, tau_inside, log_u, stored)
            self.table.write(ids, torch.cat([row, others]).T)

        self.record(accuracy=batch.accuracy, unvisited=1 - visited.to(tau.dtype).mean())
        self.record_normalizers(log_normalizer, stored[:2, pairs.local], log_u)
        term = log_u + gradient_only(ratio(log_normalizer, log_u))  # Eq. 4: log u, with the gradient of g / u
        return self.total(term, tau, tau_inside)

    def inner_tau(self, pairs: Pairs, tau: Tensor, stored: Tensor) -> Tensor:  # () or (2, b)
        """The temperature in the exponents of g: one for all, or one per anchor."""
        return tau

    def other_columns(
        self, ids: Tensor, batch: Contrast, tau: Tensor, log_u: Tensor, stored: Tensor
    ) -> Tensor:  # (B,), ..., (2, b), (2, b), (columns, B) -> (columns - 2, B)
        """The new values of the columns behind log u."""
        return stored[2:]

    def total(self, term: Tensor, tau: Tensor, tau_inside: Tensor) -> Tensor:  # (2, b), (), () or (2, b) -> ()
        return robust_loss(term, tau, self.rho)

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:
        """The stored log u; NaN for samples that were never visited. u contains the method's own eps. For a smaller
        `eps`, g = u - own eps is too inaccurate if it is a tiny part of u: then the estimate is NaN, too."""
        if self.samples_seen == 0:
            raise NoEstimate(f"{self.title} has visited no sample yet: call it once in train mode, or load its state")
        log_u = self.table.read(self._ids(pairs)).T[:2, pairs.local]
        if eps == self.eps:
            return log_u
        u = log_u.double().exp()
        g = (u - self.eps).clamp(min=0)
        return torch.where((g > SMALLEST_PART * u) | (eps > self.eps), (eps + g).log(), math.nan).to(log_u.dtype)

    def _ids(self, pairs: Pairs) -> Tensor:  # (B,)
        if pairs.sample_ids is None:
            raise ValueError(
                f"{self.title} remembers each sample: pass sample_ids, "
                "the (batch,) numbers 0..dataset_size-1 of the pairs"
            )
        return pairs.sample_ids


def groups(ids: Tensor) -> Tensor:  # (B,) -> (B,)
    """A number below B for each id, equal for equal ids. Unlike `unique` it does not wait for the device."""
    ordered, order = ids.sort()
    return torch.empty_like(ids).scatter_(0, order, ordered.diff(prepend=ordered[:1]).ne(0).cumsum(0))


def mean_by_id(ids: Tensor, values: Tensor) -> Tensor:  # (B,), (k, B) -> (k, B)
    """Replace columns with equal ids by their mean."""
    group = groups(ids)
    total = torch.zeros_like(values).index_add_(1, group, values)
    return (total / torch.zeros_like(values).index_add_(1, group, torch.ones_like(values)))[:, group]


def log_mean_by_id(ids: Tensor, logs: Tensor) -> Tensor:  # (B,), (k, B) -> (k, B)
    """Replace columns of logarithms with equal ids by the logarithm of their mean: one normalizer per sample."""
    group = groups(ids).expand_as(logs)
    peak = torch.full_like(logs, torch.finfo(logs.dtype).min).scatter_reduce(1, group, logs, "amax").gather(1, group)
    return peak + mean_by_id(ids, (logs - peak).exp()).log()
