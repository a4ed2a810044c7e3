"""AmorLIP: two small networks learn the anchors' sums over the batch; the next epoch blends in their predictions."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

import torch
from torch import Tensor

from neuclip.objectives.contrast import contrast
from neuclip.objectives.formulas import add_eps, ratio
from neuclip.objectives.mlp import ResidualMLPs
from neuclip.objectives.objective import NoEstimate, Objective, objective
from neuclip.objectives.pairs import Pairs
from neuclip.settings.objectives import AmorLIPSettings
from neuclip.settings.options import option

DEFAULT_EPOCHS = 33  # of the authors' run on CC12M
AVERAGE_EVERY = 2  # steps between updates of the moving average, from the first of each epoch, as in that run
LARGEST_GRADIENT = 1.0  # clipping norm for both networks together, as in that run


@objective
class AmorLIP(Objective, AmorLIPSettings):
    """The normalizer of an anchor is a blend of two parts: its sum of exp(s / tau) over the batch, where the positive
    pair has a small coefficient, and the prediction of the last epoch's networks. This epoch's networks learn the
    blend. In the first epoch it is the mini-batch form with eps = positive_coefficient / (B - 1).

    >>> objective = AmorLIP(embed_dim=512, dataset_size=9_187_328, total_samples=300_000_000)
    >>> loss = objective(image_features, text_features, model.logit_scale.exp())        # doctest: +SKIP
    >>> loss.backward()                                                                 # doctest: +SKIP

    A network sees only the anchor, not tau: its prediction is for the temperature of its training, as in the paper.
    """

    embed_dim: int = option(help="width d of the features", at_least=1)
    _: KW_ONLY
    dataset_size: int = option(1_000_000, "pairs per epoch, unless epoch_samples says otherwise", at_least=1)
    total_samples: int = option(0, "pairs of the whole run; 0: 33 epochs", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch = self.epoch_start = self.batch_size = 0
        self.networks = ResidualMLPs(self.embed_dim, rate=self.network_lr)
        self.average: Tensor  # (2, w) the moving average of the networks' weights
        self.previous: Tensor  # (2, w) that average at the start of the epoch
        self.register_buffer("average", self.networks.weights.clone())
        self.register_buffer("previous", self.networks.weights.clone())

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        batch, scaled, negatives = contrast(pairs, tau), pairs.positive / tau, max(pairs.batch - 1, 1)
        # log( sum_{j != i} exp(s_ij / tau) + c exp(s_ii / tau) )
        log_sum = add_eps(batch.log_g, self.positive_coefficient / negatives) + scaled + math.log(negatives)
        with torch.no_grad():
            unseen = self.estimates(pairs, tau, self.eps) if self.steps and self.measures else None
            if self.training:
                self._enter_epoch()
            normalizer = self._blend(pairs, log_sum)
            if self.training:
                self._learn(pairs, normalizer)
        rho = rho_at(self.samples_seen, self._total_samples, self.rho)
        # tau J + rho tau with the factor tau of J constant; per side J = mean(exp(log_sum - normalizer) - s_ii / tau).
        loss = tau.detach() * (ratio(log_sum, normalizer).mean(dim=1).sum() - 2 * scaled.mean()) + rho * tau
        self.record(accuracy=batch.accuracy, rho=torch.tensor(rho))
        relative = normalizer - scaled - math.log(negatives)
        self.record_normalizers(add_eps(batch.log_g, self.eps), unseen, relative)
        return loss

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:  # (2, b)
        """Estimates of the averaged networks. They predict a sum over a batch. Divided by exp(s_ii / tau), without the
        part of the positive pair, and divided by the number of negatives, it is g; 0 if it is less than that part."""
        if self.steps == 0:
            raise NoEstimate("AmorLIP has not been trained yet: call it once in train mode, or load its state")
        log_sum = self.networks(pairs.features, self.average) - pairs.positive / tau
        log_share = math.log(self.positive_coefficient) - log_sum  # of the positive pair
        log_negatives = torch.where(log_share < 0, log_sum + torch.log1p(-log_share.clamp(max=0).exp()), -math.inf)
        return add_eps(log_negatives - math.log(max(self.batch_size - 1, 1)), eps)

    def _enter_epoch(self) -> None:
        epoch = self.samples_seen // self._epoch_samples
        if epoch == self.epoch:
            return
        self.epoch, self.epoch_start = epoch, self.steps
        self.previous.copy_(self.average)
        if self.reinitialise:
            self.networks.reinitialise(seed=2 * epoch)
            self.average.copy_(self.networks.weights)

    def _blend(self, pairs: Pairs, log_sum: Tensor) -> Tensor:  # (2, b)
        """The normalizer, log(blend * prediction of the last epoch's networks + (1 - blend) * sum over the batch)."""
        blend_epochs = (self.blend_samples or self._total_samples / 2) / self._epoch_samples
        blend = blend_at(self.epoch, blend_epochs, self.blend_maximum)
        self.record(blend=torch.tensor(blend))
        if blend == 0:
            return log_sum.detach()
        predicted = self.networks(pairs.features, self.previous)
        return torch.logaddexp(predicted + math.log(blend), log_sum + math.log1p(-blend))

    def _learn(self, pairs: Pairs, target: Tensor) -> None:  # (2, b)
        def loss(rows: slice, output: Tensor) -> Tensor:  # (2, c) -> (2, c)
            return (output - target[:, rows]).square()

        losses = [self.networks.step(pairs, loss, clip_norm=LARGEST_GRADIENT) for _ in range(self.network_steps)]
        self.record(network_loss=losses[0])  # before the networks have learned this batch
        if (self.steps - self.epoch_start) % AVERAGE_EVERY == 0:
            self.average.lerp_(self.networks.weights, (1 - self.average_decay) * pairs.sound.any().to(target.dtype))
        self.batch_size = pairs.batch

    @property
    def _epoch_samples(self) -> int:
        return self.epoch_samples or self.dataset_size

    @property
    def _total_samples(self) -> int:
        return self.total_samples or DEFAULT_EPOCHS * self._epoch_samples

    def get_extra_state(self) -> dict[str, int]:
        return super().get_extra_state() | {
            name: getattr(self, name) for name in ("epoch", "epoch_start", "batch_size")
        }

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        self.epoch, self.epoch_start, self.batch_size = state["epoch"], state["epoch_start"], state["batch_size"]


def blend_at(epoch: int, blend_epochs: float, maximum: float) -> float:
    """The weight of the last epoch's prediction in the blend: 0 in the first epoch, then rising by a cosine.

    >>> [round(blend_at(epoch, 2, 0.8), 3) for epoch in range(4)]
    [0.0, 0.4, 0.8, 0.8]
    """
    return maximum * (1 - math.cos(math.pi * min(epoch / blend_epochs, 1))) / 2


def rho_at(samples: int, total_samples: int, values: tuple[float, ...]) -> float:
    """The rho of a step: the run has equal parts, each with one of the values.

    >>> [rho_at(samples, 90, (8.5, -8.5, -8.5)) for samples in (0, 29, 30, 89, 500)]
    [8.5, 8.5, -8.5, -8.5, -8.5]
    """
    return values[min(len(values) * samples // total_samples, len(values) - 1)]
