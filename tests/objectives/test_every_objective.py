"""What every objective keeps to, whatever its method: one list of methods, one test per promise."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP
from neuclip.objectives import build_objective, pairs
from neuclip.objectives.objective import NoEstimate
from neuclip.settings.objectives import FastCLIPSettings, NeuCLIPSettings
from tests.objectives.features import METHODS, B, D, batch, close, estimates, every_method, run, same_state, unit

NO_NORMALIZER = ("siglip", "siglip, masked", "fastclip, individual", "drrho", "drrho, with memory")
with_normalizer = pytest.mark.parametrize("method", [name for name in METHODS if name not in NO_NORMALIZER])
IDS = torch.arange(B)


def features_of(given: dict[str, Tensor]) -> list[Tensor]:
    return [given["image_features"], given["text_features"]]


# Building and calling it.


def test_a_run_builds_it_from_settings_and_what_it_knows():
    known = {"embed_dim": D, "dataset_size": 7, "epoch_samples": 9, "total_samples": 100}
    neuclip = build_objective("neuclip", NeuCLIPSettings(rho=3.0), **known)
    fastclip = build_objective("fastclip", FastCLIPSettings(gamma=0.5), **known)
    assert isinstance(neuclip, NeuCLIP) and (neuclip.embed_dim, neuclip.rho) == (D, 3.0)
    assert (fastclip.dataset_size, fastclip.epoch_samples, fastclip.total_samples, fastclip.gamma) == (7, 9, 100, 0.5)


REFUSED = [
    ({"image_features": torch.ones(B, D)}, r"image features are not unit rows \(length off by 1.83\); .*normalize"),
    ({"text_features": 1.05 * unit(B, D, seed=0)}, "text features are not unit rows"),
    ({"text_features": unit(3, D, seed=0)}, r"shapes \(8, 8\) and \(3, 8\); give two matrices of the same shape"),
    (dict.fromkeys(["image_features", "text_features"], unit(B, seed=0)), "give two matrices"),
    ({"logit_scale": torch.tensor(0.0)}, r"logit_scale is 0; give 1/tau, which is positive: logit_scale.exp\(\)"),
    ({"logit_scale": torch.tensor(-3.0)}, "logit_scale is -3; give 1/tau"),
    ({"logit_scale": torch.ones(2)}, r"logit_scale has shape \(2,\); give one number"),
    ({"sample_ids": torch.arange(B + 1)}, r"sample_ids have shape \(9,\) .* give 8 integers, one per pair"),
    ({"sample_ids": torch.zeros(B)}, "torch.float32; give 8 integers"),
    ({"sample_ids": torch.zeros(B, dtype=torch.bool)}, "torch.bool; give 8 integers"),
    ({"caption_ids": torch.zeros(B, 1, dtype=torch.int64)}, "caption_ids have shape .* give 8 integers"),
]


@every_method
def test_wrong_arguments_are_refused_and_change_nothing(method):
    objective = METHODS[method]()
    before = copy.deepcopy(objective.state_dict())
    for given, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            objective(**batch(0) | given)
    if objective.embed_dim:
        with pytest.raises(ValueError, match=r"9 columns; .* was made with embed_dim=8"):
            objective(unit(B, 9, seed=0), unit(B, 9, seed=1), 10.0)
    assert same_state(objective.state_dict(), before)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("siglip", r"pass logit_bias=model\.logit_bias of a model built with init_logit_bias=-10"),
        ("fastclip", r"pass sample_ids, the \(batch,\) numbers 0..dataset_size-1"),
    ],
)
def test_missing_arguments_of_a_method_are_an_error(method, message):
    with pytest.raises(ValueError, match=message):
        METHODS[method]()(**batch(0) | {"logit_bias": None, "sample_ids": None})


@every_method
def test_ids_may_be_any_integers_a_scale_a_number_and_rows_off_by_what_bf16_rounds(method):
    given, objective = batch(0), METHODS[method]()
    want = METHODS[method]()(**given)
    assert torch.equal(METHODS[method]()(**given | {"logit_scale": 10.0}), want)
    assert torch.equal(METHODS[method]()(**given | {"logit_scale": torch.tensor([10.0])}).squeeze(), want)
    for kind in (Tensor.tolist, Tensor.int, Tensor.numpy, lambda ids: ids.to(torch.uint8)):
        ids = {key: kind(given[key]) for key in ("sample_ids", "caption_ids")}
        assert torch.equal(METHODS[method]()(**given | ids), want)
    objective(**given | {"image_features": 1.015 * given["image_features"]})
    assert torch.equal(METHODS[method]()(**given, output_dict=True)["contrastive_loss"], want)  # as open_clip's trainer


def test_without_masking_captions_do_not_count_but_samples_do():
    ids, given = torch.tensor([5, 6, 7, 5, 8, 9, 1, 2]), batch(0) | {"sample_ids": None, "caption_ids": None}
    assert torch.equal(CLIP()(**given | {"caption_ids": ids}), CLIP()(**given))
    masked = CLIP(mask_duplicates=True)(**given | {"caption_ids": ids})
    assert torch.equal(CLIP()(**given | {"sample_ids": ids}), masked) and masked != CLIP()(**given)


# State.


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_and_loaded_pickled_or_copied_in_mid_run_it_continues_with_the_same_bits(method, dtype):
    whole = METHODS[method]().to(dtype)
    want = run(whole, range(6), dtype)
    for cut in (2, 4):
        first, loaded = METHODS[method]().to(dtype), METHODS[method]().to(dtype)
        assert run(first, range(cut), dtype) == want[:cut]
        loaded.load_state_dict(first.state_dict())
        for twin in (loaded, pickle.loads(pickle.dumps(first)), copy.deepcopy(first)):
            assert (twin.steps, twin.samples_seen) == (cut, cut * B)
            assert run(twin, range(cut, 6), dtype) == want[cut:], cut
            assert same_state(twin.state_dict(), whole.state_dict()), cut


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith(("fastclip", "scent", "neuclip"))])
def test_a_saved_state_stays_as_it_was_saved_and_loads_as_precisely(method):
    if method == "neuclip, mlp":
        return  # ordinary buffers, which torch saves and loads
    objective, other = METHODS[method](), METHODS[method]()
    run(objective, range(2), torch.float64)  # which makes the state float64
    state = objective.state_dict()
    kept = copy.deepcopy(state)
    other.load_state_dict(state)
    run(objective, range(2, 4), torch.float64)
    assert same_state(state, kept) and same_state(other.state_dict(), kept)


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


def test_bytes_are_those_of_every_rank_and_those_spread_over_all():
    assert FastCLIP(9).state_bytes() == (0, 9 * 2 * 4)
    assert FastCLIP(9, temperature="individual").state_bytes() == (0, 9 * 9 * 4)
    assert NeuCLIP(D, num_prototypes=7).state_bytes() == (3 * 8, 7 * (2 * (D + D) * 4 + 2 * 8))
    weights = 2 * D * D + 7 * D + 1
    assert AmorLIP(D).state_bytes() == ((5 * 2 * weights + 1) * 4, 0)
    assert CLIP().state_bytes() == (0, 0)


@pytest.mark.parametrize(
    ("build", "state", "reason"),
    [
        (lambda: NeuCLIP(D, num_prototypes=4), NeuCLIP(D, num_prototypes=5), r"shape \(2, 5, 8\), not \(2, 4, 8\)"),
        (lambda: NeuCLIP(D, num_prototypes=4), NeuCLIP(D, network="mlp"), "Missing key"),
        (lambda: FastCLIP(5), FastCLIP(4), r"table.rows has shape \(4, 2\), not \(5, 2\)"),
        (lambda: CLIP(), FastCLIP(4), "Unexpected key"),
        (lambda: AmorLIP(D), AmorLIP(D + 1), "size mismatch for average"),
        (lambda: AmorLIP(D), None, "'epoch_start'"),  # a number is missing
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_one_line(build, state, reason):
    given = (state or build()).state_dict()
    if state is None:
        del given["_extra_state"]["epoch_start"]
    with pytest.raises(ValueError, match=f"the state does not fit this .*{reason}") as refused:
        build().load_state_dict(given)
    assert "\n" not in str(refused.value) and "load it into an objective of the same class" in str(refused.value)


# Losses and gradients.


@pytest.mark.parametrize("method", [name for name in METHODS if "rolling" not in name])  # which stores it in its order
def test_the_order_of_a_batch_that_refills_nothing_does_not_matter(method):
    losses = []
    for rows in (list(range(B)), [4, 2, 7, 0, 5, 1, 3, 6]):
        objective = METHODS[method]()
        run(objective, range(1), torch.float64)
        given = {key: value[rows] if value.ndim else value for key, value in batch(1, torch.float64).items()}
        losses.append(objective(**given).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@every_method
def test_strips_of_any_height_give_the_same_losses_and_gradients_as_often_as_they_are_asked_for(method, monkeypatch):
    def found() -> list[Tensor]:
        objective, results = METHODS[method](), []
        for step in range(3):
            given = batch(step, torch.float64)
            inputs = [*features_of(given), given["logit_scale"]]
            loss = objective(**given)
            once = torch.autograd.grad(loss, inputs, retain_graph=True)  # which frees what was kept for it
            assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, inputs), once, strict=True))
            results += [loss, *once]
        return results if method in NO_NORMALIZER else [*results, estimates(objective, 0, torch.float64)]

    want = found()
    for rows, kept in ((1, 0), (4, 0), (4, 2 * B * B), (B, 0)):
        monkeypatch.setattr(pairs, "STRIP", {"cpu": rows * 2 * B})
        monkeypatch.setattr(pairs, "KEPT", kept)
        assert all(close(a, b, 1e-9) for a, b in zip(found(), want, strict=True)), (rows, kept)


@every_method
def test_a_frozen_tower_temperature_and_bias_leave_the_gradient_of_the_other_tower(method):
    given = batch(0, torch.float64)
    (want,) = torch.autograd.grad(METHODS[method]()(**given), given["text_features"])
    frozen = {key: given[key].detach() for key in ("image_features", "logit_scale", "logit_bias")}
    (got,) = torch.autograd.grad(METHODS[method]()(**given | frozen), given["text_features"])
    assert torch.equal(got, want)


def corner(kind: str, size: int) -> tuple[Tensor, Tensor]:  # -> (size, 8), (size, 8)
    """Image and text features in float32, as different as unit rows can be."""
    hot, random = torch.eye(8)[:size], unit(size, 8, seed=0).float()
    return {
        "random": (random, unit(size, 8, seed=1).float()),
        "identical": (hot[:1].expand(size, 8), hot[:1].expand(size, 8)),
        "one-hot": (hot, hot),
        "opposite": (hot, -hot),
        "far apart": (random, -random),
    }[kind]


@pytest.mark.filterwarnings("ignore:logit_scale is 1")
@pytest.mark.parametrize(("size", "tau"), [(6, 0.005), (2, 0.01), (1, 1.0)])
@every_method
def test_loss_gradients_and_state_are_finite_for_every_temperature_and_any_unit_features(method, size, tau):
    for kind in ("random", "identical", "one-hot", "opposite", "far apart"):
        objective = METHODS[method]()
        for seen in ("one-hot", kind, kind):  # after others, as after a change of data
            image, text = (x.clone().requires_grad_() for x in corner(seen, size))
            scale, bias = torch.tensor(1 / tau, requires_grad=True), torch.tensor(-10.0, requires_grad=True)
            loss = objective(image, text, scale, bias, sample_ids=torch.arange(size))
            loss.backward()
            found = [loss, image.grad, text.grad, scale.grad, *objective.state_dict().values()]
            assert not any(x.isinf().any() for x in found if isinstance(x, Tensor)), kind
            assert not any(x.isnan().any() for x in found[:4]), kind


@pytest.mark.parametrize(("size", "captions"), [(1, None), (3, torch.zeros(3, dtype=torch.int64))])
def test_an_anchor_without_negatives_has_no_normalizer_and_no_gradient(size, captions):
    image, text = (unit(size, D, seed=seed).requires_grad_() for seed in (0, 1))
    floor, masked = 2 * 0.1 * math.log(1e-6), {"mask_duplicates": True}
    wanted = {CLIP(**masked): 0.0, CLIP(form="minibatch", rho=0.0, **masked): floor}
    for objective, want in (wanted | {NeuCLIP(D, num_prototypes=size, rho=0.0, **masked): floor}).items():
        loss = objective(image, text, 10.0, caption_ids=captions)
        assert loss.item() == pytest.approx(want, rel=1e-5)
        assert objective.metrics["masked_duplicates"] == size * (size - 1)
        assert all((slope == 0).all() for slope in torch.autograd.grad(loss, [image, text]))


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
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(METHODS[method]()(**given), features_of(given), create_graph=True)


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
def test_metrics_are_finite_or_none(method):
    objective = METHODS[method]()
    for step in range(4):
        run(objective, range(step, step + 1))
        metrics = objective.metrics
        assert all(value is None or math.isfinite(value) for value in metrics.values())
        assert {"accuracy", "calibration"} <= metrics.keys() and metrics["left_out"] == 0
    assert ("masked_duplicates" in metrics) is objective.mask_duplicates


@every_method
def test_steps_without_metrics_learn_the_same(method):
    measuring, silent = METHODS[method](), METHODS[method]()
    silent.measures = False
    assert run(silent, range(5)) == run(measuring, range(5))
    assert same_state(silent.state_dict(), measuring.state_dict())
    assert silent.metrics.get("weight_deviation") is None
    silent.measures = True
    assert run(silent, range(5, 6)) == run(measuring, range(5, 6)) and silent.metrics == measuring.metrics


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
    want |= {"accuracy": (nearest == IDS).double().mean().item(), "capped": 0, "share_at_eps": 0}
    if method in ("fastclip", "scent"):
        want["unvisited"] = 3 / B  # samples 11, 12 and 13
    assert {name: metrics[name] for name in want} == pytest.approx(want, abs=1e-12)


@with_normalizer
def test_its_own_eps_is_the_default_of_an_estimate_and_a_larger_one_a_higher_floor(method):
    objective = METHODS[method]()
    run(objective, range(4))
    plain, own, larger = (estimates(objective, 0, **eps) for eps in ({}, {"eps": objective.eps}, {"eps": 0.5}))
    assert torch.equal(plain, own)
    assert close(larger, torch.log(0.5 - objective.eps + plain.double().exp()), 1e-4)


@pytest.mark.parametrize("method", [*NO_NORMALIZER, "fastclip", "scent", "amorlip", "neuclip"])
def test_a_method_without_an_estimate_raises_no_estimate_with_the_reason(method):
    objective = METHODS[method]()
    if method in NO_NORMALIZER:
        run(objective, range(1))
    else:  # a step in eval mode teaches it nothing
        objective.eval()(**batch(0))
    why = (
        "has no normalizer|at a temperature of its own|minus the reference's"
        if method in NO_NORMALIZER
        else "call it once in train mode, or load"
    )
    with pytest.raises(NoEstimate, match=why):
        estimates(objective, 0)
