"""Towers taken apart, locked, unlocked from the end, and adapted by LoRA: every kind of tower keeps every promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.errors import UserError
from neuclip.models.build import BuiltModel, build_model
from neuclip.models.export import export_model
from neuclip.models.modes import LowRank, apply_modes, merge_lora
from neuclip.models.towers import Towers
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import ModelSettings
from tests.builders.models import TRANSFORMERS, build, inputs, timm_and_bert, write_bert

LORA = {"image_tower": "lora", "text_tower": "lora", "lora_rank": 2, "lora_alpha": 3.0}


def with_modes(built: BuiltModel, **settings) -> Towers:
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
    towers = built.towers.eval()
    parts = (towers.image_parts, towers.text_parts)
    encoders = (towers.encode_image, towers.encode_text)
    with torch.no_grad():
        for part, encode, one in zip(parts, encoders, inputs(built), strict=True):
            head = part.head(part.trunk(one))
            assert torch.allclose(torch.nn.functional.normalize(head, dim=1), encode(one), atol=1e-6)
            assert not torch.equal(part.trunk(one), head)
    listed = [id(p) for part in parts for p in (*part.trunk_parameters, *part.head_parameters)]
    assert sorted([*listed, id(towers.model.logit_scale)]) == sorted(map(id, towers.parameters()))


def test_locked_trunks_take_no_gradient_and_only_heads_train(built):
    towers = with_modes(built, image_tower="locked", text_tower="locked").train()
    image, text = towers(*inputs(built))[:2]
    (image - text).pow(2).sum().backward()
    heads = {id(p) for part in (towers.image_parts, towers.text_parts) for p in part.head_parameters}
    assert {id(p) for p in towers.parameters() if p.grad is not None} == heads
    assert not any(p.requires_grad for part in (towers.image_parts, towers.text_parts) for p in part.trunk_parameters)
    assert not towers.image_parts.trunk(inputs(built)[0]).requires_grad  # forward without graph


def test_a_locked_trunk_is_in_eval_mode_and_changes_no_statistics(built):
    """Dropout (BERT), patch dropout (the transformer) and BatchNorm (the ResNet): training gives evaluation's rows."""
    towers, (images, tokens) = with_modes(built, image_tower="locked", text_tower="locked"), inputs(built)
    want = towers.eval()(images, tokens)[:2]  # with a graph: evaluation without one leaves out the padding of texts
    with torch.no_grad():
        before = {name: x.clone() for name, x in towers.model.state_dict().items()}
        assert all(torch.equal(x, y) for x, y in zip(towers.train()(images, tokens)[:2], want, strict=True))
    assert all(torch.equal(x, before[name]) for name, x in towers.model.state_dict().items())


def test_a_locked_row_has_the_same_bits_in_whatever_batch_it_comes(built):
    """Stored features equal computed ones because of this, also where texts are cut after their last word."""
    towers = with_modes(built, image_tower="locked", text_tower="locked").train()
    tokens = built.tokenize([" ".join(["a dog"] * (1 + i % 5)) for i in range(50)])
    images = inputs(built, 50)[0]
    for side, rows in (("text", tokens), ("image", images)):
        together = towers.trunk_features(side, rows)
        apart = [towers.trunk_features(side, rows[first:last]) for first, last in ((0, 1), (1, 34), (34, 50))]
        assert torch.equal(torch.cat(apart), together)
    assert torch.allclose(towers.trunk_features("text", tokens), towers.text_parts.trunk(tokens), atol=1e-5)


def test_the_last_layers_can_be_unlocked(tmp_path):
    towers = with_modes(build(tmp_path), text_tower="locked", text_unlocked_layers=1, image_tower="locked").train()
    embedding, first, last = towers.text_parts.layers
    assert [p.requires_grad for p in (embedding[0], first[0], last[0])] == [False, False, True]
    assert any(p is towers.model.ln_final.weight for p in last) and towers.model.ln_final.training
    blocks = towers.model.transformer.resblocks
    assert blocks[1].training and not blocks[0].training


def test_batch_norm_of_a_tower_that_trains_still_trains_unless_it_is_frozen():
    modes = {"text_tower": "locked"}, {"image_tower": "locked"}, {"image_tower": "locked", "image_unlocked_layers": 1}
    trained = []
    for settings in (*modes, modes[2] | {"batch_norm": "frozen"}):
        towers = with_modes(build_model("tiny"), **settings).train()
        trained.append([module.training for module in towers.modules() if isinstance(module, _BatchNorm)])
    assert all(trained[0]) and not any(trained[1]) and any(trained[2]) and not all(trained[2]) and not any(trained[3])


