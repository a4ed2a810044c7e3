"""Experiments as data: one YAML file per table or figure with a question, variants to compare and the paper's values.

`common.yaml` holds what experiments share: scales, data sets and methods. Together they give a plan: one job per case
(a data set and a batch size), variant and seed. A job is identified by its settings alone: experiments share runs, and
records do not depend on paths.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from neuclip.errors import UserError, proposal
from neuclip.report.contents import flatten
from neuclip.settings.paper import paper_yaml
from neuclip.settings.reading import build_settings, parse_recipe, read_flags, read_recipe
from neuclip.settings.writing import settings_as_dict

FOLDER = Path(__file__).parent
COMMON = "common"
TUNING_SEED = 100  # seed of the tries; no reported run has it
TRAIN = "train"
REFERENCE = "objective.reference"  # DRRho's reference model; in a plan, the key of the run that trains it
SETTING, OBJECTIVE = "paper.setting", "paper.objective"  # at the paper's scale: a row of Table 1, and a method
Flat = dict[str, str]  # settings as typed on the command line; "recipe" and "data" are names from common.yaml
Choice = tuple[str, str]  # a case and a variant


@dataclass(frozen=True)
class Experiment:
    """One YAML file."""

    name: str
    title: str
    question: str
    measure: str = "recall_at_1"  # the only one that gets a verdict
    against: Sequence[str] = ("CLIP", "mini-batch form")  # baselines: variants that the others are compared with
    kind: str = TRAIN  # a job runs `neuclip train`, or the function `run` of this module of the package
    cases: Sequence[str] = ()  # names in common.yaml
    seeds: int = 4
    tuned: bool = False  # run each variant with the settings of its best try on held-out data
    settings: Mapping[str, Any] = field(default_factory=dict)  # of all jobs
    smoke: Mapping[str, Any] = field(default_factory=dict)  # of jobs at scale smoke
    variants: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    paper: Sequence[Mapping[str, Any]] = ()  # tables of the paper: caption, head, rows
    paper_scale: Mapping[str, Any] = field(default_factory=dict)  # settings (rows of Table 1), seeds, variants
    across: str = ""  # draw the measure over this setting
    notes: Sequence[str] = ()


class Job(NamedTuple):
    """One run."""

    case: str
    variant: str
    seed: int
    kind: str
    settings: Flat

    @property
    def key(self) -> str:
        """A hash of the settings: experiments that plan the same run share its record."""
        text = json.dumps({"kind": self.kind, **self.settings}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.variant} {self.case}".lower()).strip("-")
        return f"{words}-{self.seed}-{self.key}"


def experiments() -> list[str]:
    """The names of all experiments, in the order of common.yaml."""
    return list(common()["experiments"])


def read_experiment(name: str) -> Experiment:
    """Read an experiment's YAML file.

    >>> read_experiment("restarts").title
    'Restart frequency'
    """
    if name not in experiments():
        raise UserError(f"no experiment {name!r}; {proposal(name, experiments())}")
    return Experiment(name, **read_yaml(name))


@cache
def common() -> dict[str, Any]:
    return read_yaml(COMMON)


def read_yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def flat(*layers: Mapping[str, Any] | None) -> Flat:
    """Merge layers of settings, later ones win, and write values as they would be typed."""
    merged = {key: value for layer in layers for key, value in (layer or {}).items()}
    return {key: typed(value) for key, value in merged.items()}


def typed(value: Any) -> str:
    """A value as it would be typed.

    >>> typed([8.5, -8.5]), typed(True), typed(0.5)
    ('8.5,-8.5', 'true', '0.5')
    """
    if isinstance(value, list):
        return ",".join(map(typed, value))
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- From an experiment to its jobs -----------------------------------------------------------------------------------


def plan(
    experiment: Experiment,
    scale: str,
    cases: Sequence[str],
    seeds: int = 0,
    best: Mapping[Choice, Flat] | None = None,
) -> list[Job]:
    """The runs that are reported. `best` holds the chosen try of each case and variant: a tuned experiment leaves out
    variants whose tries have not finished. The outer loop is over seeds, so a plan that is stopped early has all
    variants."""
    limits = common()["scales"][scale]
    count = seeds or min(experiment.seeds, limits.get("most_seeds", experiment.seeds))
    jobs = []
    for case in cases:
        tuned_as = limits["cases"][case].get("tuned_as", case)
        for seed in range(count):
            for variant in experiment.variants:
                chosen = (best or {}).get((tuned_as, variant))
                settings = settings_of(experiment, scale, case, variant, chosen)
                if settings is not None and (chosen is not None or not experiment.tuned):
                    jobs.append(Job(case, variant, seed, experiment.kind, settings | {"run.seed": str(seed)}))
    return jobs


def tuning_plan(experiment: Experiment, scale: str, cases: Sequence[str]) -> dict[Choice, list[tuple[Flat, Job]]]:
    """The tries of each case and variant: the settings to try, and a run that holds out some training pairs and is
    measured on them. All variants have the same number of tries. A case with `tuned_as` uses the tries of that case."""
    if not experiment.tuned:
        return {}
    listed, limits = common()["tuning"]["tries"], common()["scales"][scale]
    tried: dict[Choice, list[tuple[Flat, Job]]] = {}
    for case, variant in product(cases, experiment.variants):
        tuned_as = limits["cases"][case].get("tuned_as", case)
        if (tuned_as, variant) in tried or settings_of(experiment, scale, case, variant, {}) is None:
            continue
        for one in map(flat, listed.get(variant, listed["all"])[: limits.get("most_tries")]):
            settings = settings_of(experiment, scale, tuned_as, variant, one)
            assert settings is not None, f"{variant} runs in {case}, but not in {tuned_as}, whose tries it uses"
            whole = flat(settings, held_out(settings["data"]), limits.get("always"))
            tried.setdefault((tuned_as, variant), []).append((one, Job(tuned_as, variant, TUNING_SEED, TRAIN, whole)))
    return tried


def held_out(data: str) -> Mapping[str, Any]:
    """Settings of a run that holds out some training pairs and is measured on them."""
    tuning = common()["tuning"]
    return {**tuning["settings"], "data.hold_out": tuning["hold_out"][data], "run.seed": TUNING_SEED}


def reference_job(scale: str, data: str) -> Job:
    """The run that trains DRRho's reference model. It does not see the pairs that tries are measured on."""
    limits = common()["scales"][scale]
    settings = flat(limits["settings"], {"data": data}, common()["reference"], held_out(data), limits.get("always"))
    return Job(f"{data}, reference", "reference", TUNING_SEED, TRAIN, settings)


