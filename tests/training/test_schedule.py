from __future__ import annotations

import itertools
import math

import pytest

from neuclip.training.schedule import warmup_steps, warmup_then_cosine


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


@pytest.mark.parametrize(("warmup", "steps"), [(0.05, 50), (0.0, 0), (1, 1), (500, 500)])
def test_warm_up_is_a_share_below_one_and_a_count_from_one_on(warmup, steps):
    assert warmup_steps(warmup, 1000) == steps
