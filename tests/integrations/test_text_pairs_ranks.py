"""Two real ranks with hard negatives give the loss and the gradient of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from neuclip.integrations.text_pairs import TextPairs
from tests.builders.processes import on_ranks
from tests.objectives.features import close, unit

pytestmark = pytest.mark.slow

B, K, D, RANKS = 8, 2, 6, 2


def losses_and_gradients(rows: slice) -> list[Tensor]:
    """Three steps over these rows of the batch: loss and gradient of an encoder, averaged over ranks as DDP does it."""
    objective = TextPairs(D, num_prototypes=11, inner_steps=2, network_lr=0.1, restart="rolling")
    weight = unit(D, D, seed=99).requires_grad_()
    found = []
    for step in range(3):
        texts = (unit(B, D, seed=step), unit(B, D, seed=step + 10), unit(B, K, D, seed=step + 20))
        query, document, hard = (F.normalize(text[rows] @ weight, dim=-1) for text in texts)
        loss = objective(query, document, torch.tensor(10.0, dtype=torch.float64), hard)
        (gradient,) = torch.autograd.grad(loss, weight)
        found += [loss.detach(), gradient]
    return found


def on_rank(folder: Path) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    found = losses_and_gradients(slice(rank * B // RANKS, (rank + 1) * B // RANKS))
    for value in found:
        distributed.all_reduce(value)
        value /= RANKS
    if rank == 0:
        torch.save(found, folder / "found.pt")
    distributed.destroy_process_group()


def test_two_ranks_give_the_loss_and_the_gradient_of_one(tmp_path):
    assert [ended.code for ended in on_ranks(RANKS, on_rank, tmp_path)] == [0] * RANKS
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert all(close(got, want, 1e-10) for got, want in zip(found, losses_and_gradients(slice(B)), strict=True))
