"""What an experiment is: a question, variants to compare and the paper's values, in one YAML file per table or figure.

`common.yaml` holds what they share: the scales, the data sets and the methods. From these a plan follows: one job per
case (a data set and a batch size), variant and seed. A job is known by its settings alone, so that experiments share
runs, and records do not depend on where the data lies.
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
TUNING_SEED = 100  # of the runs that choose settings; no run that is reported has it
TRAIN = "train"
REFERENCE = "objective.reference"  # of DRRho: in a plan, the key of the run whose model it compares with
SETTING, OBJECTIVE = "paper.setting", "paper.objective"  # of a job at the paper's scale: a row of Table 1, a method
Flat = dict[str, str]  # settings of a run as the command line takes them; also "recipe" and "data", a data set's name
Choice = tuple[str, str]  # a case and a variant


@dataclass(frozen=True)
class Experiment:
    """One YAML file."""

    name: str
    title: str
    question: str
    measure: str = "recall_at_1"  # the one that gets a verdict
    against: Sequence[str] = ("CLIP", "mini-batch form")  # variants that the others are compared with
    kind: str = TRAIN  # what a job does: `neuclip train`, or a module of this package with a function `run`
    cases: Sequence[str] = ()  # names in common.yaml
    seeds: int = 4
    tuned: bool = False  # each variant's best try on held-out data is what counts
    settings: Mapping[str, Any] = field(default_factory=dict)  # of all jobs
    smoke: Mapping[str, Any] = field(default_factory=dict)  # of those at this scale
    variants: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    paper: Sequence[Mapping[str, Any]] = ()  # its tables: caption, head, rows
    paper_scale: Mapping[str, Any] = field(default_factory=dict)  # settings (of Table 1), seeds, variants
    across: str = ""  # a setting that a chart has on its axis
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
        """Equal for equal settings, in whatever experiment."""
        text = json.dumps({"kind": self.kind, **self.settings}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Of its folder."""
        words = re.sub(r"[^a-z0-9]+", "-", f"{self.variant} {self.case}".lower()).strip("-")
        return f"{words}-{self.seed}-{self.key}"


def experiments() -> list[str]:
    """In the order of the paper, as common.yaml lists them."""
    return list(common()["experiments"])


def read_experiment(name: str) -> Experiment:
    """
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
    """Later layers win. Values as they would be typed."""
    merged = {key: value for layer in layers for key, value in (layer or {}).items()}
    return {key: typed(value) for key, value in merged.items()}


def typed(value: Any) -> str:
    """
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
    """The runs that are reported. `best`: the chosen try of each case and variant; what has none yet is left out where
    the experiment is tuned. Seeds come first, so that a plan that is stopped early has all variants."""
    own = common()["scales"][scale]
    count = seeds or min(experiment.seeds, own.get("most_seeds", experiment.seeds))
    jobs = []
    for case in cases:
        tuned_as = own["cases"][case].get("tuned_as", case)
        for seed in range(count):
            for variant in experiment.variants:
                chosen = (best or {}).get((tuned_as, variant))
                settings = settings_of(experiment, scale, case, variant, chosen)
                if settings is not None and (chosen is not None or not experiment.tuned):
                    jobs.append(Job(case, variant, seed, experiment.kind, settings | {"run.seed": str(seed)}))
    return jobs


def tuning_plan(experiment: Experiment, scale: str, cases: Sequence[str]) -> dict[Choice, list[tuple[Flat, Job]]]:
    """The tries of each case and variant, as many for each: what is tried, and its run, which is trained without some
    of the training pairs and measured on those. A case that is `tuned_as` another takes that one's."""
    if not experiment.tuned:
        return {}
    listed, own = common()["tuning"]["tries"], common()["scales"][scale]
    tried: dict[Choice, list[tuple[Flat, Job]]] = {}
    for case, variant in product(cases, experiment.variants):
        tuned_as = own["cases"][case].get("tuned_as", case)
        if (tuned_as, variant) in tried or settings_of(experiment, scale, case, variant, {}) is None:
            continue
        for one in map(flat, listed.get(variant, listed["all"])[: own.get("most_tries")]):
            settings = settings_of(experiment, scale, tuned_as, variant, one)
            assert settings is not None, f"{variant} runs in {case}, but not in {tuned_as}, whose tries it takes"
            whole = flat(settings, held_out(settings["data"]), own.get("always"))
            tried.setdefault((tuned_as, variant), []).append((one, Job(tuned_as, variant, TUNING_SEED, TRAIN, whole)))
    return tried


def held_out(data: str) -> Mapping[str, Any]:
    """Settings of a run that is measured on some of the training pairs and does not train on them."""
    tuning = common()["tuning"]
    return {**tuning["settings"], "data.hold_out": tuning["hold_out"][data], "run.seed": TUNING_SEED}


def reference_job(scale: str, data: str) -> Job:
    """The run whose model DRRho compares with. It has not seen the pairs that tries are measured on."""
    own = common()["scales"][scale]
    settings = flat(own["settings"], {"data": data}, common()["reference"], held_out(data), own.get("always"))
    return Job(f"{data}, reference", "reference", TUNING_SEED, TRAIN, settings)


def cases_of(experiment: Experiment, scale: str, *, own_data: bool = False) -> list[str]:
    """The experiment's, or those on the user's own data."""
    known = common()["scales"][scale]["cases"]
    chosen = [case for case in experiment.cases if case in known] or list(known)[:1]
    if own_data:
        chosen = [case for case, settings in known.items() if settings["data"] == "own"]
    return chosen


def settings_of(experiment: Experiment, scale: str, case: str, variant: str, chosen: Flat | None) -> Flat | None:
    """None where a variant leaves out this case. `method` names settings of common.yaml that a variant starts from,
    `not_in` cases that it leaves out, and `within` has settings for some: both by words that a case contains."""
    own, wide = dict(experiment.variants[variant] or {}), common()["scales"][scale]
    if any(words in case for words in own.pop("not_in", ())):
        return None
    for words, settings in own.pop("within", {}).items():
        own |= settings if words in case else {}
    method = common()["methods"].get(own.pop("method", variant), {})
    of_case = dict(wide["cases"][case])
    of_case.pop("tuned_as", None)
    factor = of_case.pop("rate_factor", None)
    last = flat(wide.get("always"), experiment.smoke if scale == "smoke" else {})
    settings = flat(wide["settings"], of_case, experiment.settings, method, own, chosen, last)
    if factor is not None:
        settings["optimizer.learning_rate"] = f"{float(settings['optimizer.learning_rate']) * factor:g}"
    if settings.get("objective.name") == "drrho":
        settings[REFERENCE] = reference_job(scale, settings["data"]).key
    return settings


def base_recipe(name: str) -> Path:
    """What the settings of a job are added to: a file that does not change when a recipe for users does."""
    return FOLDER / "recipes" / f"{name}.yaml"


def typed_settings(job: Job) -> dict[str, Any]:
    """All settings of its run, flat and typed; without the addresses of the data, which differ between machines."""
    own = dict(job.settings)
    data, recipe = own.pop("data"), own.pop("recipe", "")
    setting, objective = own.pop(SETTING, ""), own.pop(OBJECTIVE, "")
    text = parse_recipe(paper_yaml(setting, objective), setting) if setting else read_recipe(base_recipe(recipe))
    known = build_settings(text, read_flags([f"--{key}={value}" for key, value in own.items()]))
    return flatten(settings_as_dict(known)) | {"data.train": data}
