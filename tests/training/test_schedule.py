from __future__ import annotations

import itertools
import math

import pytest

from neuclip.models.build import build_model
from neuclip.plan import Plan
from neuclip.settings.sections import OptimizerSettings, Settings, TemperatureSettings, TrainSettings
from neuclip.training.optimizer import TowerOptimizer
from neuclip.training.schedule import Interval, temperature_rate, warmup_then_cosine


def rates(total: int, warmup: int) -> list[float]:
    return [warmup_then_cosine(step, peak=2.0, warmup=warmup, total=total) for step in range(total)]


def test_the_rate_rises_evenly_to_its_peak_and_falls_along_a_half_cosine():
    got = rates(total=20, warmup=4)
    assert got[:4] == [0.5, 1.0, 1.5, 2.0]
    assert got[4] == 2.0
    assert got[12] == pytest.approx(1 + math.cos(math.pi / 2))
    assert all(a > b for a, b in itertools.pairwise(got[4:]))
    assert 0 < got[-1] < 0.05


def test_without_warm_up_the_first_step_has_the_peak_rate():
    assert rates(total=5, warmup=0)[0] == 2.0


@pytest.mark.parametrize("tau", [0.01, 0.03, 0.0300001, 0.5])
def test_only_the_cosine_temperature_follows_the_towers_and_only_the_threshold_looks_at_tau(tau):
    asked = {"rate": 6.0, "towers_share": 0.25, "tau": tau}
    assert temperature_rate("constant", **asked) == 6.0
    assert temperature_rate("cosine", **asked) == 1.5
    assert temperature_rate("step_threshold", **asked) == (2.0 if tau <= 0.03 else 6.0)


def rates_of_temperature(schedule: str, taus: list[float]) -> list[float]:
    """The rates that AdamW really used at steps 0, 1, ... when tau stood at these values before each."""
    towers = build_model("tiny").towers
    settings = Settings(
        optimizer=OptimizerSettings(learning_rate=1e-3, warmup=2),
        temperature=TemperatureSettings(learning_rate=3e-4, schedule=schedule),
        train=TrainSettings(batch_size=4, samples=4 * len(taus)),
    )
    optimizer = TowerOptimizer(towers, settings, Plan.of(settings))
    used = []
    for step, tau in enumerate(taus):
        towers.set_temperature(tau)
        optimizer.update(towers.logit_scale + 0 * sum(p.sum() for p in towers.parameters()), step)
        used += [group["lr"] for group in optimizer.adamw.param_groups if group["name"] == "temperature"]
    return used


def test_the_slow_rate_ends_as_soon_as_tau_rises_again_and_has_no_warm_up():
    got = rates_of_temperature("step_threshold", [0.07, 0.029, 0.02, 0.05])
    assert got == pytest.approx([3e-4, 1e-4, 1e-4, 3e-4])


def test_a_cosine_temperature_warms_up_and_decays_with_the_towers():
    towers = [warmup_then_cosine(step, peak=1e-3, warmup=2, total=4) for step in range(4)]
    assert rates_of_temperature("cosine", [0.02] * 4) == pytest.approx([0.3 * rate for rate in towers])


def test_a_constant_temperature_rate_neither_warms_up_nor_looks_at_tau():
    assert rates_of_temperature("constant", [0.07, 0.02]) == pytest.approx([3e-4, 3e-4])


def test_an_interval_is_passed_once_for_each_multiple_of_its_samples():
    interval = Interval(8, every_samples=20)
    assert [samples for samples in range(8, 97, 8) if interval.passed(samples)] == [24, 40, 64, 80]


def test_an_interval_of_zero_is_never_passed():
    interval = Interval(8)
    assert not any(interval.passed(samples) for samples in range(8, 97, 8))


def test_an_interval_by_time_starts_again_when_it_is_passed(monkeypatch):
    seconds = iter([0, 30, 60, 60, 100, 121, 121])  # at the start, at each question, and at each new start
    monkeypatch.setattr("neuclip.training.schedule.time.monotonic", lambda: next(seconds))
    interval = Interval(8, every_minutes=1)
    assert [interval.passed(8) for _ in range(4)] == [False, True, False, True]
