"""The bias of SigLIP is a part of the model: built, exported and loaded with it, and absent elsewhere."""

from __future__ import annotations

import json

import pytest
import torch

from neuclip.models import open_clip_module
from neuclip.models.export import export_model
from neuclip.models.towers import build_model


def test_a_model_has_a_bias_only_where_one_is_asked_for():
    assert build_model("tiny").towers.logit_bias is None
    assert "logit_bias" not in build_model("tiny").towers.model.state_dict()
    assert build_model("tiny", initial_bias=-7.0).towers.logit_bias.item() == -7


def test_an_exported_bias_is_loaded_strictly_by_open_clip_and_by_us(tmp_path):
    built = build_model("tiny", initial_bias=-10.0)
    torch.nn.init.constant_(built.towers.logit_bias, -6.5)  # as training would leave it
    export_model(built, tmp_path)
    assert json.loads((tmp_path / "open_clip_config.json").read_text())["model_cfg"]["init_logit_bias"] == -10
    model, _, _ = open_clip_module().create_model_and_transforms(f"local-dir:{tmp_path}")
    assert model.logit_bias.item() == -6.5
    assert all(torch.equal(model.state_dict()[name], x) for name, x in built.towers.model.state_dict().items())
    for asked in (None, -10.0):  # to be evaluated, and to be trained further
        assert build_model(f"local-dir:{tmp_path}", initial_bias=asked).towers.logit_bias.item() == -6.5


@pytest.mark.parametrize("way", ["local-dir", "pretrained"])
def test_weights_without_a_bias_get_the_one_asked_for(way, tmp_path):
    built = build_model("tiny")
    export_model(built, tmp_path)
    torch.save(built.towers.model.state_dict(), tmp_path / "weights.pt")
    name, weights = (f"local-dir:{tmp_path}", "") if way == "local-dir" else ("tiny", str(tmp_path / "weights.pt"))
    again = build_model(name, pretrained=weights, initial_bias=-8.0)
    assert again.towers.logit_bias.item() == -8
    assert torch.equal(again.towers.model.text_projection, built.towers.model.text_projection)
