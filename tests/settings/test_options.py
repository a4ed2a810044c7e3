"""Every option is stated once, with its help and limits; constructors, flags, YAML and help follow from it."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import yaml
from hypothesis import assume, given, settings, strategies
from torch import nn

from neuclip import CLIP, SCENT, AmorLIP, FastCLIP, NeuCLIP
from neuclip.cli.main import main
from neuclip.errors import UserError
from neuclip.objectives import OBJECTIVES
from neuclip.settings.reading import may_change_at_resume, read_settings
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_yaml


def sections(objective: str = "neuclip") -> dict[str, type]:
    """The dataclass of each section of a run's settings."""
    found = read_settings(None, ["--objective", objective])
    return {one.name: type(getattr(found, one.name)) for one in fields(found) if one.name != "objective_name"}


DATA, RUN, TRAIN = (sections()[name] for name in ("data", "run", "train"))
OF_OBJECTIVES = {name: sections(name)["objective"] for name in OBJECTIVES}
KINDS = {kind.__name__: kind for kind in [*sections().values(), *OF_OBJECTIVES.values(), *OBJECTIVES.values()]}
# What only a run can tell an objective; everything else it takes is in its settings.
KNOWN_TO_A_RUN = {
    "clip": set(),
    "siglip": set(),
    "fastclip": {"dataset_size", "epoch_samples", "total_samples"},
    "amorlip": {"embed_dim", "dataset_size", "total_samples"},
    "neuclip": {"embed_dim"},
    "scent": {"dataset_size"},
    "drrho": {"dataset_size", "epoch_samples", "total_samples"},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_option_has_one_line_of_help_and_hides_nothing_of_a_module(kind):
    module = nn.Module()
    for one in fields(kind):
        help = one.metadata["help"]
        assert help and "\n" not in help and not help.endswith("."), one.name
        assert not hasattr(module, one.name) or not issubclass(kind, nn.Module), one.name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_constructor_takes_the_settings_and_what_a_run_knows_and_explains_each(name):
    kind, settings = OBJECTIVES[name], OF_OBJECTIVES[name]
    assert issubclass(kind, settings) and kind.title == kind.__name__
    taken = inspect.signature(kind).parameters
    options = {one.name: one.default for one in fields(settings)}
    assert set(taken) == set(options) | KNOWN_TO_A_RUN[name]
    assert {name: taken[name].default for name in options} == options
    required = [name for name, parameter in taken.items() if parameter.default is parameter.empty]
    assert required == [name for name in taken if taken[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    for one in fields(kind):
        assert f"    {one.name}: {one.metadata['help']}" in kind.__doc__


REFUSALS = {
    "num_prototypes is 0; give 1 or more (default 4096)": lambda: NeuCLIP(8, num_prototypes=0),
    "num_prototypes is 2.5; give a whole number, 1 or more (default 4096)": lambda: NeuCLIP(8, num_prototypes=2.5),
    "num_prototypes is '4'; give a whole number, 1 or more (default 4096)": lambda: NeuCLIP(8, num_prototypes="4"),
    "embed_dim is True; give a whole number, 1 or more": lambda: NeuCLIP(True),
    "rho is nan; give a number (default 6.5)": lambda: NeuCLIP(8, rho=float("nan")),
    "eps is inf; give 0 or more (default 1e-06)": lambda: NeuCLIP(8, eps=float("inf")),
    "network_lr is 0.0; give a number above 0": lambda: NeuCLIP(8, network_lr=0.0),
    "fit is 'unify'; choose unified or separate (did you mean unified?)": lambda: NeuCLIP(8, fit="unify"),
    "mask_own_positive is 1; give True or False (default False)": lambda: NeuCLIP(8, mask_own_positive=1),
    "form is None; choose openclip or minibatch": lambda: CLIP(form=None),
    "gamma is 1.5; give a number above 0 and at most 1 (default 0.2)": lambda: FastCLIP(9, gamma=1.5),
    "average_decay is 1; give 0 or more and below 1 (default 0.92)": lambda: AmorLIP(8, average_decay=1),
    "rho is [8.5]; give a tuple of values (default (8.5, -8.5, -8.5))": lambda: AmorLIP(8, rho=[8.5]),
    "rho is (8.5, 'x'); give a number (default (8.5, -8.5, -8.5))": lambda: AmorLIP(8, rho=(8.5, "x")),
    "rho is empty; give one number, or several such as 8.5,-8.5,-8.5": lambda: AmorLIP(8, rho=()),
    "data.crop_scale is (0.5,); give a tuple of 2 values": lambda: DATA(crop_scale=(0.5,)),
    "data.crop_scale is (0.5, 2.0); give ": lambda: DATA(crop_scale=(0.5, 2.0)),
    "run.name is None; give text": lambda: RUN(name=None),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_wrong_type_or_value_is_refused_in_python_with_the_remedy(message):
    with pytest.raises(ValueError) as refusal:
        REFUSALS[message]()
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("section", sections())
def test_errors_name_an_option_with_its_section(section):
    name = fields(sections()[section])[0].name
    with pytest.raises(UserError, match=rf"^{section}\.{name} is "):
        sections()[section](**{name: object()})


OUTSIDE: dict[type, dict[str, Any]] = {
    CLIP: {"eps": -1e-9, "rho": -math.inf, "form": "mini-batch"},
    FastCLIP: {
        **{"dataset_size": 0, "epoch_samples": -1, "total_samples": -1, "gamma_decay_samples": -1, "gamma": 0.0},
        **{"temperature_initial": 2.0, "temperature_lr": 0.0, "temperature": "globl", "gamma_schedule": "cosin"},
    },
    AmorLIP: {
        **{"embed_dim": -3, "dataset_size": 0, "network_steps": 0, "blend_maximum": 1.0, "network_lr": 0.0},
        **{"positive_coefficient": 0.0, "rho": (1.0, math.inf), "epoch_samples": -1, "blend_samples": -1},
    },
    NeuCLIP: {
        **{"embed_dim": 0, "restart_every": -1, "inner_steps": -1, "update": "alternate", "network": "mpl"},
        **{"restart": "period", "alpha_gradient": "detach"},
    },
    SCENT: {"dataset_size": 0, "log_alpha": float("inf"), "eps": -1e-9, "temperature_gradient": "papers"},
}
NEEDED: dict[type, dict[str, Any]] = {
    CLIP: {},
    FastCLIP: {"dataset_size": 9},
    SCENT: {"dataset_size": 9},
    AmorLIP: {"embed_dim": 8},
    NeuCLIP: {"embed_dim": 8},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, values in OUTSIDE.items() for name in values])
def test_each_option_has_its_limit_and_a_misspelt_choice_its_nearest(kind, name):
    value = OUTSIDE[kind][name]
    with pytest.raises(ValueError, match=f"^{name} is .*; .*{'did you mean' if isinstance(value, str) else 'give'}"):
        kind(**NEEDED[kind] | {name: value})
    with pytest.raises(TypeError, match=f"{name}_"):  # a misspelt name is no argument
        kind(**NEEDED[kind] | {f"{name}_": value})


def test_whole_numbers_and_those_of_numpy_are_numbers_and_a_limit_may_be_reached():
    objective = NeuCLIP(np.int64(8), rho=7, eps=np.float64(0), network_lr=None)
    assert (objective.embed_dim, objective.rho, objective.eps) == (8, 7, 0)
    assert FastCLIP(1, gamma=1.0).gamma == 1 and DATA(crop_scale=(1.0, 1.0)).crop_scale == (1, 1)


def test_an_option_cannot_be_changed_behind_the_objectives_back():
    with pytest.raises(AttributeError):
        NeuCLIP(8).rho = 3.0
    with pytest.raises(AttributeError):
        TRAIN().batch_size = 3


def test_a_run_may_continue_elsewhere_and_evaluate_otherwise_but_compute_nothing_else():
    keys = [f"{section}.{one.name}" for section, kind in sections().items() for one in fields(kind)]
    changing = [key for key in keys if may_change_at_resume(key, "neuclip")]
    assert [key for key in changing if not key.startswith(("evaluation.", "checkpoint.", "log."))] == [
        *("run.device", "run.threads", "data.train", "data.workers", "data.stored_features", "data.max_bad_share"),
        *("data.cache_size", "data.remote_timeout", "train.micro_batch_size"),
    ]
    assert {"evaluation.every", "checkpoint.keep", "log.wandb"} <= set(changing)
    assert not may_change_at_resume("objective.name", "neuclip")


# Written and read again

TROUBLESOME = ["", "on", "no", "null", "~", "none", "012", "1e-3", "a: b", "# c", "'", "two\nlines", "\x85", " ü 图 "]


def values_of(declared: Any, default: Any) -> strategies.SearchStrategy[Any]:
    """Values near the default, so that most pass their section's checks, and any text at all."""
    if get_origin(declared) is Literal:
        return strategies.sampled_from(get_args(declared))
    if get_origin(declared) in (Union, UnionType):  # X | None
        return strategies.none() | values_of(get_args(declared)[0], 1)
    if get_origin(declared) is tuple and Ellipsis in get_args(declared):
        element = get_args(declared)[0]
        return strategies.lists(values_of(element, element()), max_size=3).map(tuple)
    if declared is bool:
        return strategies.booleans()
    if declared is int:
        return strategies.integers(default, 2 * default or 2**40)
    if declared is float:
        return strategies.floats(*sorted((0.999 * default, default or 1.0)))
    if declared is str:
        return strategies.sampled_from(TROUBLESOME) | strategies.text()
    return strategies.floats(0.01, 1).map(lambda low: (low, 1.0))


@strategies.composite
def all_settings(draw: Any) -> Settings:
    objective, made = draw(strategies.sampled_from(sorted(OBJECTIVES))), {}
    for section, kind in sections(objective).items():
        types = get_type_hints(kind)
        chosen = {one.name: draw(values_of(types[one.name], one.default)) for one in fields(kind)}
        try:
            made[section] = kind(**chosen)
        except UserError:
            assume(False)
    return Settings(objective_name=objective, **made)


@settings(max_examples=60)
@given(all_settings())
def test_written_settings_read_back_equal_by_us_and_by_plain_yaml_readers(original):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_text(settings_as_yaml(original))
        assert read_settings(path) == original
        stored = yaml.safe_load(path.read_text())
    assert stored["optimizer"]["eps"] == original.optimizer.eps
    assert stored["run"]["name"] == original.run.name
    assert tuple(stored["evaluation"]["retrieval"]) == original.evaluation.retrieval


def test_every_option_is_written_whether_given_or_not():
    stored = yaml.safe_load(settings_as_yaml(read_settings()))
    assert stored["objective"].pop("name") == "neuclip"
    options = {section: [one.name for one in fields(kind)] for section, kind in sections().items()}
    assert {section: list(values) for section, values in stored.items()} == options


def test_the_help_names_every_option_with_its_default_tiny_value_and_what_a_flag_takes(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    keys = {
        f"{section}.{one.name}"
        for name in OBJECTIVES
        for section, kind in sections(name).items()
        for one in fields(kind)
    }
    assert [key for key in keys if f"--{key} " not in text] == []
    assert (
        "--objective clip|siglip|fastclip|amorlip|neuclip|scent|drrho\n" in text
        and "[default: 1024; tiny: 128]" in text
    )
    for taken in ("data.crop_scale X,X", "objective.network_lr X", "objective.rho X,...", "train.samples N"):
        assert f"--{taken} " in text
    assert "--objective.restart periodic|rolling " in text and "--objective.reinitialise true|false " in text
    assert max(map(len, text.splitlines())) <= 110
    assert main(["train", "--help", "log"]) == 0
    text = capsys.readouterr().out
    assert "--log.every" in text and "--train.samples" not in text
