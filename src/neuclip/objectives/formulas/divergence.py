"""How far predicted log-normalizers are from their targets: AmorLIP's losses for its networks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def squared_difference(predicted: Tensor, target: Tensor) -> Tensor:  # (b,), (b,) -> scalar
    """The mean over anchors of (predicted - target)^2, both being logarithms."""
    return (predicted - target).square().mean()


def kl_asymmetric(predicted: Tensor, target: Tensor) -> Tensor:  # (B,), (B,) -> scalar
    """KL(target || predicted) of the distributions over the batch: each anchor's share of all normalizers' sum.

    It is 0 for predictions that are right up to a common factor, which the squared difference has to fix.

    >>> kl_asymmetric(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 5.0]))
    tensor(0.)
    """
    return _kl(target.log_softmax(dim=0), predicted.log_softmax(dim=0))


def kl_symmetric(predicted: Tensor, target: Tensor) -> Tensor:  # (B,), (B,) -> scalar
    """The mean of KL both ways."""
    return (kl_asymmetric(predicted, target) + kl_asymmetric(target, predicted)) / 2


def jensen_shannon(predicted: Tensor, target: Tensor) -> Tensor:  # (B,), (B,) -> scalar
    """The mean KL of both distributions from the one half-way between them; at most log 2."""
    one, other = predicted.log_softmax(dim=0), target.log_softmax(dim=0)
    between = torch.logaddexp(one, other) - math.log(2)
    return (_kl(one, between) + _kl(other, between)) / 2


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


# The divergences that see the batch as one distribution.
DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl_asymmetric": kl_asymmetric,
    "kl_symmetric": kl_symmetric,
    "js": jensen_shannon,
}
