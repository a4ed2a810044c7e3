"""A small residual network from one feature to one number: AmorLIP's normalizer, and NeuCLIP's `network="mlp"`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip.distributed.collectives import sum_over_ranks, world_size
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer

Loss = Callable[[Tensor], Tensor]  # (b,) -> scalar, a mean over this rank's rows

ADAM = RowOptimizer("adam", learning_rate=1e-3)


class ResidualMLP(nn.Module):
    """Linear(d, h) - ReLU - LayerNorm - Linear(h, d) - ReLU - LayerNorm - (+ input) - ReLU - Linear(d, 1).

    All weights are one flat buffer, the optimizer's state others of the same length: nothing here is a parameter, one
    exchange between ranks serves a whole update, and an average of two networks is an average of two vectors.

    >>> network = ResidualMLP(embed_dim=512, seed=1)
    >>> output = network(features)                                                # doctest: +SKIP
    >>> network.step(features, lambda output: (output - target).square().mean())  # doctest: +SKIP

    Args:
        embed_dim: width d of the features.
        width_factor: h / d.
        optimizer: how the weights move.
        seed: of the initial weights, which are equal on every rank and leave torch's own generator alone.
    """

    weights: Tensor  # (w,)

    def __init__(
        self,
        embed_dim: int,
        *,
        width_factor: float = 1,
        optimizer: RowOptimizer = ADAM,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.shapes = _shapes(embed_dim, max(1, round(width_factor * embed_dim)))
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.optimizer = optimizer
        self.register_buffer("weights", torch.zeros(sum(self.sizes)))
        for name, (width, initial) in optimizer.state_rows(sum(self.sizes)).items():
            self.register_buffer(name, torch.full((width,), initial))
        self.reinitialise(seed)

    @torch.no_grad()
    def reinitialise(self, seed: int) -> None:
        """Fresh weights, as torch.nn.Linear and LayerNorm draw them, and an optimizer that remembers nothing."""
        self.weights.copy_(_initial_weights(self.shapes, seed))
        self.optimizer.reset(dict(self.named_buffers()))

    def forward(self, features: Tensor, weights: Tensor | None = None) -> Tensor:  # (b, d), (w,) -> (b,)
        """The network's output, differentiable in `features`; with `weights` another network of the same shape."""
        if weights is None:  # steps move the weights in place: a graph that waits for its backward needs its own copy
            weights = self.weights.clone() if torch.is_grad_enabled() else self.weights
        parts = [part.view(shape) for part, shape in zip(weights.split(self.sizes), self.shapes, strict=True)]
        widen, widen_bias, wide_scale, wide_shift, narrow, narrow_bias, scale, shift, out, out_bias = parts
        wide = F.layer_norm(F.relu(F.linear(features, widen, widen_bias)), wide_scale.shape, wide_scale, wide_shift)
        change = F.layer_norm(F.relu(F.linear(wide, narrow, narrow_bias)), scale.shape, scale, shift)
        return F.linear(F.relu(change + features), out, out_bias).squeeze(dim=1)

    def step(self, features: Tensor, loss: Loss, *, largest_gradient: float | None = None) -> Tensor:
        """One update on the mean over ranks of `loss(self(features))`; returns this rank's loss before it."""
        return step_together([(self, features, loss)], largest_gradient=largest_gradient)

    def loss_and_gradient(self, features: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:  # -> scalar, (w,)
        with torch.enable_grad():  # a step is taken whatever the caller's grad mode is
            weights = self.weights.detach().requires_grad_()
            value = loss(self(features.detach(), weights))
            (gradient,) = torch.autograd.grad(value, weights)
        return value.detach(), gradient


def step_together(
    networks: Sequence[tuple[ResidualMLP, Tensor, Loss]],
    *,
    largest_gradient: float | None = None,
    rate_factor: float = 1.0,
) -> Tensor:
    """One update of several networks with one exchange between ranks; returns the sum of this rank's losses.

    `largest_gradient` is the length to which the gradient of all of them together is cut; `rate_factor` multiplies the
    optimizers' learning rates.
    """
    results = [network.loss_and_gradient(features, loss) for network, features, loss in networks]
    gradient = sum_over_ranks(torch.cat([gradient for _, gradient in results])) / world_size()
    if largest_gradient is not None:
        gradient = gradient * (largest_gradient / (gradient.norm() + 1e-6)).clamp(max=1)
    parts = gradient.split([len(part) for _, part in results])
    for (network, _, _), part in zip(networks, parts, strict=True):
        network.optimizer.step(network.weights, part, dict(network.named_buffers()), rate_factor=rate_factor)
    return torch.stack([value for value, _ in results]).sum()


def _shapes(d: int, h: int) -> list[tuple[int, ...]]:
    """Per layer: the matrix and bias of Linear, then scale and shift of the LayerNorm behind it."""
    return [(h, d), (h,), (h,), (h,), (d, h), (d,), (d,), (d,), (1, d), (1,)]


def _initial_weights(shapes: list[tuple[int, ...]], seed: int) -> Tensor:  # -> (w,)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for matrix, bias, *norm in (shapes[:4], shapes[4:8], shapes[8:]):
        bound = 1 / math.sqrt(matrix[1])
        parts += [torch.empty(shape).uniform_(-bound, bound, generator=generator) for shape in (matrix, bias)]
        parts += [torch.full(shape, float(value)) for shape, value in zip(norm, (1, 0), strict=False)]
    return torch.cat([part.flatten() for part in parts])
