"""The row optimizer against torch.optim, for rows of prototypes and for one flat vector of weights."""

from __future__ import annotations

import pytest
import torch
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from torch import Tensor

from tests.objectives.features import unit

TORCHS = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
ROWS, WIDTH = 4, 3


def state_for(optimizer: RowOptimizer, shape: tuple[int, ...]) -> dict[str, Tensor]:
    widths = optimizer.state_rows(shape[-1]).items()
    return {name: torch.full((*shape[:-1], w), initial, dtype=torch.float64) for name, (w, initial) in widths}


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (ROWS * WIDTH,)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("name", TORCHS)
def test_steps_are_those_of_torchs_optimizers_with_adams_decay_decoupled(name, weight_decay, shape):
    more = {"initial_accumulator_value": 0.1} if name == "adagrad" else {}
    optimizer = RowOptimizer(name, 0.05, weight_decay, initial_accumulator=0.1)
    rows = unit(ROWS * WIDTH, seed=0).view(shape)
    parameter = torch.nn.Parameter(rows.clone())
    theirs = TORCHS[name]([parameter], lr=0.05, weight_decay=weight_decay, **more)
    state = state_for(optimizer, shape)
    for step in range(5):
        gradient = unit(ROWS * WIDTH, seed=step + 1).view(shape)
        parameter.grad = gradient.clone()
        theirs.step()
        optimizer.step(rows, gradient.clone(), state)
    assert torch.allclose(rows, parameter, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", TORCHS)
def test_forgotten_rows_go_on_like_new_ones_and_the_others_like_before(name):
    optimizer = RowOptimizer(name, 0.05, initial_accumulator=0.1)
    rows, gradient = unit(ROWS, WIDTH, seed=0), unit(ROWS, WIDTH, seed=1)
    state = state_for(optimizer, (ROWS, WIDTH))
    optimizer.step(rows, gradient.clone(), state)
    kept = {key: value.clone() for key, value in state.items()}
    optimizer.reset(state, torch.tensor([0, 2]))
    for key, fresh in state_for(optimizer, (ROWS, WIDTH)).items():
        assert torch.equal(state[key][[0, 2]], fresh[[0, 2]]) and torch.equal(state[key][[1, 3]], kept[key][[1, 3]])


@pytest.mark.parametrize("name", TORCHS)
def test_a_rank_without_rows_steps_without_an_error(name):
    optimizer = RowOptimizer(name, 0.05, weight_decay=0.1)
    empty = torch.zeros(0, WIDTH, dtype=torch.float64)
    optimizer.step(empty, empty.clone(), state_for(optimizer, (0, WIDTH)))
