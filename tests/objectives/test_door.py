"""How an objective is built and called: what it refuses, in which type it computes, and what it shows of itself."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import pydoc
import warnings
from dataclasses import fields

import pytest
import torch

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP, objectives
from neuclip.objectives import build_objective
from neuclip.settings.objectives import OBJECTIVES, FastCLIPSettings, NeuCLIPSettings
from tests.objectives.features import METHODS, B, D, N, batch, every_method, run, same_state, unit

IDS = torch.arange(B)


def call(objective, *, image=None, text=None, scale=10.0, **keys):
    image = unit(B, D, seed=0) if image is None else image
    return objective(image, unit(B, D, seed=1) if text is None else text, torch.as_tensor(scale), **keys)


# Building it.


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NeuCLIP(D, update="alternate"), r"choose alternating or simultaneous \(did you mean alternating\?\)"),
        (lambda: NeuCLIP(D, fit="unify"), r"fit is 'unify'; .*did you mean unified\?"),
        (lambda: NeuCLIP(D, network="mpl"), r"network is 'mpl'; .*did you mean mlp\?"),
        (lambda: NeuCLIP(D, restart="period"), r"restart is 'period'; .*did you mean periodic\?"),
        (lambda: NeuCLIP(D, alpha_gradient="detach"), r"alpha_gradient is 'detach'; .*did you mean detached\?"),
        (lambda: NeuCLIP(D, temperature_gradient="papers"), r"temperature_gradient is 'papers'; .*paper\?"),
        (lambda: CLIP(form="mini-batch"), r"form is 'mini-batch'; .*did you mean minibatch\?"),
        (lambda: FastCLIP(9, gamma_schedule="cosin"), r"gamma_schedule is 'cosin'; .*did you mean cosine\?"),
        (lambda: FastCLIP(9, temperature="globl"), r"temperature is 'globl'; .*did you mean global\?"),
        (lambda: NeuCLIP(0), "^embed_dim is 0; give 1 or more$"),
        (lambda: AmorLIP(-3), "embed_dim is -3; give 1 or more"),
        (lambda: NeuCLIP(D, num_prototypes=0), r"^num_prototypes is 0; give 1 or more \(default 4096\)$"),
        (lambda: NeuCLIP(D, restart_every=-1), "restart_every is -1; give 0 or more"),
        (lambda: NeuCLIP(D, network_lr=0.0), "network_lr is 0.0; give a number above 0"),
        (lambda: NeuCLIP(D, rho=math.nan), r"rho is nan; give a number \(default 6.5\)"),
        (lambda: AmorLIP(D, rho=(1.0, math.inf)), "rho is .*; give a number"),
        (lambda: AmorLIP(D, rho=3.0), "rho is 3.0; give a tuple of values"),
        (lambda: CLIP(eps="small"), "eps is 'small'; give a number, 0 or more"),
        (lambda: NeuCLIP(D, inner_steps=2.5), "inner_steps is 2.5; give a whole number, 0 or more"),
        (lambda: NeuCLIP(D, num_prototypes=True), "num_prototypes is True; give a whole number"),
        (lambda: CLIP(mask_duplicates=1), "mask_duplicates is 1; give True or False"),
        (lambda: FastCLIP(0), "dataset_size is 0; give 1 or more"),
        (lambda: FastCLIP(9, epoch_samples=-1), "epoch_samples is -1"),
        (lambda: FastCLIP(9, gamma=0.0), "gamma is 0.0; give a number above 0 and at most 1"),
        (lambda: FastCLIP(9, gamma=1.5), "gamma is 1.5; .*at most 1"),
        (lambda: FastCLIP(9, temperature_initial=2.0), "temperature_initial is 2.0; give 0.01 or more and at most 1"),
        (lambda: AmorLIP(D, dataset_size=0), "dataset_size is 0"),
        (lambda: AmorLIP(D, network_steps=0), "network_steps is 0; give 1 or more"),
        (lambda: AmorLIP(D, blend_maximum=1.0), "blend_maximum is 1.0; .*below 1"),
        (lambda: AmorLIP(D, average_decay=1.0), "average_decay is 1.0; .*below 1"),
        (lambda: AmorLIP(D, positive_coefficient=0.0), "positive_coefficient is 0.0; give a number above 0"),
    ],
)
def test_a_constructor_refuses_what_it_cannot_use_and_says_what_it_can(build, message):
    with pytest.raises(ValueError, match=message) as refused:
        build()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_signature_and_help_show_every_option_with_its_default_and_what_it_means(name):
    kind, settings = objectives.OBJECTIVES[name], OBJECTIVES[name]
    arguments, text = inspect.signature(kind).parameters, pydoc.render_doc(kind, renderer=pydoc.plaintext)
    for option in fields(settings):
        assert arguments[option.name].default == option.default
        assert arguments[option.name].kind is inspect.Parameter.KEYWORD_ONLY
    for option in fields(kind):
        assert f"{option.name}: {option.metadata['help']}" in text
        assert option.name in arguments and not hasattr(torch.nn.Module, option.name)


def test_options_are_read_only_and_a_misspelt_one_is_no_argument():
    objective = NeuCLIP(D, num_prototypes=3)
    assert (objective.num_prototypes, objective.rho) == (3, 6.5)
    with pytest.raises(TypeError, match="num_protoypes"):
        NeuCLIP(D, num_protoypes=3)


def test_a_run_builds_it_from_settings_and_what_it_knows():
    known = {"embed_dim": D, "dataset_size": 7, "epoch_samples": 9, "total_samples": 100}
    neuclip = build_objective("neuclip", NeuCLIPSettings(rho=3.0), **known)
    fastclip = build_objective("fastclip", FastCLIPSettings(gamma=0.5), **known)
    assert isinstance(neuclip, NeuCLIP) and (neuclip.embed_dim, neuclip.rho) == (D, 3.0)
    assert (fastclip.dataset_size, fastclip.epoch_samples, fastclip.total_samples, fastclip.gamma) == (7, 9, 100, 0.5)


@every_method
def test_pickled_and_copied_it_goes_on_as_it_was(method):
    objective = METHODS[method]()
    run(objective, range(2))
    twins = [pickle.loads(pickle.dumps(objective)), copy.deepcopy(objective)]
    want = run(objective, range(2, 4))
    assert all(run(twin, range(2, 4)) == want for twin in twins)


@every_method
def test_no_outer_optimizer_can_find_its_state_and_two_equal_ones_stay_two(method):
    one, other = METHODS[method](), METHODS[method]()
    assert list(one.parameters()) == [] and one != other and len({one, other}) == 2


# Calling it.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": torch.ones(B, D)}, r"image features are not unit rows \(length off by 1.83\); .*normalize"),
        ({"text": 1.05 * unit(B, D, seed=0)}, "text features are not unit rows"),
        ({"text": unit(3, D, seed=0)}, r"shapes \(6, 8\) and \(3, 8\); give two matrices of one shape"),
        ({"image": unit(B, seed=0), "text": unit(B, seed=0)}, "give two matrices"),
        ({"image": unit(B, 9, seed=0), "text": unit(B, 9, seed=0)}, "9 columns; .* was made with embed_dim=8"),
        ({"scale": 0.0}, r"logit_scale is 0; give 1/tau, which is positive: logit_scale.exp\(\)"),
        ({"scale": -3.0}, "logit_scale is -3; give 1/tau"),
        ({"scale": torch.ones(2)}, r"logit_scale has shape \(2,\); give one number"),
        ({"sample_ids": torch.arange(B + 1)}, r"sample_ids have shape \(7,\) .* give 6 integers, one per pair"),
        ({"sample_ids": torch.zeros(B)}, "torch.float32; give 6 integers"),
        ({"sample_ids": torch.zeros(B, dtype=torch.bool)}, "torch.bool; give 6 integers"),
        ({"caption_ids": torch.zeros(B, 1, dtype=torch.int64)}, "caption_ids have shape .* give 6 integers"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_right_are_refused_and_change_nothing(given, message):
    objective = NeuCLIP(D, num_prototypes=4)
    with pytest.raises(ValueError, match=message):
        call(objective, **given)
    assert objective.steps == 0 and not objective.normalizer.ready


def test_lengths_that_rounding_to_bf16_leaves_are_unit_rows():
    call(CLIP(), image=1.015 * unit(B, D, seed=0))


@pytest.mark.parametrize(
    "ids", [IDS.tolist(), IDS.int(), IDS.to(torch.uint8), IDS.numpy()], ids=lambda x: type(x).__name__
)
def test_ids_may_be_a_list_or_any_kind_of_integers(ids):
    want = call(FastCLIP(N, mask_duplicates=True), sample_ids=IDS, caption_ids=IDS % 2)
    assert torch.equal(call(FastCLIP(N, mask_duplicates=True), sample_ids=ids, caption_ids=(IDS % 2).tolist()), want)


def test_a_scale_may_be_a_number_or_have_one_element():
    want = call(CLIP(), scale=10.0)
    assert torch.equal(CLIP()(unit(B, D, seed=0), unit(B, D, seed=1), 10.0), want)
    assert torch.equal(call(CLIP(), scale=torch.tensor([10.0])).squeeze(), want)


@every_method
def test_a_logarithm_in_place_of_the_scale_is_warned_of_once_at_the_line_that_called(method):
    objective = METHODS[method]()
    with pytest.warns(UserWarning, match=r"logit_scale is 2.66, .* pass logit_scale.exp\(\)") as warned:
        for step in (0, 1):
            objective(**batch(step), logit_scale=torch.tensor(math.log(1 / 0.07)))
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        METHODS[method]()(**batch(0), logit_scale=torch.tensor(1 / 0.07))


def test_open_clips_trainer_gets_its_dict():
    assert torch.equal(call(CLIP(), output_dict=True)["contrastive_loss"], call(CLIP()))


def test_without_masking_captions_do_not_count_but_samples_do():
    ids = torch.tensor([5, 6, 7, 5, 8, 9])
    assert torch.equal(call(CLIP(), caption_ids=ids), call(CLIP()))
    assert torch.equal(call(CLIP(), sample_ids=ids), call(CLIP(mask_duplicates=True), caption_ids=ids))


@every_method
def test_in_bf16_and_under_autocast_it_computes_in_float32(method):
    plain, half, autocast = METHODS[method](), METHODS[method](), METHODS[method]()
    for step in range(2):
        given, scale = batch(step), torch.tensor(10.0)
        rounded = {key: given[key].bfloat16() for key in ("image_features", "text_features")}
        floats = {key: value.float() for key, value in rounded.items()}
        want, got = (o(**given | x, logit_scale=scale) for o, x in ((plain, floats), (half, rounded)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            third = autocast(**given | floats, logit_scale=scale)
        assert want.dtype == got.dtype == third.dtype == torch.float32
        assert torch.equal(got, want) and torch.equal(third, want)
    assert same_state(plain.state_dict(), half.state_dict()) and same_state(plain.state_dict(), autocast.state_dict())


@every_method
def test_a_second_derivative_is_an_error_instead_of_a_wrong_number(method):
    given = batch(0, torch.float64)
    features = [given["image_features"], given["text_features"]]
    loss = METHODS[method]()(**given, logit_scale=torch.tensor(10.0, dtype=torch.float64))
    torch.autograd.grad(loss, features, retain_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, features, create_graph=True)


@every_method
def test_made_moved_and_called_in_inference_mode_it_trains_afterwards(method):
    with torch.inference_mode():
        objective = METHODS[method]().double()
        objective.eval()(**batch(0, torch.float64), logit_scale=torch.tensor(10.0))
    want = METHODS[method]().double()
    assert run(objective.train(), range(3), torch.float64) == run(want, range(3), torch.float64)
    objective(**batch(3, torch.float64), logit_scale=torch.tensor(10.0)).backward()


@every_method
def test_a_step_without_grad_mode_learns_the_same(method):
    one, other = METHODS[method](), METHODS[method]()
    losses = run(one, range(3))
    with torch.no_grad():
        assert run(other, range(3)) == losses
    assert same_state(one.state_dict(), other.state_dict())


def test_siglip_says_where_to_get_the_bias_it_lacks():
    with pytest.raises(ValueError, match=r"logit_bias=model\.logit_bias.*init_logit_bias=-10"):
        call(SigLIP())


def test_the_docstring_says_that_activation_checkpointing_would_call_it_twice():
    assert "activation checkpointing" in objectives.Objective.__doc__
