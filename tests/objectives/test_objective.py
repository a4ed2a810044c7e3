"""What every objective keeps to: its arguments are checked, and it records only what it names."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import fields

import pytest
import torch

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.objectives import registry
from neuclip.settings.objectives import OBJECTIVES
from tests.objectives.features import unit

B, D = 6, 5
METHODS = {
    "clip": CLIP,
    "mini-batch form": lambda: CLIP(form="minibatch"),
    "siglip": SigLIP,
    "fastclip": lambda: FastCLIP(B),
    "fastclip v2": lambda: FastCLIP(B, variant="v2"),
    "amorlip": lambda: AmorLIP(D, epoch_samples=B),
    "neuclip": lambda: NeuCLIP(D, num_prototypes=4),
    "neuclip, mlp, masked": lambda: NeuCLIP(D, network="mlp", mask_duplicates=True),
}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_recorded_is_among_the_names_of_the_metrics(method):
    objective = METHODS[method]()
    for step in range(3):
        scale, bias = torch.tensor(10.0, dtype=torch.float64), torch.tensor(-10.0, dtype=torch.float64)
        features = unit(B, D, seed=step), unit(B, D, seed=9 + step)
        objective(*features, scale, bias, sample_ids=torch.arange(B), caption_ids=torch.arange(B))
        assert set(objective.metrics) <= set(objective.metric_names)
    assert len(set(objective.metric_names)) == len(objective.metric_names)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: NeuCLIP(D, update="alternate"),
            r"update is 'alternate'; choose alternating or simultaneous \(did you mean alternating\?\)",
        ),
        (lambda: NeuCLIP(D, fit="unify"), r"fit is 'unify'; .*did you mean unified\?"),
        (lambda: NeuCLIP(D, network="mpl"), r"network is 'mpl'; .*did you mean mlp\?"),
        (lambda: NeuCLIP(D, network_optimizer="adamw"), r"network_optimizer is 'adamw'; .*did you mean adam\?"),
        (lambda: NeuCLIP(D, restart="period"), r"restart is 'period'; .*did you mean periodic\?"),
        (lambda: NeuCLIP(D, alpha_gradient="detach"), r"alpha_gradient is 'detach'; .*did you mean detached\?"),
        (lambda: NeuCLIP(D, temperature_gradient="papers"), r"temperature_gradient is 'papers'; .*paper\?"),
        (lambda: CLIP(form="mini-batch"), r"form is 'mini-batch'; .*did you mean minibatch\?"),
        (lambda: FastCLIP(9, gamma_schedule="cosin"), r"gamma_schedule is 'cosin'; .*did you mean cosine\?"),
        (lambda: AmorLIP(D, divergence="kl"), "divergence is 'kl'; choose log_l2, kl_asymmetric"),
        (lambda: NeuCLIP(0), "embed_dim is 0; give 1 or more"),
        (lambda: AmorLIP(-3), "embed_dim is -3; give 1 or more"),
        (lambda: NeuCLIP(D, num_prototypes=0), "^num_prototypes is 0; give 1 or more"),
        (lambda: NeuCLIP(D, restart_every=-1), "restart_every is -1; give 0 or more"),
        (lambda: NeuCLIP(D, network_lr=0.0), "network_lr is 0.0; give a number above 0"),
        (lambda: NeuCLIP(D, network_eps=0.0), "network_eps is 0.0; give a number above 0"),
        (lambda: NeuCLIP(D, network_betas=(0.9, 1.0)), r"network_betas is \(0.9, 1.0\); give two numbers from 0"),
        (lambda: FastCLIP(0), "dataset_size is 0; give 1 or more"),
        (lambda: FastCLIP(9, epoch_samples=-1), "epoch_samples is -1"),
        (lambda: FastCLIP(9, gamma=0.0), "gamma is 0.0; give a number above 0"),
        (lambda: AmorLIP(D, dataset_size=0), "dataset_size is 0"),
        (lambda: AmorLIP(D, network_steps=0), "network_steps is 0; give 1 or more"),
    ],
)
def test_a_constructor_refuses_what_it_cannot_use_and_names_the_nearest(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("method", METHODS)
def test_a_logarithm_in_place_of_the_scale_is_warned_of_once(method):
    def call(objective, scale):
        given = torch.tensor(scale, dtype=torch.float64, requires_grad=True), torch.tensor(-10.0, dtype=torch.float64)
        objective(unit(B, D, seed=0), unit(B, D, seed=1), *given, sample_ids=torch.arange(B))

    objective = METHODS[method]()
    with pytest.warns(UserWarning, match=r"logit_scale is 2.66, .* pass logit_scale.exp\(\)") as warned:
        call(objective, math.log(1 / 0.07))
        call(objective, math.log(1 / 0.07))
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(METHODS[method](), 1 / 0.07)


def test_a_state_that_lacks_a_number_is_refused_in_one_line():
    state = AmorLIP(D).state_dict()
    del state["_extra_state"]["epoch_start"]
    with pytest.raises(ValueError, match=r"not the state of AmorLIP.*'epoch_start'"):
        AmorLIP(D).load_state_dict(state)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_constructor_has_every_setting_with_its_default(name):
    """Beside the fields that belong to the model. None, where a constructor has it, means the setting's default."""
    arguments = inspect.signature(registry.OBJECTIVES[name]).parameters
    settings = OBJECTIVES[name]
    for field in fields(settings):
        if field.name not in settings.model_fields and field.name not in registry.OBJECTIVES[name].needs:
            assert arguments[field.name].default in (field.default, None), field.name
    assert all(need in arguments for need in registry.OBJECTIVES[name].needs)
