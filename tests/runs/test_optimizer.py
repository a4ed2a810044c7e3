"""The towers' AdamW: groups, learning rates, clipping, and no update if loss or gradient is NaN or infinite."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from neuclip.models.build import build_model
from neuclip.models.towers import Towers
from neuclip.plan import Plan
from neuclip.settings.sections import OptimizerSettings, Settings, TemperatureSettings, TrainSettings
from neuclip.training.optimizer import (
    NotFinite,
    TowerOptimizer,
    parameter_groups,
    temperature_rate,
    warmup_then_cosine,
)


@pytest.fixture
def towers() -> Towers:
    torch.manual_seed(0)
    return build_model("tiny", initial_bias=-10.0).towers


def optimizer(towers: Towers, temperature: TemperatureSettings | None = None, **settings) -> TowerOptimizer:
    chosen = Settings(
        optimizer=OptimizerSettings(**{"warmup": 0} | settings), temperature=temperature or TemperatureSettings()
    )
    return TowerOptimizer(towers, chosen, Plan.of(chosen))


def all_used(towers: Towers) -> torch.Tensor:
    """Zero, with a gradient of zeros for every parameter."""
    return 0 * sum(p.sum() for p in towers.parameters())


# --- One update


def test_every_parameter_is_in_one_group_and_only_matrices_decay(towers):
    groups = parameter_groups(towers, weight_decay=0.1)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in towers.parameters())
    for group in groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    assert [g["params"] for g in groups if g["name"] == "temperature"] == [[towers.model.logit_scale]]


def test_the_bias_of_siglip_has_the_towers_rate_and_no_decay(towers):
    update = optimizer(towers, TemperatureSettings(learning_rate=0), learning_rate=0.5, weight_decay=0.9)
    update.update(towers.logit_bias + all_used(towers), step=0)
    assert towers.logit_bias.item() == pytest.approx(-10.5)


def test_the_temperature_has_its_own_rate_and_stays_in_its_range(towers):
    towers.set_temperature(0.0101)
    update = optimizer(towers, TemperatureSettings(learning_rate=0.1, minimum=0.01))
    update.update(all_used(towers) - towers.logit_scale, step=0)  # drives tau down by 10 %
    assert 1 / towers.logit_scale.item() == pytest.approx(0.01)


def test_a_large_gradient_of_the_temperature_takes_no_share_of_the_towers_norm(towers):
    """Both sums have the gradient 1 in every entry; AdamW's first moment is a tenth of what reaches it."""
    update = optimizer(towers, clip_gradient_norm=0.5)
    others = [p for p in towers.parameters() if p is not towers.model.logit_scale]
    norm = update.update(sum(p.sum() for p in others) + 1e6 * towers.model.logit_scale, step=0)
    assert norm.item() == pytest.approx(sum(p.numel() for p in others) ** 0.5)
    reached = torch.cat([update.adamw.state[p]["exp_avg"].flatten() for p in others])
    assert reached.norm().item() == pytest.approx(0.1 * 0.5, rel=0.02)
    assert update.adamw.state[towers.model.logit_scale]["exp_avg"].item() == pytest.approx(0.1 * 0.5)


@pytest.mark.parametrize("bad", ["loss nan", "loss inf", "gradient norm inf"])
def test_what_is_not_a_number_stops_before_anything_changes(towers, bad):
    before, scale = {name: p.clone() for name, p in towers.named_parameters()}, towers.model.logit_scale
    slope = (scale - scale.detach()).sqrt()  # value 0, slope infinite
    loss = slope if "norm" in bad else float(bad.split()[1]) * towers.logit_scale
    with pytest.raises(NotFinite, match=bad):
        optimizer(towers).update(loss, step=0)
    assert all(torch.equal(p, before[name]) for name, p in towers.named_parameters())


def test_layer_decay_slows_each_layer_below_the_head_and_reaches_the_update(towers):
    groups = parameter_groups(towers, weight_decay=0.1, layer_decay=0.5)
    share = {id(p): group["share_of_rate"] for group in groups for p in group["params"]}
    assert sorted(share) == sorted(map(id, towers.parameters()))
    model, blocks = towers.model, towers.model.transformer.resblocks
    assert share[id(model.text_projection)] == share[id(model.logit_scale)] == 1
    assert [share[id(block.ln_1.weight)] for block in blocks] == [0.25, 0.5]
    assert share[id(model.token_embedding.weight)] == 0.125
    assert share[id(model.visual.conv1.weight)] == 0.5**5 and share[id(model.visual.attnpool.c_proj.weight)] == 1
    update = optimizer(towers, learning_rate=0.1, weight_decay=0, layer_decay=0.5)
    update.update(sum(p.sum() for p in towers.parameters()), step=0)
    assert [block.ln_1.bias.mean().item() for block in blocks] == pytest.approx([-0.025, -0.05], rel=1e-3)


# --- Rates


def rates(total: int, warmup: int) -> list[float]:
    return [warmup_then_cosine(step, peak=2.0, warmup=warmup, total=total) for step in range(total)]


def test_the_rate_rises_evenly_to_its_peak_and_falls_along_a_half_cosine():
    got = rates(total=20, warmup=4)
    assert got[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert got[12] == pytest.approx(1 + math.cos(math.pi / 2))
    assert all(a > b for a, b in itertools.pairwise(got[4:]))
    assert 0 < got[-1] < 0.05 and rates(total=5, warmup=0)[0] == 2.0


@pytest.mark.parametrize(
    ("schedule", "taus", "used"),
    [
        # As soon as tau rises again the slow rate ends, and there is no warm-up.
        ("step_threshold", [0.07, 0.029, 0.03, 0.0301], [3e-4, 1e-4, 1e-4, 3e-4]),
        ("constant", [0.07, 0.02], [3e-4, 3e-4]),
        ("cosine", [0.02] * 4, [0.3 * warmup_then_cosine(step, peak=1e-3, warmup=2, total=4) for step in range(4)]),
    ],
)
def test_only_the_cosine_temperature_follows_the_towers_and_only_the_threshold_looks_at_tau(
    towers, schedule, taus, used
):
    """The rates that AdamW really used at steps 0, 1, ... when tau stood at these values before each."""
    settings = Settings(
        optimizer=OptimizerSettings(learning_rate=1e-3, warmup=2),
        temperature=TemperatureSettings(learning_rate=3e-4, schedule=schedule),
        train=TrainSettings(batch_size=4, samples=4 * len(taus)),
    )
    optimizer, found = TowerOptimizer(towers, settings, Plan.of(settings)), []
    for step, tau in enumerate(taus):
        towers.set_temperature(tau)
        optimizer.update(towers.logit_scale + all_used(towers), step)
        found += [group["lr"] for group in optimizer.adamw.param_groups if group["name"] == "temperature"]
    assert found == pytest.approx(used)
    assert temperature_rate("step_threshold", rate=6.0, towers_share=0.25, tau=0.03) == 2.0  # the border is slow
