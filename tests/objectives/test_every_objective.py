"""What every objective keeps to, whatever its method: one list of methods, one test per promise."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor

from neuclip import CLIP
from neuclip.objectives import pairs
from neuclip.objectives.objective import NoEstimate
from tests.objectives.features import (
    CORNERS,
    METHODS,
    B,
    batch,
    close,
    corner,
    estimates,
    every_method,
    run,
    same_state,
)

NO_NORMALIZER = ("siglip", "siglip, masked", "fastclip, individual", "drrho", "drrho, with memory")
with_normalizer = pytest.mark.parametrize("method", [name for name in METHODS if name not in NO_NORMALIZER])


# State.


@every_method
def test_saved_and_loaded_pickled_or_copied_in_mid_run_it_continues_with_the_same_bits(method):
    want = run(METHODS[method](), range(6))
    for cut in (2, 4):
        first, loaded = METHODS[method](), METHODS[method]()
        assert run(first, range(cut)) == want[:cut]
        loaded.load_state_dict(first.state_dict())
        for twin in (loaded, pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
            assert (twin.steps, twin.samples_seen) == (cut, cut * B)
            assert run(twin, range(cut, 6)) == want[cut:], cut


@every_method
@pytest.mark.parametrize("seen", [1, 3])  # after 3, AmorLIP's next step in train mode begins an epoch
def test_eval_mode_and_estimates_write_nothing(method, seen):
    objective = METHODS[method]()
    run(objective, range(seen))
    before = copy.deepcopy(objective.state_dict())
    objective.eval()
    run(objective, range(seen, seen + 3))
    if method not in NO_NORMALIZER:
        found = estimates(objective, seen)
        assert found.shape == (2, B) and not found.requires_grad
    assert same_state(objective.state_dict(), before)


@every_method
def test_no_outer_optimizer_can_find_its_state_and_two_equal_ones_stay_two(method):
    one, other = METHODS[method](), METHODS[method]()
    assert list(one.parameters()) == [] and one != other and len({one, other}) == 2


@every_method
def test_made_moved_and_called_in_inference_mode_it_trains_afterwards(method):
    with torch.inference_mode():
        objective = METHODS[method]().double()
        objective.eval()(**batch(0, torch.float64))
    want = METHODS[method]().double()
    assert run(objective.train(), range(3), torch.float64) == run(want, range(3), torch.float64)
    objective(**batch(3, torch.float64)).backward()


@every_method
def test_a_step_without_grad_mode_learns_the_same(method):
    one, other = METHODS[method](), METHODS[method]()
    losses = run(one, range(3))
    with torch.no_grad():
        assert run(other, range(3)) == losses
    assert same_state(one.state_dict(), other.state_dict())


# Losses and gradients.


@pytest.mark.parametrize("method", [name for name in METHODS if "rolling" not in name])  # which stores it in its order
def test_the_order_of_a_batch_that_refills_nothing_does_not_matter(method):
    losses = []
    for rows in (list(range(B)), [4, 2, 0, 5, 1, 3]):
        objective = METHODS[method]()
        run(objective, range(1), torch.float64)
        given = {key: value[rows] if value.ndim else value for key, value in batch(1, torch.float64).items()}
        losses.append(objective(**given).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@every_method
def test_strips_of_any_height_give_the_same_losses_and_gradients(method, monkeypatch):
    def found() -> list[Tensor]:
        objective, results = METHODS[method](), []
        for step in range(3):
            given = batch(step, torch.float64)
            loss = objective(**given)
            results += [loss, *torch.autograd.grad(loss, [given["image_features"], given["text_features"]])]
        return results

    want = found()
    monkeypatch.setattr(pairs, "KEPT", 0)
    for rows in (1, 4):
        monkeypatch.setattr(pairs, "STRIP", {"cpu": rows * 2 * B})
        assert all(close(a, b, 1e-9) for a, b in zip(found(), want, strict=True)), rows


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


@every_method
def test_in_bf16_and_under_autocast_it_computes_in_float32(method):
    plain, half, autocast = METHODS[method](), METHODS[method](), METHODS[method]()
    for step in range(2):
        given = batch(step)
        rounded = {key: given[key].bfloat16() for key in ("image_features", "text_features")}
        floats = {key: value.float() for key, value in rounded.items()}
        want, got = plain(**given | floats), half(**given | rounded)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            third = autocast(**given | floats)
        assert want.dtype == got.dtype == third.dtype == torch.float32
        assert torch.equal(got, want) and torch.equal(third, want)
    assert same_state(plain.state_dict(), half.state_dict()) and same_state(plain.state_dict(), autocast.state_dict())


@every_method
def test_a_second_derivative_is_an_error_instead_of_a_wrong_number(method):
    given = batch(0, torch.float64)
    features = [given["image_features"], given["text_features"]]
    loss = METHODS[method]()(**given)
    torch.autograd.grad(loss, features, retain_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, features, create_graph=True)


@every_method
def test_a_logarithm_in_place_of_the_scale_is_warned_of_once_at_the_line_that_called(method):
    objective = METHODS[method]()
    with pytest.warns(UserWarning, match=r"logit_scale is 2.66, .* pass logit_scale.exp\(\)") as warned:
        for step in (0, 1):
            objective(**batch(step) | {"logit_scale": torch.tensor(math.log(1 / 0.07))})
    assert [warning.filename for warning in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHODS[method]()(**batch(0) | {"logit_scale": torch.tensor(1 / 0.07)})


# What it tells of itself.


@every_method
def test_metrics_are_finite_or_none_where_nothing_can_be_said(method):
    objective = METHODS[method]()
    for step in range(4):
        run(objective, range(step, step + 1))
        metrics = objective.metrics
        assert all(value is None or math.isfinite(value) for value in metrics.values())
        assert {"accuracy", "calibration"} <= metrics.keys() and metrics["left_out"] == 0
    assert ("masked_duplicates" in metrics) is objective.mask_duplicates


@pytest.mark.parametrize("method", ["fastclip", "scent", "amorlip", "neuclip"])
def test_calibration_compares_the_batch_with_what_was_predicted_before_the_method_saw_it(method):
    objective = METHODS[method]()
    run(objective, range(1), torch.float64)
    assert objective.metrics["calibration"] is None  # nothing was known yet
    run(objective, range(1, 2), torch.float64)
    predicted, truth = (estimates(one, 2, torch.float64) for one in (objective, CLIP(eps=objective.eps)))
    run(objective, range(2, 3), torch.float64)
    used, metrics = estimates(objective, 2, torch.float64), objective.metrics
    if method == "amorlip":  # the batch in its first epoch
        used = estimates(CLIP(eps=objective.positive_coefficient / (B - 1)), 2, torch.float64)
    ratios = (truth - predicted).exp().nanmean(dim=1).tolist()
    want = {"calibration": sum(ratios) / 2, "calibration_image": ratios[0], "calibration_text": ratios[1]}
    want["log_ratio_deviation"] = (truth - predicted).square().nanmean().sqrt().item()
    want["weight_deviation"] = (truth - used).exp().std(correction=0).item()
    want |= {"mean_log_normalizer_image": used[0].mean().item(), "mean_log_normalizer_text": used[1].mean().item()}
    given = batch(2, torch.float64)
    nearest = (given["image_features"] @ given["text_features"].T).argmax(dim=1)
    want |= {"accuracy": (nearest == torch.arange(B)).double().mean().item(), "capped": 0, "share_at_eps": 0}
    if method in ("fastclip", "scent"):
        want["unvisited"] = 2 / B  # samples 9 and 10
    assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-12)


@with_normalizer
def test_its_own_eps_is_the_default_of_an_estimate_and_a_larger_one_a_higher_floor(method):
    objective = METHODS[method]()
    run(objective, range(4))
    plain, own, larger = (estimates(objective, 0, **eps) for eps in ({}, {"eps": objective.eps}, {"eps": 0.5}))
    assert torch.equal(plain, own)
    assert close(larger, torch.log(0.5 - objective.eps + plain.double().exp()), 1e-4)


@pytest.mark.parametrize("method", [*NO_NORMALIZER, "fastclip", "scent", "amorlip", "neuclip"])
def test_a_method_without_an_estimate_says_so_and_why(method):
    objective = METHODS[method]()
    if method in NO_NORMALIZER:
        run(objective, range(1))
    else:  # a step in eval mode teaches it nothing
        objective.eval()(**batch(0))
    why = (
        "has no normalizer|at one of its own|minus the reference's"
        if method in NO_NORMALIZER
        else "call it once in train mode, or load"
    )
    with pytest.raises(NoEstimate, match=why):
        estimates(objective, 0)
