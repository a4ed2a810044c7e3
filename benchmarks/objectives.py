"""The objectives against their peers: time beside open_clip's losses and bare matrix products, memory of large batches.

    python -m benchmarks.objectives                    # both tables: ten minutes on one core, 3 GB
    python -m benchmarks.objectives time --rounds 12
    python -m benchmarks.objectives memory

Times are processor seconds on one thread. Peers are timed in turn within one run and the best of several rounds counts,
so that a busy machine hurts all alike. Memory is how far one step raises the highest resident size of a process of its
own, beyond the features and their gradients.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.models import open_clip_module

SCALE, BIAS = torch.tensor(14.0, requires_grad=True), torch.tensor(-10.0, requires_grad=True)
INNER_STEPS = 10
MEMORY_GOALS = {"clip": 0.5, "minibatch": 0.5, "siglip": 0.5, "fastclip": 0.5, "neuclip": 1.0, "amorlip": 1.0}  # GB

Row = tuple[str, str, Callable[[], Any], Callable[[], Any], float]  # what, peer, ours, the peer's, goal of the ratio


def unit_rows(rows: int, width: int) -> Tensor:
    return F.normalize(torch.randn(rows, width), dim=1)


def losses(batch: int, width: int) -> Iterator[Row]:
    """A loss with its gradient in the features, the temperature and the bias."""
    image, text = (unit_rows(batch, width).requires_grad_() for _ in range(2))
    theirs = open_clip_module().loss
    clip, siglip = CLIP(), SigLIP()
    ours, peer = theirs.ClipLoss(), theirs.SigLipLoss()
    yield (
        f"CLIP, B {batch}, d {width}",
        "open_clip's ClipLoss",
        lambda: clip(image, text, SCALE).backward(),
        lambda: ours(image, text, SCALE).backward(),
        1.0,
    )
    yield (
        f"SigLIP, B {batch}, d {width}",
        "open_clip's SigLipLoss",
        lambda: siglip(image, text, SCALE, BIAS).backward(),
        lambda: peer(image, text, SCALE, BIAS).backward(),
        1.3 if batch < 4096 else 1.0,
    )


def inner_loop(batch: int, prototypes: int, width: int, goal: float) -> Row:
    """Ten updates of the prototypes of both sides, alone: a step with them less a step without."""
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

    return f"ten inner steps, B {batch}, m {prototypes}, d {width}", "their bare products", ours, bare, goal


def seconds(action: Callable[[], Any]) -> float:
    """What the action measured itself, or the processor time that it took."""
    start = time.process_time()
    own = action()
    return own if isinstance(own, float) else time.process_time() - start


def time_table(rounds: int) -> None:
    torch.set_num_threads(1)
    rows = [*losses(1024, 512), *losses(4096, 512), inner_loop(512, 2048, 256, 1.25), inner_loop(1024, 4096, 512, 1.2)]
    print(f"one thread, best of {rounds} rounds\n")
    print("| what | peer | ours | peer's | ratio | goal |\n| --- | --- | --- | --- | --- | --- |")
    for what, peer, ours, theirs, goal in rows:
        best = [math.inf, math.inf]
        for _ in range(rounds):
            best = [min(least, seconds(action)) for least, action in zip(best, (ours, theirs), strict=True)]
        ratio = best[0] / best[1]
        verdict = "" if ratio <= goal else " MISSED"
        times = f"{best[0] * 1e3:.0f} ms | {best[1] * 1e3:.0f} ms"
        print(f"| {what} | {peer} | {times} | {ratio:.2f}x | {goal:.2f}x{verdict} |", flush=True)


def memory_table(batch: int, width: int) -> None:
    print(f"\nB {batch}, d {width}, one process, beyond features and their gradients\n")
    print("| objective | highest | goal |\n| --- | --- | --- |")
    for name, goal in MEMORY_GOALS.items():
        command = [sys.executable, "-m", "benchmarks.objectives", "memory-of", name, str(batch), str(width)]
        found = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"| {name} | {found:.2f} GB | {goal:.1f} GB{'' if found <= goal else ' MISSED'} |", flush=True)


def memory_of(name: str, batch: int, width: int) -> float:
    build = {
        "clip": CLIP,
        "minibatch": lambda: CLIP(form="minibatch"),
        "siglip": SigLIP,
        "fastclip": lambda: FastCLIP(1_000_000),
        "neuclip": lambda: NeuCLIP(width),
        "amorlip": lambda: AmorLIP(width),
    }[name]
    image, text = (unit_rows(batch, width).requires_grad_() for _ in range(2))
    image.grad, text.grad, ids = torch.zeros_like(image), torch.zeros_like(text), torch.arange(batch)
    build()(image[:64], text[:64], SCALE, BIAS, sample_ids=ids[:64]).backward()  # libraries load before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    build()(image, text, SCALE, BIAS, sample_ids=ids).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["time", "memory"], help="time, memory")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.what[0] == "memory-of":
        print(memory_of(arguments.what[1], int(arguments.what[2]), int(arguments.what[3])))
        sys.exit()
    if "time" in arguments.what:
        time_table(arguments.rounds)
    if "memory" in arguments.what:
        memory_table(32_768, 512)
