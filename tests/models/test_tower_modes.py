"""Towers locked, unlocked from the end, and taken apart into trunk and head."""

from __future__ import annotations

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.errors import UserError
from neuclip.models.tower_modes import apply_modes
from neuclip.models.towers import build_model
from neuclip.settings.sections import ModelSettings
from tests.builders.models import TRANSFORMERS, build, inputs, timm_and_bert, write_bert


def locked(built, **settings):
    apply_modes(built.towers, ModelSettings(name="mine", **settings))
    return built.towers


@pytest.fixture(params=["open_clip", "custom text", "ResNet", "timm and transformers"])
def built(request, tmp_path):
    return {
        "open_clip": lambda: build(tmp_path),
        "custom text": lambda: build(tmp_path, TRANSFORMERS | {"custom_text": True}),
        "ResNet": lambda: build_model("tiny"),
        "timm and transformers": lambda: build(tmp_path, timm_and_bert(write_bert(tmp_path / "bert"))),
    }[request.param]()


def test_head_after_trunk_is_the_tower_and_every_weight_is_in_one_part(built):
    towers, (images, tokens) = built.towers.eval(), inputs(built)
    with torch.no_grad():
        image, text = towers.encode_image_trunk(images), towers.encode_text_trunk(tokens)
        assert torch.allclose(towers.image_head(image), towers.encode_image(images), atol=1e-6)
        assert torch.allclose(towers.text_head(text), towers.encode_text(tokens), atol=1e-6)
        assert image.shape != towers.image_head(image).shape
    parts = (towers.image_parts, towers.text_parts)
    listed = [id(p) for part in parts for p in (*part.trunk_parameters, *part.head_parameters)]
    assert sorted([*listed, id(towers.model.logit_scale)]) == sorted(map(id, towers.parameters()))


def test_locked_trunks_take_no_gradient_and_only_heads_train(built):
    towers = locked(built, image_tower="locked", text_tower="locked").train()
    image, text, *_ = towers(*inputs(built))
    (image - text).pow(2).sum().backward()
    heads = {id(p) for part in (towers.image_parts, towers.text_parts) for p in part.head_parameters}
    assert {id(p) for p in towers.parameters() if p.grad is not None} == heads
    assert not any(p.requires_grad for part in (towers.image_parts, towers.text_parts) for p in part.trunk_parameters)
    assert not towers.encode_image_trunk(inputs(built)[0]).requires_grad  # forward without graph


def test_a_locked_trunk_is_in_eval_mode_and_changes_no_statistics(built):
    """Dropout (BERT), patch dropout (the transformer) and BatchNorm (the ResNet): training gives evaluation's rows."""
    towers, (images, tokens) = locked(built, image_tower="locked", text_tower="locked"), inputs(built)
    want = towers.eval()(images, tokens)  # with a graph: evaluation without one leaves out the padding of texts
    with torch.no_grad():
        before = {name: x.clone() for name, x in towers.model.state_dict().items()}
        assert all(torch.equal(x, y) for x, y in zip(towers.train()(images, tokens), want, strict=True))
    assert all(torch.equal(x, before[name]) for name, x in towers.model.state_dict().items())


def test_a_locked_text_has_the_same_bits_in_whatever_batch_it_comes(built):
    """Stored features equal computed ones because of this, also where texts are cut after their last word."""
    towers = locked(built, text_tower="locked").train()
    tokens = built.tokenize([" ".join(["a dog"] * (1 + i % 5)) for i in range(50)])
    together = towers.trunk_features("text", tokens)
    apart = [towers.trunk_features("text", tokens[first:last]) for first, last in ((0, 1), (1, 34), (34, 50))]
    assert torch.equal(torch.cat(apart), together)
    assert torch.allclose(together, towers.encode_text_trunk(tokens), atol=1e-5)


def test_the_last_layers_can_be_unlocked(tmp_path):
    towers = locked(build(tmp_path), text_tower="locked", text_unlocked_layers=1, image_tower="locked").train()
    embedding, first, last = towers.text_parts.layers
    assert [p.requires_grad for p in (embedding[0], first[0], last[0])] == [False, False, True]
    assert any(p is towers.model.ln_final.weight for p in last) and towers.model.ln_final.training
    blocks = towers.model.transformer.resblocks
    assert blocks[1].training and not blocks[0].training


def test_batch_norm_of_a_tower_that_trains_still_trains():
    built = build_model("tiny")
    towers = locked(built, text_tower="locked").train()
    assert all(module.training for module in towers.modules() if isinstance(module, _BatchNorm))
    towers = locked(build_model("tiny"), image_tower="locked").train()
    norms = [module for module in towers.modules() if isinstance(module, _BatchNorm)]
    assert norms and not any(norm.training for norm in norms)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_tower": "locked", "image_unlocked_layers": 9}, "has 3 layers.*give 0 to 3"),
        ({"text_unlocked_layers": 1}, "text_tower is train; give --model.text_tower locked"),
        ({"image_tower": "lora", "image_unlocked_layers": 1}, "image_tower is lora"),
    ],
)
def test_layers_that_cannot_be_unlocked_are_one_line(settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        locked(build(tmp_path), **settings)


def test_two_locked_towers_without_projections_would_train_nothing(tmp_path):
    towers = build(tmp_path).towers
    towers.model.visual.proj.requires_grad_(False)  # as of a tower that has none
    towers.model.text_projection.requires_grad_(False)
    with pytest.raises(UserError, match="nothing would train"):
        apply_modes(towers, ModelSettings(name="mine", image_tower="locked", text_tower="locked"))
