"""Every option is stated once, with its help and limits; constructors and flags follow from it."""

from __future__ import annotations

import inspect
import math
from dataclasses import MISSING, fields

import numpy as np
import pytest
from torch import nn

from neuclip.objectives import OBJECTIVES
from neuclip.objectives.amorlip import AmorLIP
from neuclip.objectives.clip import CLIP
from neuclip.objectives.fastclip import FastCLIP
from neuclip.objectives.neuclip import NeuCLIP
from neuclip.objectives.scent import SCENT
from neuclip.settings.objectives import OBJECTIVES as OBJECTIVE_SETTINGS
from neuclip.settings.options import LIMITS, check_value, types_of
from neuclip.settings.reading import (
    OBJECTIVE_KEY,
    SECTION_NAMES,
    declared_types,
    may_change_at_resume,
    section_type,
)

SECTIONS = [section_type(name, "") for name in SECTION_NAMES if name != "objective"]
KINDS = {kind.__name__: kind for kind in [*SECTIONS, *OBJECTIVE_SETTINGS.values(), *OBJECTIVES.values()]}
OPTIONS = [pytest.param(kind, one, id=f"{name}.{one.name}") for name, kind in KINDS.items() for one in fields(kind)]
# What only a run can tell an objective; everything else it takes is in its settings.
KNOWN_TO_A_RUN = {
    "clip": set(),
    "siglip": set(),
    "fastclip": {"dataset_size", "epoch_samples", "total_samples"},
    "amorlip": {"embed_dim", "dataset_size", "total_samples"},
    "neuclip": {"embed_dim"},
    "scent": {"dataset_size"},
}


@pytest.mark.parametrize(("kind", "one"), OPTIONS)
def test_every_option_has_help_and_a_default_within_its_own_limits(kind, one):
    help, limits, declared = one.metadata["help"], one.metadata["limits"], types_of(kind)[one.name]
    assert help and "\n" not in help and not help.endswith(".")
    assert set(limits) <= set(LIMITS)
    assert not {"at_least", "above"} <= set(limits) and not {"at_most", "below"} <= set(limits)
    assert limits.get("at_least", limits.get("above", -1e9)) < limits.get("at_most", limits.get("below", 1e9))
    assert declared is not bool or not limits
    if one.default is not MISSING:
        check_value(one.default, declared, limits)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_errors_name_an_option_with_its_section_and_an_argument_without(kind):
    names = {section_type(name, "clip"): f"{name}." for name in SECTION_NAMES}
    assert kind.prefix == ("" if issubclass(kind, nn.Module) else names.get(kind, "objective."))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_option_hides_an_attribute_of_a_module(name):
    module = nn.Module()
    assert not [one.name for one in fields(OBJECTIVES[name]) if hasattr(module, one.name)]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_constructor_takes_the_settings_and_what_a_run_knows_and_explains_each(name):
    kind, settings = OBJECTIVES[name], OBJECTIVE_SETTINGS[name]
    taken = inspect.signature(kind).parameters
    options = {one.name: one.default for one in fields(settings)}
    assert set(taken) == set(options) | KNOWN_TO_A_RUN[name]
    assert {name: taken[name].default for name in options} == options
    required = [name for name, parameter in taken.items() if parameter.default is parameter.empty]
    assert required == [name for name in taken if taken[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    for one in fields(kind):
        assert f"    {one.name}: {one.metadata['help']}" in kind.__doc__


def test_both_tables_name_the_same_objectives_in_the_same_order():
    assert list(OBJECTIVES) == list(OBJECTIVE_SETTINGS)
    for name, kind in OBJECTIVES.items():
        assert issubclass(kind, OBJECTIVE_SETTINGS[name]) and kind.title == kind.__name__


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NeuCLIP(8, num_prototypes=0), "num_prototypes is 0; give 1 or more (default 4096)"),
        (
            lambda: NeuCLIP(8, num_prototypes=2.5),
            "num_prototypes is 2.5; give a whole number, 1 or more (default 4096)",
        ),
        (
            lambda: NeuCLIP(8, num_prototypes="4"),
            "num_prototypes is '4'; give a whole number, 1 or more (default 4096)",
        ),
        (lambda: NeuCLIP(True), "embed_dim is True; give a whole number, 1 or more"),
        (lambda: NeuCLIP(8, rho=float("nan")), "rho is nan; give a number (default 6.5)"),
        (lambda: NeuCLIP(8, eps=float("inf")), "eps is inf; give 0 or more (default 1e-06)"),
        (lambda: NeuCLIP(8, network_lr=0.0), "network_lr is 0.0; give a number above 0"),
        (lambda: NeuCLIP(8, fit="unify"), "fit is 'unify'; choose unified or separate (did you mean unified?)"),
        (lambda: NeuCLIP(8, mask_own_positive=1), "mask_own_positive is 1; give True or False (default False)"),
        (
            lambda: NeuCLIP(8, pool_batch=True, restart="rolling"),
            "pool_batch counts the batch twice with restart rolling, which has stored it among the prototypes; "
            "give restart periodic, or leave out pool_batch",
        ),
        (
            lambda: NeuCLIP(8, pool_batch=True, network="mlp"),
            "pool_batch counts prototypes, and network mlp has none; give network prototypes, or leave out pool_batch",
        ),
        (lambda: CLIP(form=None), "form is None; choose openclip or minibatch"),
        (lambda: FastCLIP(9, gamma=1.5), "gamma is 1.5; give a number above 0 and at most 1 (default 0.2)"),
        (lambda: AmorLIP(8, average_decay=1), "average_decay is 1; give 0 or more and below 1 (default 0.92)"),
        (lambda: AmorLIP(8, rho=[8.5]), "rho is [8.5]; give a tuple of values (default (8.5, -8.5, -8.5))"),
        (lambda: AmorLIP(8, rho=(8.5, "x")), "rho is (8.5, 'x'); give a number (default (8.5, -8.5, -8.5))"),
        (lambda: AmorLIP(8, rho=()), "rho is empty; give one number, or several such as 8.5,-8.5,-8.5"),
        (lambda: section_type("data", "")(crop_scale=(0.5,)), "data.crop_scale is (0.5,); give a tuple of 2 values"),
        (lambda: section_type("run", "")(name=None), "run.name is None; give text"),
    ],
)
def test_a_wrong_type_or_value_is_refused_in_python_with_the_remedy(build, message):
    with pytest.raises(ValueError) as refusal:
        build()
    assert str(refusal.value).startswith(message)


