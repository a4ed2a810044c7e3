"""Which slots a step renews, what the optimizer remembers of them, and that inner steps are torch.optim's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neuclip import NeuCLIP
from tests.objectives.features import close, unit
from tests.references import contrastive

B, D, TAU = 10, 6, 0.1
SCALE = torch.tensor(1 / TAU, dtype=torch.float64)


def batch(step: int) -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=step), unit(B, D, seed=1000 + step)


def state(objective: NeuCLIP, name: str) -> Tensor:
    return objective.state_dict()[f"normalizer.{name}"]


def origin(objective: NeuCLIP, steps: int) -> list[tuple[int, int] | None]:
    """Of each prototype for images, the batch and the row it was stored from, if it has not moved since."""
    texts = torch.stack([batch(step)[1] for step in range(steps)])  # (steps, B, d)
    found = []
    for row in state(objective, "rows")[0]:
        places = (texts == row).all(dim=2).nonzero().tolist()
        found.append(tuple(places[0]) if places else None)
    return found


# Restarts.


@pytest.mark.parametrize(("size", "expected"), [(4, [0, 2, 5, 7]), (10, list(range(10)))])
def test_a_restart_takes_evenly_spaced_rows_of_the_other_modality(size, expected):
    objective, (image, text) = NeuCLIP(D, num_prototypes=size, inner_steps=0), batch(0)
    objective(image, text, SCALE)
    assert torch.equal(state(objective, "rows"), torch.stack([text[expected], image[expected]]))


def test_more_prototypes_than_pairs_fill_over_several_steps_and_count_only_what_is_there():
    objective = NeuCLIP(D, num_prototypes=25, inner_steps=0, restart_every=0)
    image, text = batch(9)
    for step in range(4):
        objective(*batch(step), SCALE)
        filled = [(s, row) for s in range(min(step + 1, 2)) for row in range(B)]
        filled += [(2, row) for row in (0, 2, 4, 6, 8)] if step > 1 else []  # five slots were left for ten rows
        assert origin(objective, 4) == filled + [None] * (25 - len(filled))
        stored = torch.stack([batch(s)[1][row] for s, row in filled])
        excess = [((stored @ x - x @ y) / TAU).tolist() for x, y in zip(image, text, strict=True)]
        want = [contrastive.log_mean_exp(row, 1e-6) for row in excess]
        assert close(objective.log_normalizers(image, text, SCALE)[0], torch.tensor(want, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize(
    ("size", "every", "fills"),
    [
        (10, 1, [0, 1, 2, 3, 4, 5, 6]),
        (10, 3, [0, 3, 6]),
        (4, 2, [0, 2, 4, 6]),
        (10, 0, [0]),
        (25, 2, [0, 3, 6]),  # falls due during a fill and waits for its end
        (25, 5, [0, 5]),
    ],
)
def test_restarts_come_every_so_many_steps_but_not_into_a_fill(size, every, fills):
    objective = NeuCLIP(D, num_prototypes=size, inner_steps=0, restart_every=every)
    for step in range(7):
        objective(*batch(step), SCALE)
        begun = max(fill for fill in fills if fill <= step)
        writes = step - begun < -(-size // B)
        newest = [place[0] for place in origin(objective, 7) if place]
        assert (step in newest) is writes
        if step - begun >= -(-size // B) - 1:  # the fill is over: nothing older is left
            assert min(newest) == begun


@pytest.mark.parametrize("size", [4, 10, 25])
def test_a_rolling_restart_without_inner_steps_is_a_queue_of_the_newest_features(size):
    objective = NeuCLIP(D, num_prototypes=size, restart="rolling", inner_steps=0)
    for step in range(7):
        objective(*batch(step), SCALE)
    newest = [(step, row) for step in range(7) for row in range(B)][-size:]
    assert sorted(origin(objective, 7)) == ([(6, row) for row in (0, 2, 5, 7)] if size == 4 else newest)
    if size == 25:  # the ring goes round: the seventh batch ends in slot 70 mod 25
        assert [place[0] for place in origin(objective, 7)] == [5] * 10 + [6] * 10 + [4] * 5


def test_a_periodic_restart_keeps_adagrads_sums():
    objective = NeuCLIP(D, num_prototypes=4, inner_steps=1, restart_every=1)
    objective(*batch(0), SCALE)
    kept = state(objective, "sums")
    objective(*batch(1), SCALE)
    assert kept.all() and (state(objective, "sums") >= kept).all()


def test_rolling_forgets_the_sums_of_exactly_the_slots_it_renews():
    learning = NeuCLIP(D, num_prototypes=3 * B, restart="rolling", inner_steps=1)
    for step in range(3):
        learning(*batch(step), SCALE)
    still = NeuCLIP(D, num_prototypes=3 * B, restart="rolling", inner_steps=0)
    still.load_state_dict(learning.state_dict())
    still(*batch(3), SCALE)  # the fourth batch takes the first batch's slots
    before, after = state(learning, "sums"), state(still, "sums")
    assert (after[:, :B] == 0).all() and torch.equal(after[:, B:], before[:, B:]) and before[:, :B].all()


def test_algorithm_3_stores_once():
    objective = NeuCLIP(D, num_prototypes=4, update="simultaneous", restart_every=1, network_lr=1e-30)
    for step in range(3):
        objective(*batch(step), SCALE)
    assert origin(objective, 3) == [(0, row) for row in (0, 2, 5, 7)]


# Inner steps.


@pytest.mark.parametrize("fit", ["unified", "separate"])
def test_five_inner_steps_follow_torchs_adagrad(fit):
    objective = NeuCLIP(D, num_prototypes=7, inner_steps=5, restart_every=0, fit=fit, network_lr=0.3)
    twin = contrastive.Algorithm1(7, restart_every=0, inner_steps=5, rate=0.3, rho=6.5, eps=1e-6)
    twin.fit = fit
    for step in range(3):
        objective(*batch(step), SCALE)
        twin.loss(*batch(step), 1 / SCALE)
        assert close(state(objective, "rows"), twin.rows.detach(), 1e-8)


@pytest.mark.parametrize("update", ["alternating", "simultaneous"])  # by AdaGrad, and by Adam
def test_prototypes_that_are_still_filling_learn_as_those_of_a_full_network(update):
    """A prefix of each side's slots: torch's fused AdaGrad is silently wrong on a view that is not contiguous."""
    filling, full = (NeuCLIP(D, num_prototypes=size, inner_steps=3, network_lr=0.1, update=update) for size in (25, B))
    for objective in (filling, full):
        objective(*batch(0), SCALE)
    assert close(state(filling, "rows")[:, :B], state(full, "rows"), 1e-13)
    assert not state(filling, "rows")[:, B:].any() and not torch.equal(state(full, "rows")[0], batch(0)[1])
