"""Blocks of a state: what a rank keeps, saves and loads, and the table by sample id."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP
from neuclip.objectives.state import SampleTable
from tests.builders.processes import threads
from tests.objectives.features import unit

D = 5


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=9.0), b.nan_to_num(nan=9.0))


def call(objective, size: int = 3) -> None:
    objective(unit(size, D, seed=0), unit(size, D, seed=1), torch.tensor(10.0), sample_ids=torch.arange(size))


# The table.


def test_what_was_written_comes_back_and_the_rest_is_not_a_number():
    table = SampleTable(10, columns=2)
    assert table.read(ids(0, 9)).isnan().all()
    table.write(ids(7, 2, 7), torch.tensor([[0.0, -3.5], [-math.inf, 1e-30], [0.0, -3.5]]))
    assert same(table.read(ids(2, 3, 7)), torch.tensor([[-math.inf, 1e-30], [math.nan] * 2, [0.0, -3.5]]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_reads_what_any_of_them_owns_and_keeps_its_own_part_only(ranks):
    def work(rank: int) -> tuple[Tensor, int]:
        table = SampleTable(3, columns=2)  # of four ranks one has none
        table.write(ids(2), torch.tensor([[5.0, 6.0]]))
        table.write(ids(0, 2), torch.tensor([[1.0, 2.0], [7.0, 8.0]]))
        return table.read(ids(2, 1, 0)), len(table.rows)

    found = threads(ranks, work)
    assert [own for _, own in found] == ([2, 1] if ranks == 2 else [1, 1, 1, 0])
    assert all(same(read, torch.tensor([[7.0, 8.0], [math.nan] * 2, [1.0, 2.0]])) for read, _ in found)


# Blocks and whole states.


def test_state_is_no_parameter_and_what_is_sharded_no_buffer_but_moves_with_the_objective():
    for objective in (FastCLIP(9), NeuCLIP(D, num_prototypes=4)):
        assert [*objective.parameters()] == [] and {name for name, _ in objective.named_buffers()} <= {
            "normalizer.ring"
        }
        rows = {name: x for name, x in objective.double().state_dict().items() if isinstance(x, Tensor)}
        assert {x.dtype for name, x in rows.items() if not name.endswith(("owners", "ring"))} == {torch.float64}
        assert all(x.dtype == torch.int64 for name, x in rows.items() if name.endswith(("owners", "ring")))


def test_float64_features_make_the_state_float64_and_it_loads_as_precisely_as_it_was_saved():
    for build in (lambda: FastCLIP(9), lambda: NeuCLIP(D, num_prototypes=4), lambda: AmorLIP(D)):
        objective, other = build(), build()
        call(objective)
        other.load_state_dict(objective.state_dict())
        for name, value in objective.state_dict().items():
            if isinstance(value, Tensor) and "network" not in name and name not in ("average", "previous"):
                assert same(other.state_dict()[name], value), name


def test_a_saved_state_does_not_change_with_what_it_was_saved_from():
    objective = NeuCLIP(D, num_prototypes=4, restart_every=1)
    call(objective)
    state = objective.state_dict()
    kept = {name: x.clone() for name, x in state.items() if isinstance(x, Tensor)}
    call(objective, 2)
    assert all(torch.equal(state[name], x) for name, x in kept.items())


def test_bytes_are_those_of_every_rank_and_those_spread_over_all():
    assert FastCLIP(9).state_bytes() == (0, 9 * 2 * 4)
    assert FastCLIP(9, temperature="individual").state_bytes() == (0, 9 * 9 * 4)
    assert NeuCLIP(D, num_prototypes=7).state_bytes() == (3 * 8, 7 * (2 * (D + D) * 4 + 2 * 8))
    weights = 2 * D * D + 7 * D + 1
    assert AmorLIP(D).state_bytes() == ((5 * 2 * weights + 1) * 4, 0)
    assert CLIP().state_bytes() == (0, 0)


def test_what_was_built_alone_keeps_its_block_once_there_are_ranks():
    early = [NeuCLIP(D, num_prototypes=7, inner_steps=0) for _ in range(3)]

    def work(rank: int) -> tuple[Tensor, Tensor]:
        call(early[rank], 4)
        return early[rank].normalizer.rows, early[rank].state_dict()["normalizer.rows"]

    found = threads(3, work)
    assert [own.shape[1] for own, _ in found] == [3, 2, 2]
    whole = torch.cat([own for own, _ in found], dim=1)
    assert all(torch.equal(state, whole) for _, state in found)
    with pytest.raises(RuntimeError, match="number of ranks changed since this objective was used; build a new one"):
        call(early[0])


def test_a_whole_state_loads_as_the_block_of_a_rank():
    whole = NeuCLIP(D, num_prototypes=7, inner_steps=0)
    call(whole, 7)
    state = whole.state_dict()

    def work(rank: int) -> Tensor:
        mine = NeuCLIP(D, num_prototypes=7)
        mine.load_state_dict(state)
        return mine.normalizer.owners[:, 0]

    assert [owners.tolist() for owners in threads(3, work)] == [[0, 1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("build", "state", "reason"),
    [
        (lambda: NeuCLIP(D, num_prototypes=4), NeuCLIP(D, num_prototypes=5), r"shape \(2, 5, 5\), not \(2, 4, 5\)"),
        (lambda: NeuCLIP(D, num_prototypes=4), NeuCLIP(D, network="mlp"), "Missing key"),
        (lambda: NeuCLIP(D, num_prototypes=4), FastCLIP(7), "Missing key"),
        (lambda: NeuCLIP(D, num_prototypes=4), CLIP(), "Missing key"),
        (lambda: FastCLIP(5), FastCLIP(4), r"table.rows has shape \(4, 2\), not \(5, 2\)"),
        (lambda: FastCLIP(5), FastCLIP(5, temperature="individual"), r"has shape \(5, 9\), not \(5, 2\)"),
        (lambda: CLIP(), FastCLIP(4), "Unexpected key"),
        (lambda: AmorLIP(D), AmorLIP(D + 1), "size mismatch for average"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_in_one_line(build, state, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        build().load_state_dict(state.state_dict())
    assert "this is not the state of" in str(refused.value) and "\n" not in str(refused.value)
    assert "load it into the objective that saved it" in str(refused.value)


def test_a_state_that_lacks_a_number_is_refused_in_one_line():
    state = AmorLIP(D).state_dict()
    del state["_extra_state"]["epoch_start"]
    with pytest.raises(ValueError, match=r"not the state of AmorLIP.*'epoch_start'"):
        AmorLIP(D).load_state_dict(state)
