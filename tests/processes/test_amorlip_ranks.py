"""AmorLIP's options on two processes: divergences over the whole batch, adaptive temperature, bytes on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing
from torch import distributed as dist

from neuclip import AmorLIP
from neuclip.distributed.collectives import counted_traffic

B, D, STEPS = 8, 4, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "adaptive": {"adaptive_temperature": True, "mask_duplicates": True},
    "kl_asymmetric": {"divergence": "kl_asymmetric"},
    "kl_symmetric": {"divergence": "kl_symmetric"},
    "js": {"divergence": "js", "reinitialise_every": 0},
}


def run(options: dict[str, Any], rank: int, ranks: int) -> dict[str, Tensor]:
    """Gradients, averaged over processes as DDP does, and all state, after five steps in three epochs."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS, 2, B, D, generator=generator, dtype=torch.float64)
    towers = torch.randn(2, D, D, generator=generator, dtype=torch.float64).requires_grad_()
    scale = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    captions = torch.arange(B) % 6
    mine = slice(rank * B // ranks, (rank + 1) * B // ranks)
    objective = AmorLIP(D, epoch_samples=2 * B, total_samples=6 * B, network_lr=0.01, **options)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        image, text = (F.normalize(x @ w, dim=1) for x, w in zip(inputs[step, :, mine], towers, strict=True))
        with counted_traffic() as traffic:
            loss = objective(image, text, scale, caption_ids=captions[mine])
        for name, value in zip(("towers", "scale"), torch.autograd.grad(loss, [towers, scale]), strict=True):
            if ranks > 1:
                dist.all_reduce(value)
            found[f"{name} {step}"] = value / ranks
    found["bytes"] = torch.tensor(traffic.bytes)
    return found | dict(objective.named_buffers())


def one_process(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.save({name: run(options, rank, ranks) for name, options in OPTIONS.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(one_process, args=(2, str(folder)), nprocs=2)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_two_processes_give_the_gradients_and_networks_of_one(name, two):
    want = run(OPTIONS[name], 0, 1)
    for found in two:
        assert found[name].keys() == want.keys()
        for key in want.keys() - {"bytes"}:
            assert torch.allclose(found[name][key], want[key], rtol=1e-10, atol=1e-12), key


@pytest.mark.slow
def test_a_process_sends_its_features_once_and_one_gradient_per_network_update(two):
    ranks, local, width = 2, B // 2, 8
    features = (ranks - 1) * local * 2 * D * width
    numbers_of_anchors = (ranks - 1) * local * 4 * width
    captions = (ranks - 1) * local * 8
    networks = 3 * 2 * (ranks - 1) / ranks * 2 * (2 * D * D + 7 * D + 1) * width
    assert two[0]["adaptive"]["bytes"] == features + numbers_of_anchors + captions + networks
