"""One optimizer for all that a method learns by itself: rows of prototypes, and the flat weights of small networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from neuclip.settings.objectives import NeuCLIPSettings

ADAGRAD_EPS = 1e-10  # torch.optim.Adagrad's
ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8  # torch.optim.AdamW's


@dataclass(frozen=True)
class RowOptimizer:
    """torch.optim's Adagrad, AdamW or SGD, elementwise and in place.

    Whoever owns the rows also keeps the optimizer's state beside them, as buffers or as blocks of a sharded state:
    `state_rows` says what to keep, `step` and `reset` are given it. Weight decay is decoupled under Adam, as AdamW has
    it, and part of the gradient otherwise.

    >>> optimizer = RowOptimizer("adam", learning_rate=1e-3)
    >>> sorted(optimizer.state_rows(width=8))
    ['first', 'second', 'steps']
    """

    name: Literal["adagrad", "adam", "sgd"]
    learning_rate: float
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0  # of AdaGrad's sums of squared gradients
    betas: tuple[float, float] = ADAM_BETAS
    eps: float = ADAM_EPS  # of Adam

    @classmethod
    def of(cls, settings: NeuCLIPSettings) -> RowOptimizer:
        return cls(
            settings.optimizer,
            settings.learning_rate,
            settings.network_weight_decay,
            settings.initial_accumulator,
            settings.network_betas or ADAM_BETAS,
            settings.network_eps or ADAM_EPS,
        )

    def state_rows(self, width: int) -> dict[str, tuple[int, float]]:
        """What one row of `width` numbers needs: by name, how many numbers, and their initial value."""
        if self.name == "adagrad":
            return {"sums": (width, float(self.initial_accumulator))}
        if self.name == "adam":  # the count is per row: a renewed row starts its averages anew
            return {"first": (width, 0.0), "second": (width, 0.0), "steps": (1, 0.0)}
        return {}

    def reset(self, state: dict[str, Tensor], which: Tensor | slice = slice(None)) -> None:
        """Forget the rows `which`."""
        for name, (_, initial) in self.state_rows(width=1).items():
            state[name][which] = initial

    @torch.no_grad()
    def step(
        self,
        rows: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        rate_factor: float = 1.0,
        scratch: Tensor | None = None,
    ) -> None:  # (m, d) or (w,), like it, (m, ...) or (...) each
        """Move `rows` along `gradient`, which may be overwritten, as may `scratch` of the same shape."""
        rate = self.learning_rate * rate_factor
        if self.weight_decay and self.name == "adam":
            rows.mul_(1 - rate * self.weight_decay)
        elif self.weight_decay:
            gradient.add_(rows, alpha=self.weight_decay)
        if self.name == "adagrad":
            self._adagrad(rows, gradient, rate, state["sums"])
        elif self.name == "adam":
            scratch = torch.empty_like(rows) if scratch is None else scratch
            self._adam(rows, gradient, rate, state["first"], state["second"], state["steps"], scratch)
        else:
            rows.add_(gradient, alpha=-rate)

    @staticmethod
    def _adagrad(rows: Tensor, gradient: Tensor, rate: float, sums: Tensor) -> None:
        """On a CPU in one pass over the rows instead of four."""
        if not len(rows):
            return
        adagrad(
            [rows],
            [gradient],
            [sums],
            [torch.zeros(())],  # steps; without a decay of the rate nobody looks at them
            fused=rows.device.type == "cpu",
            lr=rate,
            weight_decay=0.0,
            lr_decay=0.0,
            eps=ADAGRAD_EPS,
            maximize=False,
        )

    def _adam(
        self,
        rows: Tensor,
        gradient: Tensor,
        rate: float,
        first: Tensor,
        second: Tensor,
        steps: Tensor,
        scratch: Tensor,
    ) -> None:
        beta1, beta2 = self.betas
        steps += 1
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        torch.div(second, 1 - beta2**steps, out=scratch)
        scratch.sqrt_().add_(self.eps).mul_(1 - beta1**steps)
        rows.addcdiv_(first, scratch, value=-rate)
