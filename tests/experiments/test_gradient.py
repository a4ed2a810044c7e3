"""Figures of gradients on sixty drawings: against a double loop, and in cases where bias or variance must be zero."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip import api
from neuclip.distributed.ranks import StopRequest
from neuclip.experiments import gradient
from neuclip.experiments.gradient import (
    EXACT,
    GROUPS,
    DataSet,
    Estimator,
    ExactNormalizers,
    GradientSample,
    Heads,
    Watched,
    gradient_figures,
)
from neuclip.runs.build import build_objective, build_run, open_training_source, resolve
from neuclip.settings.objectives import CLIPSettings, FastCLIPSettings, NeuCLIPSettings
from neuclip.settings.sections import Settings
from neuclip.training.loop import parallel, take_step
from neuclip.training.run import Run
from neuclip.training.stored_features import store_features
from tests.builders.images import write_csv
from tests.builders.models import SMALL_FILE
from tests.builders.runs import settings_for

N, EPS, RHO = 60, 1e-3, 2.0
TOWERS = ["--model.image_tower", "locked", "--model.text_tower", "locked"]
LOCKED = [*TOWERS, "--data.crop_scale", "1,1", "--train.samples", "240"]
MINIBATCH = CLIPSettings(form="minibatch", eps=EPS, rho=RHO)
QUEUE = NeuCLIPSettings(restart="rolling", inner_steps=0, num_prototypes=24, eps=EPS, rho=RHO)


@pytest.fixture(scope="module")
def drawings(tmp_path_factory) -> Path:
    return write_csv(tmp_path_factory.mktemp("drawings"), N)


@pytest.fixture
def settings(drawings, tmp_path):
    def make(*flags: str) -> Settings:
        return settings_for(tmp_path, drawings, *LOCKED, *flags, model=SMALL_FILE)

    return make


def start(settings: Settings) -> Run:
    run = build_run(resolve(settings), open_training_source(settings))
    store_features(run, StopRequest())
    return run


def rows(features: Tensor, head: Tensor) -> Tensor:
    return F.normalize(features.double() @ head, dim=1)


def double_loop(image: Tensor, text: Tensor, tau: Tensor, eps: float, rho: float) -> Tensor:
    """Eq. 1, pair by pair."""
    total = 2 * tau * rho
    for i in range(len(image)):
        own = image[i] @ text[i]
        others = [j for j in range(len(image)) if j != i]
        g1 = sum(torch.exp((image[i] @ text[j] - own) / tau) for j in others) / len(others)
        g2 = sum(torch.exp((image[j] @ text[i] - own) / tau) for j in others) / len(others)
        total = total + tau * (torch.log(eps + g1) + torch.log(eps + g2)) / len(image)
    return total


def test_the_exact_gradient_is_that_of_a_double_loop(settings):
    run = start(settings())
    data, model = DataSet.of_epoch(run), run.built.towers.model
    own = ExactNormalizers(eps=EPS, rho=RHO)
    with Heads(run, torch.float64) as heads:
        samples = gradient.exact_gradients(heads, data, {"own": own})
    assert model.visual.proj.dtype == model.logit_scale.dtype == torch.float32  # as before
    leaves = [p.detach().double().requires_grad_() for p in (model.visual.proj, model.text_projection)]
    log_scale = model.logit_scale.detach().double().requires_grad_()
    loss = double_loop(rows(data.images, leaves[0]), rows(data.texts, leaves[1]), (-log_scale).exp(), EPS, RHO)
    *expected, of_scale = torch.autograd.grad(loss, [*leaves, log_scale])
    weights, tau = samples["own"]
    expected = torch.cat([part.flatten() for part in expected])
    assert (weights.exact - expected).norm() < 1e-9 * expected.norm()
    assert tau.exact.item() == pytest.approx(of_scale.item(), rel=1e-9)


def test_exact_normalizers_have_no_bias_and_a_batch_of_its_own_has(settings):
    estimators = {"held": Estimator(EXACT, MINIBATCH), "batch": Estimator("clip", MINIBATCH)}
    flags = ["--train.batch_size", "4", "--temperature.initial", "0.02"]
    [line] = gradient_figures(settings(*flags), estimators, batches=400, moments=[N])
    assert abs(line["held.squared_bias"]) < 4 * line["held.squared_bias_error"]
    assert line["batch.squared_bias"] > 4 * line["batch.squared_bias_error"] > 0
    assert line["held.cosine"] == pytest.approx(1, abs=0.1)
    assert 0.9 > line["batch.cosine"] > line["batch.batch_cosine"] > 0 and line["held.length"] > line["batch.length"]
    assert line["held.variance"] > 2 * line["batch.variance"] and line["held.exact_norm"] == line["batch.exact_norm"]


def test_a_batch_that_is_the_whole_data_set_has_neither_bias_nor_variance(settings):
    flags = ["--train.batch_size", str(N), "--objective.num_prototypes", str(N)]
    estimators = {"held": Estimator(EXACT, MINIBATCH), "batch": Estimator("clip", MINIBATCH)}
    [line] = gradient_figures(settings(*flags), estimators, batches=GROUPS, moments=[N])
    for name in estimators:
        for figure in ("squared_bias", "variance", "tau_squared_bias", "tau_variance"):
            assert abs(line[f"{name}.{figure}"]) < 1e-12, (name, figure)
        for figure in ("cosine", "batch_cosine", "length"):
            assert line[f"{name}.{figure}"] == pytest.approx(1), (name, figure)


def test_a_moving_average_that_forgets_at_once_is_the_mini_batch_form(settings):
    forgets = FastCLIPSettings(gamma=1.0, gamma_schedule="constant", eps=EPS, rho=RHO)
    keeps = FastCLIPSettings(gamma=0.3, gamma_schedule="constant", eps=EPS, rho=RHO)
    estimators = {
        "batch": Estimator("clip", MINIBATCH),
        "forgets": Estimator("fastclip", forgets),
        "keeps": Estimator("fastclip", keeps),
        "queue": Estimator("neuclip", QUEUE),
    }
    [line] = gradient_figures(settings(), estimators, batches=20, moments=[2 * N])
    for figure in ("squared_bias", "variance", "cosine", "tau_squared_bias", "tau_variance"):
        assert line[f"forgets.{figure}"] == pytest.approx(line[f"batch.{figure}"], rel=1e-5)
        assert line[f"keeps.{figure}"] != pytest.approx(line[f"batch.{figure}"], rel=1e-3)
        assert line[f"queue.{figure}"] != pytest.approx(line[f"batch.{figure}"], rel=1e-3)


def test_a_queue_of_all_other_samples_that_has_not_seen_the_batch_has_exact_normalizers(settings):
    whole = replace(QUEUE, num_prototypes=N, mask_own_positive=True, alpha_gradient="detached")
    estimators = {
        "held": Estimator(EXACT, MINIBATCH),
        "unseen": Estimator("neuclip", whole, sees_batch=False),
        "short": Estimator("neuclip", replace(whole, num_prototypes=N // 2), sees_batch=False),
    }
    still = ["--optimizer.learning_rate", "1e-12", "--temperature.learning_rate", "1e-12", "--train.batch_size", "4"]
    [line] = gradient_figures(settings(*still), estimators, batches=20, moments=[2 * N])
    for figure in ("squared_bias", "variance", "cosine", "tau_squared_bias", "tau_variance"):
        assert line[f"unseen.{figure}"] == pytest.approx(line[f"held.{figure}"], rel=1e-4)
        assert line[f"short.{figure}"] != pytest.approx(line[f"held.{figure}"], rel=1e-3)


def test_watching_and_measuring_leave_run_and_estimators_as_they_are(settings):
    estimators = {"queue": Estimator("neuclip", QUEUE), "held": Estimator(EXACT, MINIBATCH)}
    lines = gradient_figures(settings(), estimators, batches=GROUPS, moments=[100, 0, 240])
    assert [line["samples"] for line in lines] == [0, 104, 240]  # whole batches of 8
    assert lines[-1:] == gradient_figures(settings(), estimators, batches=GROUPS, moments=[240])
    plain = api.train(settings())
    assert lines[-1]["temperature"] == json.loads((plain / "summary.json").read_text())["temperature"]


def test_a_watching_objective_has_the_state_of_a_driving_one(settings):
    run = start(settings())
    driving, own = run.objective, build_objective(run.settings, run.built, N)
    run.objective = Watched(driving, {"own": own})
    encode = parallel(run)
    for batch in run.batches.steps(0, 10):
        take_step(run, encode, batch)
        run.step += 1
    expected, state = driving.state_dict(), own.state_dict()
    assert driving.steps == own.steps == 10 and expected.keys() == state.keys()
    assert all(torch.equal(expected[k], state[k]) for k in expected if isinstance(expected[k], Tensor))


def test_bias_variance_and_standard_error_are_those_of_plain_loops():
    generator = np.random.default_rng(0)
    exact, gradients = generator.normal(size=7), generator.normal(size=(23, 7)) + 0.5
    sample = GradientSample(torch.from_numpy(exact))
    for row in gradients:
        sample.add(torch.from_numpy(row))
    figures, norm = sample.figures(), exact @ exact
    mean = gradients.mean(axis=0)
    variance = sum((row - mean) @ (row - mean) for row in gradients) / 22
    assert figures["variance"] == pytest.approx(variance / norm)
    deviations = gradients - exact
    products = [a @ b for i, a in enumerate(deviations) for j, b in enumerate(deviations) if i != j]
    assert figures["squared_bias"] == pytest.approx(np.mean(products) / norm)  # of different batches: no square
    products = [a @ b for i, a in enumerate(gradients) for j, b in enumerate(gradients) if i != j]
    assert figures["length"] == pytest.approx(math.sqrt(np.mean(products) / norm))
    assert figures["cosine"] == pytest.approx(mean @ exact / math.sqrt(np.mean(products) * norm))
    cosines = [row @ exact / math.sqrt(row @ row * norm) for row in gradients]
    assert figures["batch_cosine"] == pytest.approx(np.mean(cosines))
    groups = [deviations[group::GROUPS].mean(axis=0) for group in range(GROUPS)]

    def without(left_out: int) -> float:
        kept = [i for i in range(GROUPS) if i != left_out]
        return float(np.mean([groups[i] @ groups[j] for i in kept for j in kept if i != j]))

    found = [without(group) for group in range(GROUPS)]
    error = math.sqrt((GROUPS - 1) / GROUPS * sum((x - np.mean(found)) ** 2 for x in found))
    assert figures["squared_bias_error"] == pytest.approx(error / norm)


def test_a_job_reads_flags_and_writes_nothing(drawings, tmp_path):
    estimators = {
        "queue": {
            "objective": "neuclip",
            "objective.restart": "rolling",
            "objective.inner_steps": 0,
            "sees_batch": False,
        },
        "held": {"objective": "exact", "objective.eps": 1e-3, "objective.rho": 2},
    }
    flags = {
        "recipe": "tiny",
        "run.folder": str(tmp_path),
        "run.threads": "1",
        "data.train": str(drawings),
        "data.crop_scale": "1,1",
        "data.workers": 0,
        "model.name": str(SMALL_FILE),
        "model.image_tower": "locked",
        "model.text_tower": "locked",
        "train.batch_size": 8,
        "train.samples": 240,
        "gradient.moments": "96",
        "gradient.batches": "10",
    }
    [line] = gradient.run({**flags, "gradient.estimators": json.dumps(estimators)})
    assert line["samples"] == 96
    assert line["queue.exact_norm"] != line["held.exact_norm"]  # at another eps
    assert list(tmp_path.iterdir()) == []