OUTSIDE = {
    CLIP: {"eps": -1e-9, "rho": -math.inf, "form": "mini-batch"},
    FastCLIP: {
        **{"dataset_size": 0, "epoch_samples": -1, "total_samples": -1, "gamma_decay_samples": -1, "gamma": 0.0},
        **{"temperature_initial": 2.0, "temperature_lr": 0.0, "temperature": "globl", "gamma_schedule": "cosin"},
    },
    SCENT: {"dataset_size": 0, "log_alpha": math.inf, "eps": -1e-9, "temperature_gradient": "papers"},
    AmorLIP: {
        **{"embed_dim": -3, "dataset_size": 0, "network_steps": 0, "blend_maximum": 1.0, "network_lr": 0.0},
        **{"positive_coefficient": 0.0, "rho": (1.0, math.inf), "epoch_samples": -1, "blend_samples": -1},
    },
    NeuCLIP: {
        **{"embed_dim": 0, "restart_every": -1, "inner_steps": -1, "update": "alternate", "network": "mpl"},
        **{"restart": "period", "alpha_gradient": "detach", "temperature_gradient": "papers"},
    },
}
NEEDED = {
    FastCLIP: {"dataset_size": 9},
    SCENT: {"dataset_size": 9},
    AmorLIP: {"embed_dim": 8},
    NeuCLIP: {"embed_dim": 8},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, values in OUTSIDE.items() for name in values])
def test_each_option_has_its_limit_and_a_misspelt_choice_its_nearest(kind, name):
    value = OUTSIDE[kind][name]
    with pytest.raises(ValueError, match=f"^{name} is .*; .*{'did you mean' if isinstance(value, str) else 'give'}"):
        kind(**NEEDED.get(kind, {}) | {name: value})
    with pytest.raises(TypeError, match=f"{name}_"):  # a misspelt name is no argument
        kind(**NEEDED.get(kind, {}) | {f"{name}_": value})


def test_whole_numbers_and_those_of_numpy_are_numbers():
    objective = NeuCLIP(np.int64(8), rho=7, eps=np.float64(0), network_lr=None)
    assert (objective.embed_dim, objective.rho, objective.eps) == (8, 7, 0)


def test_an_option_cannot_be_changed_behind_the_objectives_back():
    with pytest.raises(AttributeError):
        NeuCLIP(8).rho = 3.0
    with pytest.raises(AttributeError):
        section_type("train", "")().batch_size = 3


@pytest.mark.parametrize(("name", "limit", "inside", "outside"), [
    ("at_least", 2, 2, 1), ("above", 2, 3, 2), ("at_most", 2, 2, 3), ("below", 2, 1, 2),
])  # fmt: skip
def test_a_limit_is_where_its_name_says(name, limit, inside, outside):
    check_value(inside, int, {name: limit})
    check_value((inside, inside), tuple[int, ...], {name: limit})
    for value, declared in ((outside, int), ((inside, outside), tuple[int, ...]), (outside, int | None)):
        with pytest.raises(ValueError, match=f"{limit}"):
            check_value(value, declared, {name: limit})


def test_a_run_may_continue_elsewhere_and_evaluate_otherwise_but_compute_nothing_else():
    keys = [key for key in declared_types("neuclip") if may_change_at_resume(key, "neuclip")]
    alone = [key for key in keys if not key.startswith(("evaluation.", "checkpoint.", "log."))]
    assert alone == [
        *("run.device", "run.threads", "data.train", "data.workers", "data.stored_features", "data.max_bad_share"),
        *("data.cache_size", "data.remote_timeout", "train.micro_batch_size"),
    ]
    assert {"evaluation.every", "checkpoint.keep", "log.wandb"} <= set(keys)
    assert not may_change_at_resume(OBJECTIVE_KEY, "neuclip")