@pytest.mark.parametrize("recipe", ["finetune", "locked"])
def test_recipes_that_start_from_pretrained_weights_freeze_batch_norm(recipe):
    assert read_settings(Path(recipe), []).model.batch_norm == "frozen"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_tower": "locked", "image_unlocked_layers": 9}, "has 3 layers.*give 0 to 3"),
        ({"text_unlocked_layers": 1}, "text_tower is train; give --model.text_tower locked"),
        ({"image_tower": "lora", "image_unlocked_layers": 1}, "image_tower is lora"),
        ({"text_tower": "lora", "lora_rank": 1_000_000}, "no matrix of the text tower has a rank above .*; give"),
    ],
)
def test_modes_that_a_tower_cannot_have_are_one_line(settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        with_modes(build(tmp_path), **settings)


def test_two_locked_towers_without_projections_would_train_nothing(tmp_path):
    built = build(tmp_path)
    built.towers.model.visual.proj.requires_grad_(False)  # as of a tower that has none
    built.towers.model.text_projection.requires_grad_(False)
    with pytest.raises(UserError, match="nothing would train"):
        with_modes(built, image_tower="locked", text_tower="locked")


def test_a_tower_without_attention_cannot_be_adapted():
    with pytest.raises(UserError, match=r"no transformer blocks.*locked or train"):
        with_modes(build_model("tiny"), image_tower="lora")


def low_ranks(built: BuiltModel) -> dict[str, LowRank]:
    return {name: module for name, module in built.towers.model.named_modules() if isinstance(module, LowRank)}


def with_random_b(built: BuiltModel) -> BuiltModel:
    torch.manual_seed(3)
    for low_rank in low_ranks(built).values():
        torch.nn.init.normal_(low_rank.b, std=0.3)
    return built


@pytest.fixture(params=["open_clip", "timm and transformers"])
def adapted(request, tmp_path):
    """A model with LoRA on both towers, and its base."""
    config = [] if request.param == "open_clip" else [timm_and_bert(write_bert(tmp_path / "bert"))]
    base, built = (build(tmp_path, *config) for _ in range(2))
    with_modes(built, **LORA)
    return base, built


def test_lora_starts_as_its_base_to_the_bit(adapted):
    """With a graph, as in training: without one, torch's attention has a fast path for plain modules that rounds
    differently."""
    base, built = adapted
    ours, theirs = (one.towers.eval()(*inputs(base)) for one in (built, base))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    state = merge_lora(built.towers.model.state_dict())
    assert all(torch.equal(state[name], x) for name, x in base.towers.model.state_dict().items())


def test_query_key_and_value_have_matrices_of_their_own(adapted):
    _, built = adapted
    shapes = {name.split(".parametrizations")[0].rpartition(".")[2]: x.b.shape for name, x in low_ranks(built).items()}
    packed = [shape for name, shape in shapes.items() if name in ("attn", "qkv")]
    assert packed and all(shape[0] == 3 for shape in packed)
    assert {shape[0] for name, shape in shapes.items() if name not in ("attn", "qkv")} == {1}


def test_only_lora_heads_and_temperature_train(adapted):
    _, built = adapted
    towers = built.towers
    image, text = towers(*inputs(built))[:2]
    ((image - text).pow(2).sum() + towers.logit_scale).backward()
    trained = {id(p) for part in (towers.image_parts, towers.text_parts) for p in part.head_parameters}
    trained |= {id(p) for low_rank in low_ranks(built).values() for p in low_rank.parameters()}
    trained.add(id(towers.model.logit_scale))
    assert {id(p) for p in towers.parameters() if p.grad is not None} == trained


def test_gradients_of_lora_are_those_of_autograd_through_the_merged_weights(adapted):
    """Of the plain model with the merged weights: dL/dB = scale dL/dW A^T and dL/dA = scale B^T dL/dW."""
    base, built = adapted
    images, tokens = inputs(base)
    with_random_b(built)
    plain = base.towers.double().eval()
    plain.model.load_state_dict(merge_lora({name: x.double() for name, x in built.towers.model.state_dict().items()}))
    towers = built.towers.double().eval()
    target = torch.randn(3, base.embed_dim, dtype=torch.float64)
    for encoders in (towers, plain):
        image, text = encoders(images.double(), tokens)[:2]
        (image * target).sum().add((text * target.flip(0)).sum()).backward()
    weights = dict(plain.model.named_parameters())
    for name, low_rank in low_ranks(built).items():
        before, _, after = name.partition("parametrizations.")
        slope = weights[before + after.removesuffix(".0")].grad
        slope = slope.unflatten(0, (len(low_rank.b), -1)) * low_rank.scale
        assert torch.allclose(low_rank.b.grad, slope @ low_rank.a.mT, atol=1e-12), name
        assert torch.allclose(low_rank.a.grad, low_rank.b.mT @ slope, atol=1e-12), name


def test_the_exported_folder_is_a_plain_model_with_lora_merged(adapted, tmp_path):
    base, built = adapted
    with_random_b(built)
    export_model(built, tmp_path / "model")
    merged = build_model(f"local-dir:{tmp_path / 'model'}").towers.eval()
    assert merged.model.state_dict().keys() == base.towers.model.state_dict().keys()
    with torch.no_grad():
        ours, theirs, before = (x(*inputs(base)) for x in (built.towers.eval(), merged, base.towers.eval()))
    assert all(torch.allclose(ours[i], theirs[i], atol=1e-6) for i in (0, 1))
    assert not any(torch.allclose(before[i], theirs[i], atol=1e-3) for i in (0, 1))
