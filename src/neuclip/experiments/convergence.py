"""Algorithm 4, the simplified NeuCLIP that the paper analyses, on a problem whose constants are known.

x (d numbers) stands for encoders and temperature, y (d numbers) for the prototypes. With an orthogonal matrix B:

    f(x, y) = h(x) + mu/2 |y - B x|^2          h(x) = sum_i x_i^2 / (1 + x_i^2)
    f(x, y, xi) = f(x, y) + a.x + b.y          xi = (a, b), normal, E|a|^2 = sigma_1^2, E|b|^2 = sigma_2^2

F(x) = min_y f(x, y) = h(x) has its minimum 0 at x = 0 and is not convex: -1/2 <= h'' <= 2. As in NeuCLIP, the gradient
in x has an error while y lags behind its optimum B x:

    grad_1 f = h'(x) - mu B^T (y - B x)          grad_2 f = mu (y - B x)

So Assumption 1 holds with L_11 = 2 + mu and L_12 = L_21 = L_22 = mu.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from neuclip.errors import UserError
from neuclip.progress import track
from neuclip.settings.values import parse_whole

DIMENSION, INNER_STEPS, REPEATS = 10, 3, 16  # d, K, and the number of independent runs
START = 1.0  # every coordinate of x at t = 0, where h'' = -1/2 is smallest


class StepSizes(NamedTuple):
    beta: float  # weight of a new gradient in the momentum
    eta_1: float  # of x
    eta_2: float  # of y


class Problem:
    """The function above, for several points at a time: x and y are (..., d).

    >>> Problem(dimension=4).gradient_of_minimum(np.ones(4))
    array([0.5, 0.5, 0.5, 0.5])
    """

    mu, sigma_1, sigma_2 = 1.0, 0.6, 0.15

    def __init__(self, dimension: int, seed: int = 0):
        self.dimension = dimension
        self.mixing = np.linalg.qr(np.random.default_rng(seed).normal(size=(dimension, dimension)))[0]  # B

    def value(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:  # -> (...)
        lag = y - x @ self.mixing.T
        return (x**2 / (1 + x**2)).sum(axis=-1) + self.mu / 2 * (lag**2).sum(axis=-1)

    def gradients(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """grad_1 f and grad_2 f."""
        by_y = self.mu * (y - x @ self.mixing.T)
        return self.gradient_of_minimum(x) - by_y @ self.mixing, by_y

    def gradient_of_minimum(self, x: np.ndarray) -> np.ndarray:
        """grad F, which is h'(x)."""
        return 2 * x / (1 + x**2) ** 2

    def noise(self, draw: np.random.Generator, shape: tuple[int, ...], sigma: float) -> np.ndarray:
        return draw.normal(scale=sigma / math.sqrt(self.dimension), size=shape)


# --- The theorem ------------------------------------------------------------------------------------------------------


class Constants(NamedTuple):
    """The constants of Assumption 1 and of Algorithm 4's starting point."""

    l_11: float
    l_12: float
    l_21: float
    l_22: float
    mu: float
    sigma_1: float
    sigma_2: float
    gap: float  # F(x0) - F*
    momentum_gap: float  # |v0 - grad F(x0)|^2
    answer_gap: float  # |y0 - y*(x0)|^2

    @classmethod
    def of(cls, problem: Problem) -> Constants:
        """The constants for x0 = START in every coordinate, y0 = 0 and v0 = 0."""
        mu, x = problem.mu, np.full(problem.dimension, START)
        gap = float(problem.value(x, x @ problem.mixing.T))
        momentum = float((problem.gradient_of_minimum(x) ** 2).sum())
        return cls(2 + mu, mu, mu, mu, mu, problem.sigma_1, problem.sigma_2, gap, momentum, float(x @ x))

    def step_sizes(self, accuracy: float, inner_steps: int) -> StepSizes:
        """The theorem's step sizes for E|grad F|^2 <= accuracy^2. Its last bound has L_12^2 where the proof needs
        L_12 L_22; in this problem they are equal."""
        smooth = self.l_11 + self.l_12 * (self.l_21 + self.l_22) / self.mu  # L_F
        beta = accuracy**2 / (5 * self.sigma_1**2)
        eta_2 = min(self.mu / self.l_22**2, self.mu * accuracy**2 / (80 * (self.l_12 * self.sigma_2) ** 2), 1 / self.mu)
        learnt = 1 - (1 - self.mu * eta_2 / 2) ** inner_steps
        coupled = 8 * math.sqrt(2) * self.l_12**2 * (self.l_12 + self.l_21)
        eta_1 = min(1 / (2 * smooth), beta / (4 * smooth), self.mu**1.5 * math.sqrt(eta_2 * learnt) / coupled)
        return StepSizes(beta, eta_1, eta_2)

    def steps_needed(self, accuracy: float, inner_steps: int) -> float:
        """The theorem's T."""
        beta, eta_1, eta_2 = self.step_sizes(accuracy, inner_steps)
        answer = 40 * self.l_12**2 * self.answer_gap / (self.mu * eta_2)
        return max(10 * self.gap / eta_1, 5 * self.momentum_gap / beta, answer) / accuracy**2

    def accuracy_after(self, steps: int, inner_steps: int) -> float:
        """The accuracy that the theorem guarantees after so many steps: its bound on the root mean square of |grad F|.
        It is C T^(-1/4) once all three step sizes are proportional to accuracy^2."""
        low, high = 1e-9, 1e9
        for _ in range(200):  # bisect in logarithms: a larger accuracy needs fewer steps
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.steps_needed(middle, inner_steps) > steps else (low, middle)
        if self.step_sizes(high, inner_steps).beta > 1:
            raise UserError(f"{steps} steps are too few for the theorem: its beta would be above 1; give more")
        return high