def cases_of(experiment: Experiment, scale: str, *, own_data: bool = False) -> list[str]:
    """The cases of the experiment, or the cases on the user's own data."""
    known = common()["scales"][scale]["cases"]
    chosen = [case for case in experiment.cases if case in known] or list(known)[:1]
    if own_data:
        chosen = [case for case, settings in known.items() if settings["data"] == "own"]
    return chosen


def settings_of(experiment: Experiment, scale: str, case: str, variant: str, chosen: Flat | None) -> Flat | None:
    """The settings of a run, or None if the variant leaves out this case.

    A variant may have three keys that are no settings: `method` names an entry of common.yaml's methods to start from
    (default: the variant's name), `not_in` leaves out cases, and `within` has settings for some cases. Both select
    cases by words in their names."""
    own, limits = dict(experiment.variants[variant] or {}), common()["scales"][scale]
    if any(words in case for words in own.pop("not_in", ())):
        return None
    for words, settings in own.pop("within", {}).items():
        own |= settings if words in case else {}
    method = common()["methods"].get(own.pop("method", variant), {})
    of_case = dict(limits["cases"][case])
    of_case.pop("tuned_as", None)
    factor = of_case.pop("rate_factor", None)
    last = flat(limits.get("always"), experiment.smoke if scale == "smoke" else {})
    settings = flat(limits["settings"], of_case, experiment.settings, method, own, chosen, last)
    if factor is not None:
        settings["optimizer.learning_rate"] = f"{float(settings['optimizer.learning_rate']) * factor:g}"
    if settings.get("objective.name") == "drrho":
        settings[REFERENCE] = reference_job(scale, settings["data"]).key
    return settings


def base_recipe(name: str) -> Path:
    """The recipe that a job's settings are added to: a copy that stays the same when a recipe for users changes."""
    return FOLDER / "recipes" / f"{name}.yaml"


def typed_settings(job: Job) -> dict[str, Any]:
    """All settings of the job's run, flat and typed, without the paths of the data, which differ between machines."""
    own = dict(job.settings)
    data, recipe = own.pop("data"), own.pop("recipe", "")
    setting, objective = own.pop(SETTING, ""), own.pop(OBJECTIVE, "")
    text = parse_recipe(paper_yaml(setting, objective), setting) if setting else read_recipe(base_recipe(recipe))
    known = build_settings(text, read_flags([f"--{key}={value}" for key, value in own.items()]))
    return flatten(settings_as_dict(known)) | {"data.train": data}
