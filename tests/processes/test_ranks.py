"""Two real processes give the gradient of one: the seam on which distributed training will hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing
from torch import distributed as dist

from neuclip import CLIP, NeuCLIP
from neuclip.objectives.objective import Objective

B, INPUT, D, STEPS = 8, 5, 4, 3


def objective_named(name: str) -> Objective:
    if name == "clip":
        return CLIP()
    return NeuCLIP(D, num_prototypes=11, inner_steps=2, restart_every=2, network_lr=0.1)


def gradients(name: str, first: int, last: int, ranks: int) -> list[Tensor]:
    """The mean over ranks of each rank's gradients after some steps of which this rank sees rows first..last."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS, 2, B, INPUT, generator=generator, dtype=torch.float64)
    weights = [torch.randn(INPUT, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    objective, found = objective_named(name), []
    for step in range(STEPS):
        image, text = (F.normalize(x[first:last] @ w, dim=1) for x, w in zip(inputs[step], weights, strict=True))
        found += torch.autograd.grad(objective(image, text, scale), [*weights, scale])
    if ranks > 1:
        for gradient in found:
            dist.all_reduce(gradient)
            gradient /= ranks
    return [*found, *objective.buffers()]


def one_rank(rank: int, ranks: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    local = B // ranks
    torch.save(gradients(name, rank * local, (rank + 1) * local, ranks), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip", "neuclip"])
def test_two_processes_give_the_gradients_and_state_of_one(name, tmp_path):
    multiprocessing.spawn(one_rank, args=(2, name, str(tmp_path)), nprocs=2)
    whole = gradients(name, 0, B, ranks=1)
    for rank in range(2):
        parts = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert len(parts) == len(whole)
        for part, want in zip(parts, whole, strict=True):
            assert torch.allclose(part, want, rtol=1e-10, atol=1e-12)
