"""Algorithm 4 and its theorem: the constants are those of the function, the bound holds, and the rate is T^(-1/4)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from neuclip.errors import UserError
from neuclip.experiments.convergence import START, Constants, Problem, StepSizes, algorithm_4, measure, run

D, K = 6, 3
PROBLEM = Problem(D, seed=1)
CONSTANTS = Constants.of(PROBLEM)


def points(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(count, D)), draw.normal(size=(count, D))


def test_the_gradients_are_those_of_the_function():
    x, y = (torch.tensor(rows, requires_grad=True) for rows in points(5, seed=0))
    mixing = torch.tensor(PROBLEM.mixing)
    value = (x**2 / (1 + x**2)).sum(dim=1) + PROBLEM.mu / 2 * (y - x @ mixing.T).square().sum(dim=1)
    assert np.allclose(PROBLEM.value(x.detach().numpy(), y.detach().numpy()), value.detach(), rtol=1e-12)
    by_x, by_y = torch.autograd.grad(value.sum(), [x, y])
    found = PROBLEM.gradients(x.detach().numpy(), y.detach().numpy())
    assert np.allclose(found[0], by_x, atol=1e-12) and np.allclose(found[1], by_y, atol=1e-12)


def test_the_best_answer_leaves_the_gradient_of_the_minimum():
    x, _ = points(5, seed=0)
    by_x, by_y = PROBLEM.gradients(x, x @ PROBLEM.mixing.T)
    assert np.allclose(by_x, PROBLEM.gradient_of_minimum(x)) and np.allclose(by_y, 0)


def test_no_two_points_break_the_smoothness_constants_and_some_reach_them():
    ratios = {"l_11": 0.0, "l_12": 0.0, "l_21": 0.0, "l_22": 0.0}
    for seed in range(20):
        (x, y), near = points(200, seed), 1e-4 * points(200, seed + 100)[0]
        x = x * 10.0 ** -(seed % 4)  # near 0 the function bends most
        here = PROBLEM.gradients(x, y)
        for block, moved in (("1", PROBLEM.gradients(x + near, y)), ("2", PROBLEM.gradients(x, y + near))):
            for row in (0, 1):
                change = np.linalg.norm(moved[row] - here[row], axis=1) / np.linalg.norm(near, axis=1)
                ratios[f"l_{row + 1}{block}"] = max(ratios[f"l_{row + 1}{block}"], change.max())
    for name, ratio in ratios.items():
        limit = getattr(CONSTANTS, name)
        assert 0.9 * limit < ratio < limit * (1 + 1e-6), name


def test_noise_has_the_variance_that_the_theorem_is_told():
    noise = PROBLEM.noise(np.random.default_rng(0), (20_000, D), CONSTANTS.sigma_1)
    assert (noise**2).sum(axis=1).mean() == pytest.approx(CONSTANTS.sigma_1**2, rel=0.02)


@pytest.mark.parametrize("start", [{}, {"answer_gap": 1e3}, {"momentum_gap": 1e3}], ids=["here", "far y", "far v"])
def test_the_step_sizes_keep_every_bound_of_the_theorem_and_need_the_steps_there_are(start):
    c = CONSTANTS._replace(**start)
    smooth = c.l_11 + c.l_12 * (c.l_21 + c.l_22) / c.mu
    for steps in (10**6, 10**7) if start else (1000, 20_000, 10**6):
        eps = c.accuracy_after(steps, K)
        beta, eta_1, eta_2 = c.step_sizes(eps, K)
        assert beta * c.sigma_1**2 == pytest.approx(eps**2 / 5)
        assert eta_2 <= c.mu / c.l_22**2 and 80 * (c.l_12 * c.sigma_2) ** 2 * eta_2 <= c.mu * eps**2 * (1 + 1e-12)
        assert eta_1 <= beta / (4 * smooth) and eta_1 <= 1 / (2 * smooth)
        # Five terms of the proof's last inequality, each at most a fifth of the accuracy squared.
        assert 2 * c.gap / (steps * eta_1) <= eps**2 / 5 * (1 + 1e-9)
        assert c.momentum_gap / (beta * steps) <= eps**2 / 5 * (1 + 1e-9)
        part = (1 - c.mu * eta_2 / 2) ** K
        assert 4 * c.l_12**2 * part / (1 - part) * c.answer_gap / steps <= eps**2 / 5 * (1 + 1e-9)
        # And what stands before |v|^2 is at most -1/8 of eta_1.
        coupled = 8 * c.l_12**2 * c.l_22**2 * (c.l_12 + c.l_21) ** 2 * eta_1**2 / (c.mu**3 * eta_2 * (1 - part))
        assert smooth**2 * eta_1**2 / beta**2 + coupled <= 1 / 8 + 1e-12
        assert c.steps_needed(eps, K) == pytest.approx(steps)


def test_the_path_is_the_algorithm_line_by_line():
    sizes, repeats, steps = StepSizes(0.3, 0.1, 0.2), 4, 5
    path = list(algorithm_4(PROBLEM, steps, sizes, K, repeats, np.random.default_rng(7)))
    draw, b = np.random.default_rng(7), PROBLEM.mixing
    x, y, v = np.full((repeats, D), START), np.zeros((repeats, D)), np.zeros((repeats, D))
    for t in range(steps):
        assert np.allclose(path[t][0], x, atol=1e-14) and np.allclose(path[t][1], v, atol=1e-14)
        inner = y.copy()
        for _ in range(K):
            samples = draw.normal(scale=PROBLEM.sigma_2 / math.sqrt(D), size=(repeats, D))
            for r in range(repeats):
                inner[r] -= 0.2 * (PROBLEM.mu * (inner[r] - b @ x[r]) + samples[r])
        samples = draw.normal(scale=PROBLEM.sigma_1 / math.sqrt(D), size=(repeats, D))
        for r in range(repeats):
            slope = 2 * x[r] / (1 + x[r] ** 2) ** 2 - PROBLEM.mu * b.T @ (y[r] - b @ x[r])
            v[r] = 0.7 * v[r] + 0.3 * (slope + samples[r])
        x, y = x - 0.1 * v, inner


def test_gradient_norms_stay_below_the_bound_and_fall_like_the_fourth_root_of_the_steps():
    lines = run({"convergence.steps": "1k,4k,16k", "run.seed": "0"})
    norms, left_sides, bounds = (
        [line[f"{name}.gradient_norm"] for line in lines]
        for name in ("Algorithm 4", "theorem's left side", "theorem's bound")
    )
    assert [line["samples"] for line in lines] == [1000, 4000, 16_000]
    assert all(norm < left < bound for norm, left, bound in zip(norms, left_sides, bounds, strict=True))
    assert math.log(norms[-1] / norms[0]) / math.log(16) == pytest.approx(-0.25, abs=0.05)
    assert bounds[1] / bounds[2] == pytest.approx(4**0.25, rel=0.02)


def test_a_line_is_the_mean_over_the_path_and_its_runs():
    sizes = CONSTANTS.step_sizes(accuracy := CONSTANTS.accuracy_after(1000, K), K)
    path = algorithm_4(PROBLEM, 1000, sizes, K, 2, np.random.default_rng([3, 1000]))
    squares = np.array([[(PROBLEM.gradient_of_minimum(x) ** 2).sum(axis=1), (v**2).sum(axis=1)] for x, v in path])
    gradient, momentum = squares.mean(axis=(0, 2))
    line = measure(PROBLEM, 1000, 3, repeats=2)
    assert line["Algorithm 4.gradient_norm"] == pytest.approx(math.sqrt(gradient))
    assert line["theorem's left side.gradient_norm"] == pytest.approx(math.sqrt(gradient + momentum / 4))
    assert line["theorem's bound.gradient_norm"] == accuracy


def test_the_same_seed_gives_the_same_line_and_another_seed_another():
    same = [measure(PROBLEM, 1000, seed, repeats=2) for seed in (3, 3, 4)]
    assert same[0] == same[1] != same[2]


def test_too_few_steps_for_the_theorem_are_refused():
    with pytest.raises(UserError, match="50 steps are too few"):
        run({"convergence.steps": "50", "run.seed": "0"})
