"""What NeuCLIP's objective adds to a training step, measured on a CPU and projected to the paper's GPUs.

Towers are timed at a batch that fits (forward and backward, one thread), the objective at the paper's own B, m, d; both
grow linearly with the batch, so the share at the paper's batch follows. Prints two Markdown tables: the share, and its
projection to 8 H100. Usage: python benchmarks/objective_share.py [quick]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from neuclip import CLIP, NeuCLIP
from neuclip.models.towers import build_model

# name, pairs per forward here, paper's B, m, d, Gflop of one pair's forward (open_clip's docs/model_profile.csv), and
# of the paper's table of running times: its share of a step, and the rest of that step in seconds
SETTINGS = [
    ("RN50", 8, 1024, 4096, 1024, 18.18, 9.3, 0.480),
    ("ViT-B-32", 16, 2048, 4096, 512, 14.78, 6.0, 0.844),
    ("ViT-B-16", 4, 5120, 4096, 512, 41.09, 6.0, 0.888),
]
INNER_STEPS, GPUS = 10, 8
# Of an H100 SXM (NVIDIA's data sheet): float32 without tensor cores, bf16 dense, memory, NVLink one way.
FLOAT32, BF16, MEMORY, LINK = 67e12, 989e12, 3.35e12, 450e9
EFFICIENCY = 0.4  # of those peaks, for both; towers of CLIP trainers reach about that
LAUNCH, EXCHANGE = 5e-6, 30e-6  # seconds of a kernel launch and of a small collective
KERNELS = 22  # per update and side


def best(action: Callable[[], object], rounds: int) -> float:
    """Processor seconds of the quickest of several rounds."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return min(seconds)


def tower_seconds(name: str, pairs: int, rounds: int) -> float:
    """Forward and backward of both towers, per pair."""
    built = build_model(name)
    towers = built.towers.train()
    size = built.image_size
    images, tokens = torch.randn(pairs, 3, size, size), built.tokenize(["a photo of a small red fox"] * pairs)

    def step() -> None:
        image, text, *_ = towers(images, tokens)
        (image.sum() + text.sum()).backward()
        towers.zero_grad(set_to_none=True)

    step()
    return best(step, rounds) / pairs


def objective_seconds(batch: int, prototypes: int, width: int, rounds: int) -> tuple[float, float]:
    """One call with backward to the features: CLIP, and NeuCLIP with the paper's ten inner steps."""
    torch.manual_seed(0)
    image, text = (F.normalize(torch.randn(batch, width), dim=1).requires_grad_() for _ in range(2))
    seconds = []
    for objective in (CLIP(), NeuCLIP(width, num_prototypes=prototypes, inner_steps=INNER_STEPS)):

        def step(objective: torch.nn.Module = objective) -> None:
            objective(image, text, torch.tensor(30.0)).backward()

        for _ in range(-(-prototypes // batch)):
            objective(image, text, torch.tensor(30.0))  # fills the prototypes
        seconds.append(best(step, rounds))
    return seconds[0], seconds[1]


def projected(batch: int, prototypes: int, width: int, forward_gflop: float) -> tuple[float, float, float]:
    """Seconds per step on GPUS ranks: encoders, NeuCLIP's additional arithmetic and memory, its latencies."""
    towers = 3 * forward_gflop * 1e9 * batch / GPUS / (BF16 * EFFICIENCY)
    products = (8 * INNER_STEPS + 12) * batch * prototypes / GPUS * width / (FLOAT32 * EFFICIENCY)
    passes = 2 * INNER_STEPS * (6 * batch + 9 * width) * prototypes / GPUS * 4 / MEMORY
    sent = ((INNER_STEPS + 2) * 2 * batch + 2 * batch / GPUS * width) * (GPUS - 1) * 4 / LINK
    latency = 2 * (INNER_STEPS + 2) * (KERNELS * LAUNCH + EXCHANGE)
    return towers, products + passes + sent, latency


def share_tables(rounds: int) -> None:
    print("one CPU thread, float32; towers per pair at the batch that fits, objectives at the paper's B, m, d\n")
    print("| model | B, m, d | towers, per pair | towers, B pairs | CLIP's loss | NeuCLIP's | NeuCLIP adds | paper |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, pairs, batch, prototypes, width, _, paper, _ in SETTINGS:
        towers = tower_seconds(name, pairs, rounds)
        clip, neuclip = objective_seconds(batch, prototypes, width, rounds)
        added = (neuclip - clip) / (towers * batch + clip)
        print(
            f"| {name} | {batch}, {prototypes}, {width} | {towers:.2f} s | {towers * batch:.0f} s | {clip:.2f} s "
            f"| {neuclip:.2f} s | {added:.1%} | {paper} % |",
            flush=True,
        )
    print(f"\nprojection to {GPUS} H100, prototypes sharded, by counted operations, bytes, {EFFICIENCY:.0%} of peak\n")
    print("| model | work | launches and latency | of the paper's step | of a step with ideal towers | paper |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, _, batch, prototypes, width, gflop, paper, rest in SETTINGS:
        towers, work, latency = projected(batch, prototypes, width, gflop)
        print(
            f"| {name} | {work * 1e3:.1f} ms | {latency * 1e3:.1f} ms "
            f"| {(work + latency) / (rest + work + latency):.1%} "
            f"| {(work + latency) / (towers + work + latency):.1%} of {towers * 1e3:.0f} ms | {paper} % |"
        )


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    share_tables(rounds=1 if arguments == ["quick"] else 3)


if __name__ == "__main__":
    main(sys.argv[1:])
