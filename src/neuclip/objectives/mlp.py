"""Two small residual networks, one per side, from a feature to a number: for AmorLIP and NeuCLIP's `network="mlp"`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip.distributed.collectives import sum_over_ranks, world_size
from neuclip.objectives.pairs import Pairs
from neuclip.objectives.state import adam_step

ROWS = 4096  # anchors at a time, to bound memory: an update needs about ten numbers per feature
Loss = Callable[[slice, Tensor], Tensor]  # rows of some anchors and the networks' output (2, c) -> loss (2, c)


class ResidualMLPs(nn.Module):
    """Linear(d, d) - ReLU - LayerNorm - Linear(d, d) - ReLU - LayerNorm - (+ input) - ReLU - Linear(d, 1), twice.

    All weights of a side are one row of a buffer, and Adam's moments are rows of the same length. Nothing here is a
    parameter, an update of both networks needs one exchange between ranks, and two networks are averaged by averaging
    two tensors.
    """

    weights: Tensor  # (2, w)
    first: Tensor  # (2, w)
    second: Tensor  # (2, w)
    steps: Tensor  # (1,)

    def __init__(self, embed_dim: int, rate: float, seed: int = 0) -> None:
        super().__init__()
        d, self.rate = embed_dim, rate
        # Per layer: the matrix and bias of Linear, then scale and shift of the LayerNorm behind it.
        self.shapes = [(d, d), (d,), (d,), (d,), (d, d), (d,), (d,), (d,), (1, d), (1,)]
        for name in ("weights", "first", "second"):
            self.register_buffer(name, torch.zeros(2, sum(math.prod(shape) for shape in self.shapes)))
        self.register_buffer("steps", torch.zeros(1))
        self.reinitialise(seed)

    @torch.no_grad()
    def reinitialise(self, seed: int) -> None:
        """Draw new weights as torch.nn.Linear and LayerNorm do, equal on every rank, and reset Adam's moments."""
        for side in (0, 1):
            generator, parts = torch.Generator().manual_seed(seed + side), []
            for matrix, bias, *norm in (self.shapes[:4], self.shapes[4:8], self.shapes[8:]):
                bound = 1 / math.sqrt(matrix[1])
                blank = (torch.empty(shape, device="cpu") for shape in (matrix, bias))
                parts += [part.uniform_(-bound, bound, generator=generator) for part in blank]
                scale_and_shift = zip(norm, (1.0, 0.0), strict=False)  # the last layer has none
                parts += [torch.full(shape, value, device="cpu") for shape, value in scale_and_shift]
            self.weights[side] = torch.cat([part.flatten() for part in parts])
        for state in (self.first, self.second, self.steps):
            state.zero_()

    def forward(self, features: Tensor, weights: Tensor | None = None) -> Tensor:  # (2, b, d), (2, w) -> (2, b)
        """The networks' output, differentiable in `features`. `weights`: use these instead of the own weights."""
        if weights is None:  # `step` changes the weights in place: a graph that waits for backward needs a copy
            weights = self.weights.clone() if torch.is_grad_enabled() else self.weights
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = [part.view(2, *shape) for part, shape in zip(weights.split(sizes, dim=1), self.shapes, strict=True)]
        wide = layer(features, *parts[:4])
        return linear(F.relu(layer(wide, *parts[4:8]) + features), *parts[8:]).squeeze(dim=2)

    def step(self, pairs: Pairs, loss: Loss, *, clip_norm: float | None = None) -> Tensor:
        """Take one Adam step on the mean of `loss` over ranks and sound anchors. Returns this rank's mean before the
        step, both sides together. `clip_norm`: clip the gradient of both networks together to this norm."""
        features, sound, b = pairs.features.detach(), pairs.sound[pairs.local], pairs.features.shape[1]
        gradient, total = torch.zeros_like(self.weights), features.new_zeros(())
        for start in range(0, b, ROWS):
            rows = slice(start, start + ROWS)
            with torch.enable_grad():  # the caller may have disabled gradients
                weights = self.weights.detach().requires_grad_()
                value = (loss(rows, self(features[:, rows], weights)) * sound[rows]).sum() / b
                gradient += torch.autograd.grad(value, weights)[0]
            total += value.detach()
        gradient = sum_over_ranks(gradient) / world_size()
        if clip_norm is not None:
            gradient = gradient * (clip_norm / (gradient.norm() + 1e-6)).clamp(max=1)
        moving = pairs.sound.any().to(gradient.dtype)
        adam_step(self.weights, gradient, self.rate, self.first, self.second, self.steps, sound=moving)
        return total


def linear(features: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:  # (2, b, d), (2, h, d), (2, h) -> (2, b, h)
    return torch.baddbmm(bias[:, None], features, matrix.transpose(1, 2))


def layer(features: Tensor, matrix: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    wide = F.relu(linear(features, matrix, bias))
    return torch.addcmul(shift[:, None], F.layer_norm(wide, wide.shape[2:]), scale[:, None])


class MLPNetwork(ResidualMLPs):
    """The paper's ablation, log g = MLP(e) - s_ii / tau: a network that sees only the anchor cannot know the positive
    similarity, which is therefore subtracted from its output. It has the methods of `Prototypes`."""

    ready = True

    def restart(self, pairs: Pairs) -> None:
        """Do nothing: features cannot become weights of an MLP."""

    def learn(self, pairs: Pairs, target: Tensor, loss: Callable[..., Tensor], tau: Tensor, *, steps: int) -> None:
        positive = (pairs.positive / tau).detach()
        for _ in range(steps):
            self.step(pairs, lambda rows, output: loss(target[:, rows], output - positive[rows]))

    def log_g(self, pairs: Pairs, tau: Tensor) -> Tensor:  # (2, b)
        return self(pairs.features) - pairs.positive / tau
