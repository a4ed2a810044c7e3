"""What every objective keeps to, whatever its method: one list of methods, one test per promise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from neuclip import NeuCLIP
from neuclip.objectives import pairs
from neuclip.objectives.objective import NoEstimate
from tests.objectives.features import (
    CORNERS,
    METHODS,
    B,
    D,
    batch,
    close,
    corner,
    every_method,
    run,
    same_state,
)

SCALE = torch.tensor(10.0, dtype=torch.float64)
NO_NORMALIZER = ("siglip", "siglip, masked", "fastclip, individual")


@every_method
def test_saved_and_loaded_in_mid_run_it_continues_to_the_bit(method):
    want = run(METHODS[method](), range(6))
    for cut in (2, 4):
        first, second = METHODS[method](), METHODS[method]()
        got = run(first, range(cut))
        second.load_state_dict(first.state_dict())
        assert got + run(second, range(cut, 6)) == want, cut


@every_method
@pytest.mark.parametrize("seen", [1, 3])  # after 3, AmorLIP's next step in train mode begins an epoch
def test_eval_mode_and_estimates_write_nothing(method, seen):
    objective = METHODS[method]()
    run(objective, range(seen))
    before = copy.deepcopy(objective.state_dict())
    objective.eval()
    run(objective, range(seen, seen + 3))
    if method not in NO_NORMALIZER:
        given = batch(seen)
        asked = given["image_features"], given["text_features"], torch.tensor(10.0), given["sample_ids"]
        assert all(x.shape == (B,) and not x.requires_grad for x in objective.log_normalizers(*asked))
    assert same_state(objective.state_dict(), before)


@every_method
def test_steps_and_samples_are_counted_in_train_mode(method):
    objective = METHODS[method]()
    run(objective, range(3))
    assert (objective.steps, objective.samples_seen) == (3, 3 * B)
    loaded = METHODS[method]()
    loaded.load_state_dict(objective.state_dict())
    assert (loaded.steps, loaded.samples_seen) == (3, 3 * B)


@pytest.mark.parametrize("method", [name for name in METHODS if "rolling" not in name])  # which stores it in its order
def test_the_order_of_a_batch_that_refills_nothing_does_not_matter(method):
    losses = []
    for rows in (list(range(B)), [4, 2, 0, 5, 1, 3]):
        objective = METHODS[method]()
        run(objective, range(1), torch.float64)
        given = batch(1, torch.float64)
        given = {key: value[rows] if value.ndim else value for key, value in given.items()}
        losses.append(objective(**given, logit_scale=SCALE).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@every_method
def test_strips_of_any_height_give_the_same_losses_and_gradients(method, monkeypatch):
    def found() -> list[Tensor]:
        objective, results = METHODS[method](), []
        for step in range(3):
            given = batch(step, torch.float64)
            loss = objective(**given, logit_scale=SCALE)
            results += [loss, *torch.autograd.grad(loss, [given["image_features"], given["text_features"]])]
        return results

    want = found()
    monkeypatch.setattr(pairs, "KEPT", 0)
    for rows in (1, 4):
        monkeypatch.setattr(pairs, "STRIP", {"cpu": rows * 2 * B})
        assert all(close(a, b, 1e-9) for a, b in zip(found(), want, strict=True)), rows


@every_method
def test_metrics_are_finite_or_none_and_none_where_nothing_can_be_said(method):
    objective = METHODS[method]()
    for step in range(4):
        run(objective, range(step, step + 1))
        assert all(value is None or math.isfinite(value) for value in objective.metrics.values())
        assert {"accuracy", "calibration", "left_out"} <= objective.metrics.keys() and objective.metrics[
            "left_out"
        ] == 0
    assert ("masked_duplicates" in objective.metrics) is objective.mask_duplicates


@pytest.mark.filterwarnings("ignore:logit_scale is 1")
@pytest.mark.parametrize(("size", "tau"), [(6, 0.005), (2, 0.01), (1, 1.0)])
@every_method
def test_loss_gradients_and_state_are_finite_for_every_temperature_and_any_unit_features(method, size, tau):
    for kind in (*CORNERS, "far apart"):
        objective = METHODS[method]()
        for seen in ("one-hot", kind, kind):  # after others, as after a change of data
            image, text = (x.clone().requires_grad_() for x in corner(seen, size))
            scale, bias = torch.tensor(1 / tau, requires_grad=True), torch.tensor(-10.0, requires_grad=True)
            loss = objective(image, text, scale, bias, sample_ids=torch.arange(size))
            loss.backward()
            found = [loss, image.grad, text.grad, scale.grad, *objective.state_dict().values()]
            assert not any(x.isinf().any() for x in found if isinstance(x, Tensor)), kind
            assert not any(x.isnan().any() for x in found[:4]), kind


@pytest.mark.parametrize("method", [name for name in METHODS if name not in NO_NORMALIZER])
def test_its_own_eps_is_the_default_of_an_estimate_and_a_larger_one_a_higher_floor(method):
    objective = METHODS[method]()
    run(objective, range(4))
    given = batch(0)
    asked = given["image_features"], given["text_features"], torch.tensor(10.0), given["sample_ids"]
    plain, own, larger = (
        torch.stack(objective.log_normalizers(*asked, **eps)) for eps in ({}, {"eps": objective.eps}, {"eps": 0.5})
    )
    assert torch.equal(plain, own)
    assert close(larger, torch.log(0.5 - objective.eps + plain.double().exp()), 1e-4)


@pytest.mark.parametrize("method", NO_NORMALIZER)
def test_a_method_without_one_normalizer_for_all_says_so(method):
    objective, given = METHODS[method](), batch(0)
    run(objective, range(1))
    asked = given["image_features"], given["text_features"], torch.tensor(10.0), given["sample_ids"]
    with pytest.raises(NoEstimate, match=r"has no normalizer|at one of its own"):
        objective.log_normalizers(*asked)


@pytest.mark.parametrize("method", ["fastclip", "amorlip", "neuclip"])
def test_before_its_first_step_there_is_no_estimate(method):
    objective, given = METHODS[method](), batch(0)
    objective.eval()(**given, logit_scale=torch.tensor(10.0))
    asked = given["image_features"], given["text_features"], torch.tensor(10.0), given["sample_ids"]
    with pytest.raises(NoEstimate, match="call it once in train mode, or load its state"):
        objective.log_normalizers(*asked)


@every_method
def test_the_state_of_another_method_is_refused_in_one_line(method):
    for other in (NeuCLIP(D, num_prototypes=7), METHODS["amorlip" if method != "amorlip" else "fastclip"]()):
        with pytest.raises(ValueError, match="this is not the state of") as refused:
            METHODS[method]().load_state_dict(other.state_dict())
        assert "\n" not in str(refused.value) and "load it into the objective that saved it" in str(refused.value)
