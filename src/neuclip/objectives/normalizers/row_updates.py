"""How rows move along their gradient: torch.optim's updates, elementwise and in place, so that a block of rows and its
sums can live anywhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

ADAGRAD_EPS = 1e-10  # torch.optim.Adagrad's
ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8  # torch.optim.Adam's


@torch.no_grad()
def adagrad_update(rows: Tensor, sums: Tensor, gradient: Tensor, *, learning_rate: float) -> None:
    """torch.optim.Adagrad; on a CPU in one pass over the rows instead of four."""
    if not len(rows):
        return
    adagrad(
        [rows],
        [gradient],
        [sums],
        [torch.zeros(())],  # steps; without a decay of the rate nobody looks at them
        fused=rows.device.type == "cpu",
        lr=learning_rate,
        weight_decay=0.0,
        lr_decay=0.0,
        eps=ADAGRAD_EPS,
        maximize=False,
    )


@torch.no_grad()
def adam_update(
    rows: Tensor,
    first: Tensor,
    second: Tensor,
    steps: Tensor,
    gradient: Tensor,
    scratch: Tensor,
    *,
    learning_rate: float,
) -> None:  # (m, d) each, steps (m, 1)
    """torch.optim.Adam, with a count of steps per row: a renewed row starts its averages anew."""
    beta1, beta2 = ADAM_BETAS
    steps += 1
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    torch.div(second, 1 - beta2**steps, out=scratch)
    scratch.sqrt_().add_(ADAM_EPS).mul_(1 - beta1**steps)
    rows.addcdiv_(first, scratch, value=-learning_rate)


@torch.no_grad()
def sgd_update(rows: Tensor, gradient: Tensor, *, learning_rate: float) -> None:
    rows.add_(gradient, alpha=-learning_rate)
