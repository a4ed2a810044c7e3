from __future__ import annotations

import pytest
import torch

from neuclip.models.build import build_model
from neuclip.plan import Plan
from neuclip.settings.sections import OptimizerSettings, Settings, TemperatureSettings
from neuclip.training.optimizer import NotFinite, TowerOptimizer, parameter_groups


@pytest.fixture
def towers():
    torch.manual_seed(0)
    return build_model("tiny").towers


def optimizer(towers, temperature=None, **settings) -> TowerOptimizer:
    chosen = Settings(
        optimizer=OptimizerSettings(warmup=0, **settings), temperature=temperature or TemperatureSettings()
    )
    return TowerOptimizer(towers, chosen, Plan.of(chosen))


def test_every_parameter_is_in_one_group_and_only_matrices_decay(towers):
    groups = parameter_groups(towers, weight_decay=0.1)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in towers.parameters())
    for group in groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    assert [g["params"] for g in groups if g["name"] == "temperature"] == [[towers.model.logit_scale]]


def test_the_bias_of_siglip_has_the_towers_rate_and_no_decay():
    towers = build_model("tiny", initial_bias=-10.0).towers
    update = optimizer(towers, TemperatureSettings(learning_rate=0), learning_rate=0.5, weight_decay=0.9)
    update.update(towers.logit_bias + 0 * sum(p.sum() for p in towers.parameters()), step=0)
    assert towers.logit_bias.item() == pytest.approx(-10.5)


def test_the_temperature_has_its_own_rate_and_stays_in_its_range(towers):
    towers.set_temperature(0.0101)
    update = optimizer(towers, TemperatureSettings(learning_rate=0.1, minimum=0.01))
    update.update(
        -towers.logit_scale + 0 * sum(p.sum() for p in towers.parameters()), step=0
    )  # drives tau down by 10 %
    assert 1 / towers.logit_scale.item() == pytest.approx(0.01)


def test_a_constant_temperature_does_not_move(towers):
    before = towers.logit_scale.item()
    update = optimizer(towers, TemperatureSettings(learning_rate=0))
    update.update(-towers.logit_scale + 0 * sum(p.sum() for p in towers.parameters()), step=0)
    assert towers.logit_scale.item() == before


def test_clipping_bounds_what_reaches_adamw_but_the_true_norm_is_reported(towers):
    update = optimizer(towers, clip_gradient_norm=0.5)
    norm = update.update(100 * sum(p.sum() for p in towers.parameters()), step=0)
    assert norm > 100
    moments = [state["exp_avg"] for p, state in update.adamw.state.items() if p is not towers.model.logit_scale]
    assert torch.stack([m.norm() for m in moments]).norm() == pytest.approx(0.1 * 0.5, rel=0.02)  # 1 - beta1 of it


def test_a_large_gradient_of_the_temperature_takes_no_share_of_the_towers_norm(towers):
    """Both sums have the gradient 1 in every entry; AdamW's first moment is a tenth of what reaches it."""
    update = optimizer(towers, clip_gradient_norm=0.5)
    others = [p for p in towers.parameters() if p is not towers.model.logit_scale]
    count = sum(p.numel() for p in others)
    norm = update.update(sum(p.sum() for p in others) + 1e6 * towers.model.logit_scale, step=0)
    assert norm.item() == pytest.approx(count**0.5)
    reached = torch.cat([update.adamw.state[p]["exp_avg"].flatten() for p in others])
    assert reached.norm().item() == pytest.approx(0.1 * 0.5, rel=0.02)
    assert update.adamw.state[towers.model.logit_scale]["exp_avg"].item() == pytest.approx(0.1 * 0.5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_loss_that_is_not_a_number_stops_before_anything_changes(towers, bad):
    before = {name: p.clone() for name, p in towers.named_parameters()}
    with pytest.raises(NotFinite):
        optimizer(towers).update(bad * towers.logit_scale, step=0)
    assert all(torch.equal(p, before[name]) for name, p in towers.named_parameters())


def test_a_gradient_that_is_not_a_number_stops_before_anything_changes(towers):
    before = towers.logit_scale.item()
    loss = (towers.model.logit_scale - towers.model.logit_scale.detach()).sqrt()  # value 0, slope infinite
    with pytest.raises(NotFinite, match="gradient norm inf"):
        optimizer(towers).update(loss, step=0)
    assert towers.logit_scale.item() == before


def test_layer_decay_slows_each_layer_below_the_head(towers):
    groups = parameter_groups(towers, weight_decay=0.1, layer_decay=0.5)
    share = {id(p): group["share_of_rate"] for group in groups for p in group["params"]}
    assert sorted(share) == sorted(map(id, towers.parameters()))
    model = towers.model
    assert share[id(model.text_projection)] == share[id(model.logit_scale)] == 1
    assert [share[id(block.ln_1.weight)] for block in model.transformer.resblocks] == [0.25, 0.5]
    assert share[id(model.token_embedding.weight)] == 0.125
    assert share[id(model.visual.conv1.weight)] == 0.5**5 and share[id(model.visual.attnpool.c_proj.weight)] == 1


def test_layer_decay_reaches_the_update(towers):
    update = optimizer(towers, learning_rate=0.1, weight_decay=0, layer_decay=0.5)
    first, last = (block.ln_1.bias for block in towers.model.transformer.resblocks)
    update.update(sum(p.sum() for p in towers.parameters()), step=0)
    assert first.mean().item() == pytest.approx(-0.025, rel=1e-3) and last.mean().item() == pytest.approx(
        -0.05, rel=1e-3
    )


def test_a_loaded_temperature_outside_the_range_widens_it(towers):
    towers.set_temperature(1 / 117)
    update, before = optimizer(towers, TemperatureSettings(learning_rate=0)), towers.log_scale
    update.update(0 * sum(p.sum() for p in towers.parameters()), step=0)
    assert towers.log_scale == before
