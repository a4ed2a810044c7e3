"""NeuCLIP's inner loop against the time of its bare matrix products, and against autograd with torch's Adagrad.

All three are timed in turn within one run and the best of several rounds counts, so that a busy machine hurts all
alike. Prints a Markdown table. Usage: python benchmarks/inner_loop.py [rounds]
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from neuclip.objectives.normalizers.prototypes import Prototypes, anchors_at
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from torch import Tensor

from neuclip.objectives.formulas import add_eps, calibration_ratio

SHAPES = [(128, 512, 128), (512, 2048, 256), (1024, 4096, 512)]  # batch, prototypes, width
STEPS = 10
TAU, EPS = torch.tensor(0.05), 1e-6


def bare_products(rows: Tensor, anchors: Tensor, positive: Tensor, target: Tensor) -> None:
    scores = torch.empty(len(anchors), len(rows))
    for _ in range(STEPS):
        torch.mm(anchors, rows.T, out=scores)
        torch.mm(scores.T, anchors)


def closed_form(rows: Tensor, anchors: Tensor, positive: Tensor, target: Tensor) -> None:
    prototypes = Prototypes(*rows.shape, RowOptimizer("adagrad", learning_rate=0.05))
    prototypes.rows.copy_(rows)
    side = anchors_at(TAU, anchors, positive, torch.tensor(float(len(rows))).log())
    prototypes.learn(side, target, steps=STEPS, active=len(rows), eps=EPS, fit="unified")


def autograd(rows: Tensor, anchors: Tensor, positive: Tensor, target: Tensor) -> None:
    parameter = torch.nn.Parameter(rows.clone())
    optimizer = torch.optim.Adagrad([parameter], lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        excess = (anchors @ F.normalize(parameter, dim=1).T - positive[:, None]) / TAU
        alpha = add_eps(torch.logsumexp(excess, dim=1) - math.log(len(rows)), EPS)
        (TAU * (calibration_ratio(target, alpha) + alpha).mean()).backward()
        optimizer.step()


def seconds(action: Callable[..., None], *arguments: Tensor) -> float:
    """Of the processor, not of the clock: other programs on the machine take the clock's."""
    start = time.process_time()
    action(*arguments)
    return time.process_time() - start


def main(rounds: int) -> None:
    torch.set_num_threads(1)  # ratios on one thread repeat best
    torch.manual_seed(0)
    print(f"one thread, {STEPS} updates of one side, best of {rounds} rounds\n")
    print("| B | m | d | bare products | closed form | autograd + Adagrad |\n| --- | --- | --- | --- | --- | --- |")
    for batch, prototypes, width in SHAPES:
        anchors, rows = (F.normalize(torch.randn(n, width), dim=1) for n in (batch, prototypes))
        positive, target = torch.rand(batch) * 0.5, torch.randn(batch) - 3
        best = dict.fromkeys((bare_products, closed_form, autograd), math.inf)
        for _ in range(rounds):
            for action in best:
                best[action] = min(best[action], seconds(action, rows, anchors, positive, target))
        bare = best[bare_products]
        ratios = [f"{best[action] / bare:.2f}x" for action in (closed_form, autograd)]
        print(f"| {batch} | {prototypes} | {width} | {bare * 1e3:.0f} ms | {ratios[0]} | {ratios[1]} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
