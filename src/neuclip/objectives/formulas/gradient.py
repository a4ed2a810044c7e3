"""A gradient without a value: how closed-form gradients enter autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gradient_only(value: Tensor) -> Tensor:
    """Zero, with the gradient of `value`. `loss + gradient_only(g)` has the value of `loss` and both gradients.

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
