"""Bytes that each rank sends per step, counted in real processes, beside the formulas of docs/scaling.md.

Prints a Markdown table. Usage: python benchmarks/traffic.py [ranks] (default 4, by gloo on this machine)
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import multiprocessing

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.distributed.collectives import counted_traffic
from neuclip.objectives.objective import Objective

BATCH, WIDTH, PROTOTYPES, INNER_STEPS, SAMPLES = 512, 128, 1024, 10, 10_000
FLOAT, ID = 4, 8  # bytes

METHODS: dict[str, Callable[[], Objective]] = {
    "CLIP": CLIP,
    "SigLIP": SigLIP,
    "FastCLIP v3": lambda: FastCLIP(SAMPLES),
    "AmorLIP": lambda: AmorLIP(WIDTH),
    "NeuCLIP, detached": lambda: NeuCLIP(WIDTH, num_prototypes=PROTOTYPES, alpha_gradient="detached"),
    "NeuCLIP": lambda: NeuCLIP(WIDTH, num_prototypes=PROTOTYPES),
    "NeuCLIP, MLP": lambda: NeuCLIP(WIDTH, network="mlp"),
}


def predicted(method: str, k: int) -> float:
    """docs/scaling.md, with sample ids; K ranks, b = B / K."""
    b, d, steps = BATCH / k, WIDTH, INNER_STEPS
    features, ids, four = (k - 1) * 2 * b * d * FLOAT, (k - 1) * b * ID, (k - 1) * 4 * b * FLOAT
    mlp = 2 * (2 * d * d + 7 * d + 1)
    return {
        "CLIP": features + ids + four,
        "SigLIP": features + ids,
        "FastCLIP v3": features + ids + four + (k - 1) * 2 * b * FLOAT + 2 * (k - 1) / k * 2 * BATCH * FLOAT,
        "AmorLIP": features + ids + four + 3 * 2 * (k - 1) / k * mlp * FLOAT,
        "NeuCLIP, detached": features + ids + four + (k - 1) * (3 * b + (steps + 2) * 2 * BATCH) * FLOAT,
        "NeuCLIP": 2 * features + ids + four + (k - 1) * (3 * b + (steps + 2) * 2 * BATCH) * FLOAT,
        "NeuCLIP, MLP": features + ids + four + steps * 2 * (k - 1) / k * mlp * FLOAT,
    }[method]


def one_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    counted = {}
    for name, build in METHODS.items():
        objective = build()
        for step in range(3):  # the third: filled, nothing first about it
            torch.manual_seed(ranks * step + rank)
            rows = torch.randn(2, BATCH // ranks, WIDTH)
            image, text = (F.normalize(x, dim=1).requires_grad_() for x in rows)
            ids = torch.arange(BATCH // ranks) + rank * BATCH // ranks
            with counted_traffic() as traffic:
                objective(image, text, torch.tensor(14.0), torch.tensor(-10.0), sample_ids=ids).backward()
        counted[name] = traffic.bytes
    if rank == 0:
        torch.save(counted, Path(folder) / "counted.pt")
    dist.destroy_process_group()


def main(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(one_rank, args=(ranks, folder), nprocs=ranks)
        counted = torch.load(Path(folder) / "counted.pt", weights_only=True)
    print(f"{ranks} ranks, B = {BATCH}, d = {WIDTH}, m = {PROTOTYPES}, float32; bytes sent per step and rank\n")
    print("| method | counted | by formula |\n| --- | --- | --- |")
    for name, sent in counted.items():
        print(f"| {name} | {sent:,} | {predicted(name, ranks):,.0f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
