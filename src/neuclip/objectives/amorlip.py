"""AmorLIP: two small networks learn the anchors' sums over the batch; the next epoch blends their predictions in."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuclip.distributed.collectives import gather_values, world_size
from neuclip.objectives.contrast import candidate_sum
from neuclip.objectives.formulas import DIVERGENCES, add_eps, calibration_ratio, gradient_only, squared_difference
from neuclip.objectives.normalizers.residual_mlp import Loss, ResidualMLP, step_together
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from neuclip.objectives.objective import NoEstimate, Objective
from neuclip.objectives.pairs import Both, Pairs, batch_log_normalizers
from neuclip.settings.fields import check_at_least
from neuclip.settings.objectives import AmorLIPSettings

SQUARED_WEIGHT = 0.1  # of the squared difference, beside a divergence that leaves a common factor open
DEFAULT_EPOCHS = 33  # of the authors' run on CC12M


class AmorLIP(Objective):
    """Each anchor's sum of exp(s / tau) over the batch, its own partner counted with a small coefficient, is blended
    with what the networks of the last epoch predict; the blend is the anchor's normalizer, and what the networks of
    this epoch learn. In its first epoch it is the mini-batch form with eps = positive_coefficient / (B - 1).

    >>> objective = AmorLIP(embed_dim=512, dataset_size=9_187_328, total_samples=300_000_000)
    >>> loss = objective(image_features, text_features, model.logit_scale.exp())        # doctest: +SKIP
    >>> loss.backward()                                                                 # doctest: +SKIP

    A network sees its anchor only, so its prediction holds for the temperature it was trained at, as in the paper.

    Args:
        embed_dim: width d of the features.
        dataset_size: pairs per epoch of the schedules, unless `epoch_samples` says otherwise.
        total_samples: pairs of the whole run; 0: 33 epochs.
        epoch_samples: pairs per epoch; 0: `dataset_size`. Until the first epoch is over nothing is blended.
        width_factor: hidden width of the networks over `embed_dim`.
        network_lr, network_steps, clip_network_gradient: Adam on the networks, several updates per batch.
        network_lr_times_ranks: multiply the rate by the number of ranks, as the authors' code does whenever it
            initialises the networks anew; results then depend on that number.
        divergence: what the networks minimise: "log_l2", the squared difference of logarithms; or the divergence of
            the predicted distribution over the batch (each anchor's share of the batch's total) from the true one, as
            we read the paper, plus 0.1 times "log_l2".
        average_decay, average_every: the moving average of the weights, which the next epoch will use; updated at the
            first step of each epoch and every `average_every` steps from there.
        blend_maximum, blend_samples: largest share of the last epoch's prediction, and the samples over which it rises
            to that by a cosine, epoch by epoch; 0: half of the run.
        positive_coefficient: weight of the positive pair in the denominator.
        rho: constants of the loss in equal parts of the run, each added as rho tau; positive lowers the temperature.
        adaptive_temperature: also give the temperature the gradient of the value of the loss.
        reinitialise_every: epochs after which the networks start anew; 0: never.
        eps: only for `log_normalizers`, which are log(eps + g) for every method.
        seed: of the networks' initial weights.
        mask_duplicates: pairs with an equal caption are no negatives of each other.
    """

    needs = ("embed_dim", "epoch_samples", "total_samples")
    metric_names = (
        *Objective.metric_names,
        *("calibration_image", "calibration_text", "predicted_at_eps", "blend", "network_loss", "rho"),
        *("mean_log_normalizer_image", "mean_log_normalizer_text"),
    )

    def __init__(
        self,
        embed_dim: int,
        *,
        dataset_size: int = 1_000_000,
        total_samples: int = 0,
        epoch_samples: int = AmorLIPSettings.epoch_samples,
        width_factor: float = AmorLIPSettings.width_factor,
        network_lr: float = AmorLIPSettings.network_lr,
        network_lr_times_ranks: bool = AmorLIPSettings.network_lr_times_ranks,
        network_steps: int = AmorLIPSettings.network_steps,
        clip_network_gradient: float = AmorLIPSettings.clip_network_gradient,
        divergence: Literal["log_l2", "kl_asymmetric", "kl_symmetric", "js"] = AmorLIPSettings.divergence,
        average_decay: float = AmorLIPSettings.average_decay,
        average_every: int = AmorLIPSettings.average_every,
        blend_maximum: float = AmorLIPSettings.blend_maximum,
        blend_samples: int = AmorLIPSettings.blend_samples,
        positive_coefficient: float = AmorLIPSettings.positive_coefficient,
        rho: tuple[float, ...] = AmorLIPSettings.rho,
        adaptive_temperature: bool = AmorLIPSettings.adaptive_temperature,
        reinitialise_every: int = AmorLIPSettings.reinitialise_every,
        eps: float = AmorLIPSettings.eps,
        seed: int = AmorLIPSettings.seed,
        mask_duplicates: bool = AmorLIPSettings.mask_duplicates,
    ) -> None:
        super().__init__(embed_dim, mask_duplicates=mask_duplicates)
        self.settings = AmorLIPSettings.from_arguments(locals())
        check_at_least("dataset_size", dataset_size, 1, "the number of pairs in the data set")
        check_at_least("total_samples", total_samples, 0, "0 for 33 epochs")
        self.epoch_samples = epoch_samples or dataset_size
        self.total_samples = total_samples or DEFAULT_EPOCHS * self.epoch_samples
        self.blend_epochs = (blend_samples or self.total_samples / 2) / self.epoch_samples
        self.image_sums, self.text_sums = (
            LearnedSums(embed_dim, width_factor, network_lr, seed=seed) for seed in self._seeds(epoch=0)
        )
        self.steps = self.samples_seen = self.epoch = self.epoch_start = self.batch_size = 0

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        self.record_accuracy(pairs)
        self._measure_calibration(pairs, tau)
        rho = rho_at(self.samples_seen, self.total_samples, self.settings.rho)
        if self.training:
            self._enter_epoch(self.samples_seen // self.epoch_samples)
        log_sum = self._blend(pairs, batch_log_sums(pairs, tau, self.settings.positive_coefficient))
        if self.training:
            self._learn(pairs, log_sum)
        self._record_normalizers(pairs, tau, log_sum, rho)
        return self._encoder_loss(pairs, tau, log_sum, rho)

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float | None = None) -> Both:
        """The averaged networks predict a sum over a batch, own partner included: without it, relative to it, and
        divided by the number of negatives it is g. Where they predict less than the own partner's part, g is 0."""
        if self.steps == 0:
            raise NoEstimate("AmorLIP has learnt nothing yet: call it once in train mode, or load its state")
        eps = self.settings.eps if eps is None else eps
        image, text = (self._estimate(sums.predict(features), pairs, tau, eps) for sums, features in self._sides(pairs))
        return image, text

    def _estimate(self, log_sum: Tensor, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:  # (b,) -> (b,)
        log_sum = log_sum - pairs.positive / tau
        log_share = math.log(self.settings.positive_coefficient) - log_sum  # of the own partner
        log_negatives = torch.where(log_share < 0, log_sum + torch.log1p(-log_share.clamp(max=0).exp()), -math.inf)
        return add_eps(log_negatives - math.log(max(self.batch_size - 1, 1)), eps)

    @torch.no_grad()
    def _enter_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch, self.epoch_start = epoch, self.steps
        every = self.settings.reinitialise_every
        for sums, seed in zip((self.image_sums, self.text_sums), self._seeds(epoch), strict=True):
            sums.previous.copy_(sums.average)
            if every and epoch % every == 0:
                sums.reinitialise(seed)

    def _seeds(self, epoch: int) -> tuple[int, int]:
        first = 1_000_003 * self.settings.seed + 2 * epoch
        return first, first + 1

    def _sides(self, pairs: Pairs) -> tuple[tuple[LearnedSums, Tensor], tuple[LearnedSums, Tensor]]:
        return (self.image_sums, pairs.image), (self.text_sums, pairs.text)

    @torch.no_grad()
    def _blend(self, pairs: Pairs, log_sum: Both) -> Both:
        """log(blend * prediction of the last epoch's networks + (1 - blend) * sum over the batch)."""
        blend = blend_at(self.epoch, self.blend_epochs, self.settings.blend_maximum)
        self.record(blend=torch.tensor(blend))
        if blend == 0:
            return log_sum
        image, text = (
            torch.logaddexp(sums.predict_last_epoch(features) + math.log(blend), from_batch + math.log1p(-blend))
            for (sums, features), from_batch in zip(self._sides(pairs), log_sum, strict=True)
        )
        return image, text

    @torch.no_grad()
    def _learn(self, pairs: Pairs, target: Both) -> None:
        learners = [
            (sums.network, features, self._network_loss(side_target, pairs))
            for (sums, features), side_target in zip(self._sides(pairs), target, strict=True)
        ]
        clip = self.settings.clip_network_gradient or None
        factor = world_size() if self.settings.network_lr_times_ranks else 1
        losses = [
            step_together(learners, largest_gradient=clip, rate_factor=factor)
            for _ in range(self.settings.network_steps)
        ]
        self.record(network_loss=losses[0])  # of networks to which the batch was new
        if (self.steps - self.epoch_start) % self.settings.average_every == 0:
            self.image_sums.update_ema(self.settings.average_decay)
            self.text_sums.update_ema(self.settings.average_decay)
        self.steps += 1
        self.batch_size = len(pairs.all_image)
        self.samples_seen += self.batch_size

    def _network_loss(self, target: Tensor, pairs: Pairs) -> Loss:
        if self.settings.divergence == "log_l2":
            return partial(squared_difference, target=target)
        divergence, all_targets = DIVERGENCES[self.settings.divergence], gather_values(target)

        def loss(predicted: Tensor) -> Tensor:
            over_batch = over_ranks(predicted, lambda values: divergence(values, all_targets), pairs.local_rows)
            return over_batch + SQUARED_WEIGHT * squared_difference(predicted, target)

        return loss

    def _encoder_loss(self, pairs: Pairs, tau: Tensor, log_sum: Both, rho: float) -> Tensor:
        """tau J + rho tau, the factor tau of J without gradient: per side J is the mean over anchors of
        (sum_j exp(s_ij / tau) + c exp(s_ii / tau)) / Lambda_i - s_ii / tau, Lambda = exp(log_sum) held constant.
        """
        scaled = pairs.positive / tau
        # A masked candidate is replaced by the mean of the others, as in the sum itself.
        log_factor = (max(len(pairs.all_image) - 1, 1) / pairs.num_negatives).log()
        negatives = candidate_sum(pairs, tau, (log_sum[0] - log_factor, log_sum[1] - log_factor))
        positives = sum(self.settings.positive_coefficient * (scaled - side).exp().mean() for side in log_sum)
        loss = tau.detach() * (negatives + positives - 2 * scaled.mean()) + rho * tau
        if self.settings.adaptive_temperature:
            value = torch.stack(log_sum).sum(dim=0).mean() - 2 * scaled.mean() - 2 * math.log(len(pairs.all_image))
            loss = loss + tau * value.detach()
        return loss

    @torch.no_grad()
    def _measure_calibration(self, pairs: Pairs, tau: Tensor) -> None:
        """Before the networks see the batch."""
        if self.steps == 0:
            self.record_calibration(None)
            return
        truth, estimates = batch_log_normalizers(pairs, tau, self.settings.eps), self.estimates(pairs, tau)
        image, text = (calibration_ratio(t, e).mean() for t, e in zip(truth, estimates, strict=True))
        self.record_calibration((image, text))
        above_floor = torch.stack(estimates) - math.log(self.settings.eps)
        self.record(predicted_at_eps=(above_floor < 1).float().mean())  # within a factor e of the floor eps decides

    @torch.no_grad()
    def _record_normalizers(self, pairs: Pairs, tau: Tensor, log_sum: Both, rho: float) -> None:
        relative = pairs.positive / tau + math.log(max(len(pairs.all_image) - 1, 1))
        self.record(
            mean_log_normalizer_image=(log_sum[0] - relative).mean(),
            mean_log_normalizer_text=(log_sum[1] - relative).mean(),
            rho=torch.tensor(rho),
        )

    def get_extra_state(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("steps", "samples_seen", "epoch", "epoch_start", "batch_size")}

    def set_extra_state(self, state: Any) -> None:
        self.steps, self.samples_seen = state["steps"], state["samples_seen"]
        self.epoch, self.epoch_start, self.batch_size = state["epoch"], state["epoch_start"], state["batch_size"]


class LearnedSums(nn.Module):
    """One side's network, the moving average of its weights, and that average as it stood when the epoch began."""

    average: Tensor  # (w,)
    previous: Tensor  # (w,)

    def __init__(self, embed_dim: int, width_factor: float, learning_rate: float, *, seed: int) -> None:
        super().__init__()
        optimizer = RowOptimizer("adam", learning_rate)
        self.network = ResidualMLP(embed_dim, width_factor=width_factor, optimizer=optimizer, seed=seed)
        self.register_buffer("average", self.network.weights.clone())
        self.register_buffer("previous", self.network.weights.clone())

    def predict(self, features: Tensor) -> Tensor:  # (b, d) -> (b,)
        return self.network(features, self.average)

    def predict_last_epoch(self, features: Tensor) -> Tensor:  # (b, d) -> (b,)
        return self.network(features, self.previous)

    def update_ema(self, decay: float) -> None:
        self.average.lerp_(self.network.weights, 1 - decay)

    def reinitialise(self, seed: int) -> None:
        self.network.reinitialise(seed)
        self.average.copy_(self.network.weights)


def batch_log_sums(pairs: Pairs, tau: Tensor, positive_coefficient: float) -> Both:  # -> (b,), (b,)
    """log( sum_{j != i} exp(s_ij / tau) + c exp(s_ii / tau) ) over the batch, both sides: values.

    It is log(eps + g) + s_ii / tau + log(B - 1) with eps = c / (B - 1). With `mask_duplicates` the sum over the
    remaining candidates counts as one over B - 1.
    """
    negatives = max(len(pairs.all_image) - 1, 1)
    image, text = batch_log_normalizers(pairs, tau, positive_coefficient / negatives)
    relative = (pairs.positive / tau).detach() + math.log(negatives)
    return image + relative, text + relative


def over_ranks(local: Tensor, function: Callable[[Tensor], Tensor], rows: slice) -> Tensor:  # (b,) -> scalar
    """`function` of the values of all ranks, with a gradient whose mean over ranks is the true one."""
    values = gather_values(local).requires_grad_()
    value = function(values)
    (gradient,) = torch.autograd.grad(value, values)
    return value.detach() + gradient_only((local * gradient[rows] * world_size()).sum())


def blend_at(epoch: int, blend_epochs: float, maximum: float) -> float:
    """The last epoch's share in the normalizer: 0 in the first epoch, then rising by a cosine.

    >>> [round(blend_at(epoch, 2, 0.8), 3) for epoch in range(4)]
    [0.0, 0.4, 0.8, 0.8]
    """
    return maximum * (1 - math.cos(math.pi * min(epoch / blend_epochs, 1))) / 2


def rho_at(samples: int, total_samples: int, values: tuple[float, ...]) -> float:
    """The run in equal parts, one value each.

    >>> [rho_at(samples, 90, (8.5, -8.5, -8.5)) for samples in (0, 29, 30, 89, 500)]
    [8.5, 8.5, -8.5, -8.5, -8.5]
    """
    return values[min(len(values) * samples // total_samples, len(values) - 1)]
