"""One bad batch does no harm: features or temperatures that are no numbers, and rows of zeros."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neuclip import SCENT, FastCLIP, NeuCLIP
from tests.objectives.features import METHODS, B, D, N, batch, every_method, run, same_state, unit

BAD = 3  # the pair that is bad
SPOILT = {  # features and temperature by which a batch is bad, and how many pairs are
    "a NaN": (lambda given: given["image_features"].data[BAD, 2].fill_(math.nan), 1),
    "an infinity": (lambda given: given["text_features"].data[BAD, 0].fill_(math.inf), 1),
    "a zero row": (lambda given: given["image_features"].data[BAD].fill_(0), 1),
    "nothing but NaN": (lambda given: given["text_features"].data.fill_(math.nan), B),
    "scale NaN": (lambda given: given["logit_scale"].data.fill_(math.nan), B),
    "scale infinite": (lambda given: given["logit_scale"].data.fill_(math.inf), B),
    "scale negative": (lambda given: given["logit_scale"].data.fill_(-10.0), B),  # of these two a first call is refused
    "scale zero": (lambda given: given["logit_scale"].data.fill_(0.0), B),
}


def spoilt(step: int, kind: str) -> dict[str, Tensor]:
    given = batch(step)
    SPOILT[kind][0](given)
    return given


def finite(objective) -> bool:
    """Whether every number of the state is one; in a table NaN stands for samples never visited."""
    state = {key: x for key, x in objective.state_dict().items() if isinstance(x, Tensor)}
    return all((x.isfinite() | (x.isnan() & ("table" in key))).all() for key, x in state.items())


@every_method
@pytest.mark.parametrize("before", [0, 1])
def test_the_loss_is_nan_and_later_losses_are_finite(method, before):
    for kind, (_, count) in [*SPOILT.items()][: None if before else -2]:
        objective, given = METHODS[method](), spoilt(2, kind)
        run(objective, range(before))
        loss = objective(**given)
        inputs = [given[key] for key in ("image_features", "text_features", "logit_scale")]
        image, text, scale = torch.autograd.grad(loss, inputs)
        assert objective.metrics["left_out"] == count
        if kind == "a zero row":
            assert all(x.isfinite().all() for x in (loss, image, text, scale))
            assert not image[BAD].any() and not text[BAD].any()
        else:
            assert all(x.isnan().all() for x in (loss, image, text, scale)), kind
        assert finite(objective), kind
        assert all(math.isfinite(loss) for loss in run(objective, range(3, 5))) and finite(objective), kind
        assert objective.metrics["left_out"] == 0


@every_method
@pytest.mark.parametrize("before", [0, 1])
def test_the_values_of_a_bad_pair_do_not_change_what_the_state_learns_from_the_others(method, before):
    states = []
    for kind in ("a NaN", "an infinity", "a zero row", "other partner"):
        objective = METHODS[method]()
        run(objective, range(before))
        given = spoilt(2, "a NaN" if kind == "other partner" else kind)
        if kind == "other partner":
            given["text_features"].data[BAD] = unit(D, seed=77).float()
        objective(**given)
        states.append(objective.state_dict())
    assert all(same_state(state, states[0]) for state in states[1:])


@every_method
@pytest.mark.parametrize("kind", ["nothing but NaN", "scale NaN"])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_batch_without_any_sound_pair_changes_no_state(method, kind, before):
    """Not in the state, and not in later losses, while a ring fills, goes round or falls due."""
    if method == "amorlip" and before == 3:
        return  # an epoch begins there by the number of samples, whatever they are
    objective, twin = METHODS[method](), METHODS[method]()
    for one in (objective, twin):
        run(one, range(before))
    objective(**spoilt(2, kind))
    counts = ("_extra_state",)  # of steps and samples, and where a ring is
    assert same_state(objective.state_dict(), twin.state_dict(), but=counts)
    if "amorlip" not in method and "fastclip" not in method:  # whose schedules count samples
        assert run(objective, range(before, 6)) == pytest.approx(run(twin, range(before, 6)), rel=1e-6)
        learnt = (".rows", ".sums", ".first", ".second")
        assert same_state(objective.state_dict(), twin.state_dict(), but=(*counts, *learnt))


@pytest.mark.parametrize("temperature", ["global", "individual", "SCENT's"])
@pytest.mark.parametrize("twice", [False, True])  # then the bad pair is of a sample that has a sound one too
def test_a_table_is_as_if_the_bad_pair_had_not_been_in_the_batch(temperature, twice):
    tables = []
    for kept in (range(B), [row for row in range(B) if row != BAD]):
        objective = SCENT(N, log_alpha=1.0).double()
        if temperature != "SCENT's":
            objective = FastCLIP(N, temperature=temperature, gamma_schedule="constant").double()
        run(objective, range(1), torch.float64)
        given = batch(1, torch.float64)
        given["image_features"].data[BAD] = math.nan
        given["sample_ids"][BAD] = 4 if twice else 6
        objective(**{key: value[kept] if value.ndim else value for key, value in given.items()})
        tables.append(objective.state_dict()["table.rows"])
    assert torch.allclose(*tables, rtol=1e-12, equal_nan=True) and tables[0].isfinite().any()


@pytest.mark.parametrize("restart", ["periodic", "rolling"])
def test_prototypes_are_stored_from_sound_pairs_only_and_all_slots_are_filled(restart):
    objective = NeuCLIP(D, num_prototypes=2 * B, restart=restart, inner_steps=0)
    run(objective, range(1))
    objective(**spoilt(2, "an infinity"))
    stored, owners = (objective.state_dict()[f"normalizer.{name}"] for name in ("rows", "owners"))
    ids = [x for step in (0, 2) for x in batch(step)["sample_ids"].tolist()]
    assert set(owners[:, 0].tolist()) == set(ids) - {ids[B + BAD]}
    sound = torch.cat([batch(step)["text_features"] for step in (0, 2)]).detach()
    sound[B + BAD] = 0
    assert all((sound == row).all(dim=1).any() and row.any() for row in stored[0])