# --- The algorithm ----------------------------------------------------------------------------------------------------


def algorithm_4(
    problem: Problem, steps: int, sizes: StepSizes, inner_steps: int, repeats: int, draw: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield x and v at t = 0 .. steps - 1, (repeats, d) each: independent runs side by side, always fresh noise."""
    shape = (repeats, problem.dimension)
    x, y, v = np.full(shape, START), np.zeros(shape), np.zeros(shape)
    for _ in range(steps):
        yield x, v
        y_before = y
        for _ in range(inner_steps):  # lines 3 to 5
            y = y - sizes.eta_2 * (problem.gradients(x, y)[1] + problem.noise(draw, shape, problem.sigma_2))
        by_x = problem.gradients(x, y_before)[0] + problem.noise(draw, shape, problem.sigma_1)  # line 8 uses y^(t)
        v = (1 - sizes.beta) * v + sizes.beta * by_x
        x = x - sizes.eta_1 * v  # line 9


def measure(problem: Problem, steps: int, seed: int, *, repeats: int = REPEATS) -> dict[str, float]:
    """Run Algorithm 4 with the theorem's step sizes for so many steps. Returns the root mean square of |grad F|, the
    quantity that the theorem bounds (which also contains the momentum), and the bound.

    >>> measure(Problem(DIMENSION), steps=1000, seed=0)                                             # doctest: +SKIP
    {'samples': 1000, 'Algorithm 4.gradient_norm': 0.39, ..., "theorem's bound.gradient_norm": 1.16}
    """
    constants = Constants.of(problem)
    accuracy = constants.accuracy_after(steps, INNER_STEPS)
    sizes = constants.step_sizes(accuracy, INNER_STEPS)
    gradients = momenta = 0.0
    path = algorithm_4(problem, steps, sizes, INNER_STEPS, repeats, np.random.default_rng([seed, steps]))
    for x, v in track(path, f"Algorithm 4, {steps:,} steps", steps, "steps"):
        gradients += (problem.gradient_of_minimum(x) ** 2).sum() / (steps * repeats)
        momenta += (v**2).sum() / (steps * repeats)
    return {
        "samples": steps,
        "Algorithm 4.gradient_norm": math.sqrt(gradients),
        "theorem's left side.gradient_norm": math.sqrt(gradients + momenta / 4),
        "theorem's bound.gradient_norm": accuracy,
    }


def run(settings: Mapping[str, str]) -> list[dict[str, float]]:
    """Run the job of an experiment: one line for each number of steps T, called `samples`.

    >>> [line["samples"] for line in run({"convergence.steps": "1k,3k", "run.seed": "0"})]
    [1000, 3000]
    """
    seed = int(settings["run.seed"])
    return [
        measure(Problem(DIMENSION, seed), parse_whole(steps), seed)
        for steps in settings["convergence.steps"].split(",")
    ]
