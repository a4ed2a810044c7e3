"""DRRho against a double loop and autograd, and FastCLIP where the reference says nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neuclip import DRRho, FastCLIP
from tests.objectives.features import close, number, same_gradients, unit

N, B, D, WIDTH, EPS = 11, 6, 5, 4, 1e-4
VISITS = [[0, 1, 2, 3, 4, 5], [3, 4, 6, 0, 7, 8], [10, 9, 1, 6, 2, 0]]
REFERENCE = (unit(N, WIDTH, seed=70), unit(N, WIDTH, seed=71))


def batch(step: int) -> tuple[Tensor, Tensor]:
    return unit(B, D, seed=2 * step).requires_grad_(), unit(B, D, seed=2 * step + 1).requires_grad_()


def says_nothing(samples: int = N) -> tuple[Tensor, Tensor]:
    """A reference in which every image is at right angles to every text: r = 0."""
    axes = torch.eye(2, dtype=torch.float64)
    return axes[:1].expand(samples, 2), axes[1:].expand(samples, 2)


def by_hand(leaves: list[Tensor], ids: list[int], reference: tuple[Tensor, Tensor]) -> Tensor:
    """tau (mean log(eps + g1) + mean log(eps + g2)), pair by pair; without memory."""
    (image, text), tau, loss = leaves[:2], 1 / leaves[2], torch.zeros((), dtype=torch.float64)
    of_image, of_text = (rows[ids] for rows in reference)
    for x, y, r_x, r_y in ((image, text, of_image, of_text), (text, image, of_text, of_image)):
        for i in range(B):
            excess = [(x[i] @ y[j] - x[i] @ y[i]) - (r_x[i] @ r_y[j] - r_x[i] @ r_y[i]) for j in range(B) if j != i]
            loss = loss + torch.log(EPS + sum(torch.exp(e / tau) for e in excess) / (B - 1)) / B
    return tau * loss


@pytest.mark.filterwarnings("ignore:logit_scale is 2")
@pytest.mark.parametrize("tau", [0.05, 0.5])
def test_the_references_similarities_are_subtracted_before_the_exponent(tau):
    objective = DRRho(N, reference=REFERENCE)
    for step, ids in enumerate(VISITS):
        leaves = [*batch(step), number(1 / tau)]
        constant = [*leaves[:2], leaves[2].detach()]  # as the authors' temperature is
        got, want = objective(*leaves, sample_ids=torch.tensor(ids)), by_hand(constant, ids, REFERENCE)
        assert close(got, want, 1e-12) and same_gradients(got, want, leaves, 1e-11)


def test_a_temperature_that_learns_has_the_gradient_of_the_loss_with_rho():
    objective, leaves = DRRho(N, reference=REFERENCE, temperature="global", rho=3.0), [*batch(0), number(10.0)]
    got = objective(*leaves, sample_ids=torch.tensor(VISITS[0]))
    want = by_hand(leaves, VISITS[0], REFERENCE) + 2 * 3.0 / leaves[2]
    assert close(got, want, 1e-12) and same_gradients(got, want, leaves, 1e-11)


@pytest.mark.parametrize("temperature", ["global", "constant", "individual"])
def test_with_a_reference_of_equal_similarities_it_is_fastclip(temperature):
    given = {"temperature": temperature, "gamma": 0.3, "gamma_schedule": "constant", "eps": EPS}
    objective, plain = DRRho(N, reference=says_nothing(), **given), FastCLIP(N, **given)
    for step, ids in enumerate(VISITS):
        leaves = [*batch(step), number(10.0)]
        got, want = (f(*leaves, sample_ids=torch.tensor(ids)) for f in (objective, plain))
        assert close(got, want, 1e-15) and same_gradients(got, want, leaves, 1e-14)
        found, expected = ({k: x for k, x in f.metrics.items() if x is not None} for f in (objective, plain))
        assert found == pytest.approx(expected, rel=1e-12)
    tables = [one.state_dict()["table.rows"].nan_to_num() for one in (objective, plain)]
    assert close(*tables, 1e-12)


def test_with_itself_as_the_reference_every_normalizer_is_one():
    image, text = unit(N, D, seed=0), unit(N, D, seed=1)
    objective, ids = DRRho(N, reference=(image, text)), torch.tensor(VISITS[2])
    loss = objective(image[ids], text[ids], number(1 / 0.05), sample_ids=ids)
    assert loss.item() == pytest.approx(2 * 0.05 * math.log1p(EPS), rel=1e-9)


def test_what_the_reference_adds_to_all_similarities_of_an_image_changes_its_side_nowhere():
    """r_ij + c_i: two columns for the constant, two that make the rows unit again."""
    r_x, r_y, column = 0.5 * REFERENCE[0], 0.5 * REFERENCE[1], torch.zeros(N, 1, dtype=torch.float64)
    tables = []
    for c in (column, torch.linspace(-0.5, 0.5, N, dtype=torch.float64)[:, None]):
        x, y = torch.cat([r_x, c, column], 1), torch.cat([r_y, column + 0.5, column], 1)
        fill_x, fill_y = ((1 - rows.square().sum(1, keepdim=True)).sqrt() for rows in (x, y))
        reference = torch.cat([x, fill_x, column], 1), torch.cat([y, column, fill_y], 1)
        objective = DRRho(N, reference=reference)
        objective(*batch(0), number(10.0), sample_ids=torch.tensor(VISITS[0]))
        tables.append(objective.state_dict()["table.rows"][:B])
    assert close(tables[1][:, 0], tables[0][:, 0], 1e-12) and not close(tables[1][:, 1], tables[0][:, 1], 1e-3)


def test_accuracy_is_the_models_own():
    image = unit(N, D, seed=0)
    objective, ids = DRRho(N, reference=(image, image)), torch.arange(B)
    objective(image[ids], image[ids], number(10.0), sample_ids=ids)  # s - r is 0 everywhere
    assert objective.metrics["accuracy"] == 1
    objective(image[ids], -image[ids], number(10.0), sample_ids=ids)
    assert objective.metrics["accuracy"] == 0


def test_features_may_come_from_a_function_of_the_ids_and_in_half_precision():
    asked = []

    def look_up(ids: Tensor) -> Tensor:
        asked.append(ids.tolist())
        return torch.stack([rows[ids] for rows in REFERENCE])

    half = tuple(rows.half() for rows in REFERENCE)
    losses = [
        DRRho(N, reference=reference)(*batch(0), number(10.0), sample_ids=torch.tensor(VISITS[1])).item()
        for reference in (REFERENCE, look_up, half)
    ]
    assert asked == [VISITS[1]] and losses[0] == losses[1] and 0 < abs(losses[2] - losses[0]) < 1e-2


@pytest.mark.parametrize("wrong", [0.0, math.nan, 2.0])
def test_a_sample_without_reference_features_is_refused_and_writes_nothing(wrong):
    image, text = (rows.clone() for rows in REFERENCE)
    text[3] *= wrong
    objective = DRRho(N, reference=(image, text))
    with pytest.raises(ValueError, match="no reference features, or they do not have length 1; compute them for every"):
        objective(*batch(0), number(10.0), sample_ids=torch.tensor(VISITS[0]))
    assert objective.samples_seen == 0 and objective.state_dict()["table.rows"].isnan().all()
    objective(*batch(0), number(10.0), sample_ids=torch.tensor([6, 7, 8, 9, 10, 0]))


@pytest.mark.parametrize("wrong", [-1, N])
def test_an_id_outside_the_data_set_is_refused_before_any_row_is_read(wrong):
    with pytest.raises(ValueError, match=r"a sample id is outside 0\.\.10"):
        DRRho(N, reference=REFERENCE)(*batch(0), number(10.0), sample_ids=torch.tensor([0, 1, 2, 3, 4, wrong]))


def test_missing_reference_features_are_an_error():
    with pytest.raises(ValueError, match="DRRho has no reference features; give reference="):
        DRRho(N)(*batch(0), number(10.0), sample_ids=torch.arange(B))
    with pytest.raises(ValueError, match="DRRho remembers each sample: pass sample_ids"):
        DRRho(N, reference=REFERENCE)(*batch(0), number(10.0))
    for reference in ((REFERENCE[0], REFERENCE[1][:, :3]), (REFERENCE[0][:5], REFERENCE[1][:5])):
        with pytest.raises(ValueError, match=r"give two matrices of the same shape \(11, width\), where row i of both"):
            DRRho(N, reference=reference)


def test_a_pair_without_features_has_no_reference_either():
    other, losses = (rows.clone() for rows in REFERENCE), []
    of_image, of_text = other
    of_image[2], of_text[2] = REFERENCE[0][9], REFERENCE[1][9]
    for reference in (REFERENCE, (of_image, of_text)):
        image, text = (rows.detach().clone() for rows in batch(0))
        image[2] = 0.0
        losses.append(DRRho(N, reference=reference)(image, text, number(10.0), sample_ids=torch.arange(B)).item())
    assert losses[0] == losses[1]
