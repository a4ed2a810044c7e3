"""Pure functions, one equation each; torch alone. Shapes: b local anchors, B global candidates.

Normalizers are always logarithms: at tau = 0.01 one can reach exp(200), where float32 ends at exp(88).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# exp() of the exponent log(eps+g) - alpha is weighed against numbers of order 1; beyond this it would leave the range
# in which float32 (or float64) products of it stay finite. What is capped is counted by the objective.
LARGEST_EXPONENT = {torch.float32: 40.0, torch.float64: 300.0}


def log_normalizer(
    similarity: Tensor, positive: Tensor, *, tau: Tensor, eps: float, excluded: Tensor
) -> Tensor:  # (b, B), (b,), (b, B) -> (b,)
    """Eq. 9: log(eps + g), where g is the mean of exp((s_ij - s_ii) / tau) over the candidates not `excluded`.

    Row i's own pair must be among the excluded; a row with nothing left has g = 0. tau is a scalar, or (b,).

    >>> s = torch.tensor([[0.75, 0.25], [0.25, 0.5]])
    >>> log_normalizer(s, s.diagonal(), tau=torch.tensor(0.125), eps=0.0, excluded=torch.eye(2, dtype=torch.bool))
    tensor([-4., -2.])
    """
    excess = ((similarity - positive[:, None]) / (tau[:, None] if tau.ndim else tau)).masked_fill(excluded, -math.inf)
    count = (~excluded).sum(dim=1)
    return add_eps(_log_sum_exp(excess) - count.clamp(min=1).to(excess.dtype).log(), eps)


def add_eps(log_mean: Tensor, eps: float) -> Tensor:
    """log(eps + exp(log_mean)); eps sits inside the logarithm and is the floor of every log-normalizer."""
    return log_mean if eps == 0 else torch.logaddexp(log_mean, log_mean.new_tensor(math.log(eps)))


def _log_sum_exp(rows: Tensor) -> Tensor:
    # torch.logsumexp of a row that is all -inf is -inf with a NaN gradient; an empty row must have gradient 0.
    empty = torch.isneginf(rows).all(dim=1)
    total = torch.logsumexp(rows.masked_fill(empty[:, None], 0.0), dim=1)
    return total.masked_fill(empty, -math.inf)


def capped_exponent(log_normalizer: Tensor, alpha: Tensor) -> Tensor:  # (b,), (b,) -> (b,)
    """log(eps+g) - alpha, capped in value but not in gradient: a capped anchor still pulls alpha the right way."""
    exponent = log_normalizer - alpha
    return exponent - (exponent - LARGEST_EXPONENT[exponent.dtype]).clamp(min=0).detach()


def calibration_ratio(log_normalizer: Tensor, alpha: Tensor) -> Tensor:  # (b,), (b,) -> (b,)
    """r = exp(log(eps+g) - alpha), true over predicted normalizer: 1 when alpha is right.

    The first term of the form that NeuCLIP trains: log z = min over alpha of z exp(-alpha) + alpha - 1 (Eq. 5).
    """
    return torch.exp(capped_exponent(log_normalizer, alpha))


def gradient_only(value: Tensor) -> Tensor:
    """Zero, with the gradient of `value`: how a closed-form gradient enters autograd.

    `loss + gradient_only(g)` has the value of `loss` and both gradients.

    What is inside `value` as a constant may depend on the inputs all the same, so a second derivative would be wrong:
    taking one raises an error.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> zero = gradient_only(x * x)
    >>> zero.item(), torch.autograd.grad(zero, x)
    (0.0, (tensor(6.),))
    """
    zero: Tensor = _GradientOnly.apply(value)
    return zero


class _GradientOnly(torch.autograd.Function):
    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return torch.zeros_like(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # `value` goes along for its graph: what differentiates this gradient again must pass through the error below.
        (value,) = ctx.saved_tensors
        return _FirstDerivative.apply(gradient, value)


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor, value: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError(
            "objectives have first derivatives only: their gradients are closed forms that cannot be differentiated "
            "again; leave this loss out of gradient penalties and Hessians"
        )


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


# AmorLIP's losses for its networks that see the batch as one distribution.
DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl_asymmetric": kl_asymmetric,
    "kl_symmetric": kl_symmetric,
    "js": jensen_shannon,
}
