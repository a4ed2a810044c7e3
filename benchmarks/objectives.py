"""Compares the time of the objectives with open_clip's losses and with bare matrix products, and measures their memory
for a batch of 32,768."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.table import Row
from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.models import open_clip_module

SCALE, BIAS = torch.tensor(14.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)
INNER_STEPS = 10
LARGE, WIDTH = 32_768, 512  # batch and width for the memory
MEMORY_GOALS = {"clip": 0.5, "minibatch": 0.5, "siglip": 0.5, "fastclip": 0.5, "neuclip": 1.0, "amorlip": 1.0}  # GB
BUILD: dict[str, Callable[[], Any]] = {
    "clip": CLIP,
    "minibatch": lambda: CLIP(form="minibatch"),
    "siglip": SigLIP,
    "fastclip": lambda: FastCLIP(1_000_000),
    "neuclip": lambda: NeuCLIP(WIDTH),
    "amorlip": lambda: AmorLIP(WIDTH),
}


def unit_rows(rows: int, width: int) -> Tensor:
    return F.normalize(torch.randn(rows, width), dim=1)


def losses() -> Iterator[Row]:
    """The time of a loss and its gradient with respect to features, temperature and bias."""
    theirs = open_clip_module().loss
    for batch in (1024, 4096):
        image, text = (unit_rows(batch, WIDTH).requires_grad_() for _ in range(2))
        for name, ours, peer, extra, goal in (
            ("CLIP", CLIP(), theirs.ClipLoss(), (SCALE,), 1.0),
            ("SigLIP", SigLIP(), theirs.SigLipLoss(), (SCALE, BIAS), 1.3 if batch < 4096 else 1.0),
        ):
            yield Row(
                f"{name}'s loss and gradient, B {batch}, d {WIDTH}",
                f"open_clip's {type(peer).__name__}",
                lambda loss=ours, image=image, text=text, extra=extra: loss(image, text, *extra).backward(),
                lambda loss=peer, image=image, text=text, extra=extra: loss(image, text, *extra).backward(),
                goal,
            )


def inner_steps() -> Iterator[Row]:
    yield _inner_steps(512, 2048, 256, goal=1.25)
    yield _inner_steps(1024, 4096, 512, goal=1.2)


def _inner_steps(batch: int, prototypes: int, width: int, goal: float) -> Row:
    """The time of ten updates of the prototypes of both sides: a step with them minus a step without."""
    image, text = unit_rows(batch, width), unit_rows(batch, width)
    options: dict[str, Any] = {"num_prototypes": prototypes, "restart_every": 0, "network_lr": 0.05}
    learning, still = (NeuCLIP(width, inner_steps=steps, **options) for steps in (INNER_STEPS, 0))
    for objective in (learning, still):
        for _ in range(-(-prototypes // batch)):
            objective(image, text, SCALE)

    def ours() -> float:
        start = time.process_time()
        learning(image, text, SCALE)
        middle = time.process_time()
        still(image, text, SCALE)
        return (middle - start) - (time.process_time() - middle)

    rows, scores = unit_rows(prototypes, width), torch.empty(batch, prototypes)

    def bare() -> None:
        for _ in range(2 * INNER_STEPS):
            torch.mm(image, rows.T, out=scores)
            torch.mm(scores.T, image)

    return Row(f"ten inner steps, B {batch}, m {prototypes}, d {width}", "their bare products", ours, bare, goal)


def memory() -> Iterator[Row]:
    """The memory of one step beyond features and gradients: the increase of the peak resident size of a new process."""
    for name, goal in MEMORY_GOALS.items():
        what = f"memory of {name}, B {LARGE:,}, d {WIDTH}"
        yield Row(what, "goal", lambda name=name: _memory_of(name), lambda goal=goal: goal * 1e9, 1.0, in_bytes=True)


def _memory_of(name: str) -> float:
    command = [sys.executable, "-m", "benchmarks.objectives", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _raise_memory(name: str) -> float:
    image, text = (unit_rows(LARGE, WIDTH).requires_grad_() for _ in range(2))
    image.grad, text.grad, ids = torch.zeros_like(image), torch.zeros_like(text), torch.arange(LARGE)
    BUILD[name]()(image[:64], text[:64], SCALE, BIAS, sample_ids=ids[:64]).backward()  # loads libraries first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    BUILD[name]()(image, text, SCALE, BIAS, sample_ids=ids).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024.0


if __name__ == "__main__":
    print(_raise_memory(sys.argv[1]))
