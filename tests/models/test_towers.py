"""Towers taken apart, locked, unlocked from the end, and adapted by LoRA: every kind of tower keeps every promise; and
texts without their padding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.errors import UserError
from neuclip.models.build import BuiltModel, build_model
from neuclip.models.export import export_model
from neuclip.models.modes import apply_modes
from neuclip.models.towers import Towers
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import ModelSettings
from tests.builders.models import KINDS, SMALL, build, build_kind, inputs

LOCKED = {"image_tower": "locked", "text_tower": "locked"}
LORA = {"image_tower": "lora", "text_tower": "lora", "lora_rank": 2, "lora_alpha": 3.0}


def with_modes(built: BuiltModel, **settings) -> Towers:
    apply_modes(built.towers, ModelSettings(name="mine", **settings))
    return built.towers


@pytest.fixture(params=KINDS)
def built(request, tmp_path):
    return build_kind(request.param, tmp_path)


def parts_of(towers: Towers):
    return towers.image_parts, towers.text_parts


def trained(towers: Towers, built: BuiltModel) -> set[int]:
    """Parameters that got a gradient, the temperature left out."""
    image, text = towers.train()(*inputs(built))[:2]
    (image - text).pow(2).sum().backward()
    return {id(p) for p in towers.parameters() if p.grad is not None}


# Locked.


def test_head_after_trunk_is_the_tower_and_every_weight_is_in_one_part(built):
    towers = built.towers.eval()
    encoders = (towers.encode_image, towers.encode_text)
    with torch.no_grad():
        for part, encode, one in zip(parts_of(towers), encoders, inputs(built), strict=True):
            head = part.head(part.trunk(one))
            assert torch.allclose(nn.functional.normalize(head, dim=1), encode(one), atol=1e-6)
            assert not torch.equal(part.trunk(one), head)
    listed = [id(p) for part in parts_of(towers) for p in (*part.trunk_parameters, *part.head_parameters)]
    assert sorted([*listed, id(towers.model.logit_scale)]) == sorted(map(id, towers.parameters()))


def test_locked_trunks_take_no_gradient_and_only_heads_train(built):
    towers = with_modes(built, **LOCKED)
    assert trained(towers, built) == {id(p) for part in parts_of(towers) for p in part.head_parameters}
    assert not any(p.requires_grad for part in parts_of(towers) for p in part.trunk_parameters)
    assert not towers.image_parts.trunk(inputs(built)[0]).requires_grad  # forward without graph


def test_a_locked_trunk_is_in_eval_mode_and_changes_no_statistics(built):
    """Dropout (BERT), patch dropout (the transformer) and BatchNorm (the ResNet): training gives evaluation's rows."""
    towers, (images, tokens) = with_modes(built, **LOCKED), inputs(built)
    want = towers.eval()(images, tokens)[:2]  # with a graph: evaluation without one leaves out the padding of texts
    with torch.no_grad():
        before = {name: x.clone() for name, x in towers.model.state_dict().items()}
        assert all(torch.equal(x, y) for x, y in zip(towers.train()(images, tokens)[:2], want, strict=True))
    assert all(torch.equal(x, before[name]) for name, x in towers.model.state_dict().items())


def test_a_locked_row_has_the_same_bits_in_whatever_batch_it_comes(built):
    """Stored features equal computed ones because of this, also where texts are cut after their last word."""
    towers = with_modes(built, **LOCKED).train()
    tokens = built.tokenize([" ".join(["a dog"] * (1 + i % 5)) for i in range(50)])
    for side, rows in (("text", tokens), ("image", inputs(built, 50)[0])):
        together = towers.trunk_features(side, rows)
        apart = [towers.trunk_features(side, rows[first:last]) for first, last in ((0, 1), (1, 34), (34, 50))]
        assert torch.equal(torch.cat(apart), together)
    assert torch.allclose(towers.trunk_features("text", tokens), towers.text_parts.trunk(tokens), atol=1e-5)


def test_the_last_layers_can_be_unlocked(tmp_path):
    towers = with_modes(build(tmp_path), **LOCKED, text_unlocked_layers=1).train()
    embedding, first, last = towers.text_parts.layers
    assert [p.requires_grad for p in (embedding[0], first[0], last[0])] == [False, False, True]
    assert any(p is towers.model.ln_final.weight for p in last) and towers.model.ln_final.training
    blocks = towers.model.transformer.resblocks
    assert blocks[1].training and not blocks[0].training


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("open_clip", {"image_tower": "locked", "image_unlocked_layers": 9}, "has 3 layers.*give 0 to 3"),
        ("open_clip", {"text_unlocked_layers": 1}, "text_tower is train; give --model.text_tower locked"),
        ("open_clip", {"image_tower": "lora", "image_unlocked_layers": 1}, "image_tower is lora"),
        (
            "open_clip",
            {"text_tower": "lora", "lora_rank": 10**6},
            "no matrix of the text tower has a rank above",
        ),
        ("ResNet", {"image_tower": "lora"}, "no transformer blocks.*locked or train"),
        ("without projections", LOCKED, "nothing would train"),
    ],
)
def test_modes_that_a_tower_cannot_have_are_one_line(kind, settings, message, tmp_path):
    built = build_kind(kind if kind in KINDS else "open_clip", tmp_path)
    if kind not in KINDS:
        built.towers.model.visual.proj.requires_grad_(False)
        built.towers.model.text_projection.requires_grad_(False)
    with pytest.raises(UserError, match=message):
        with_modes(built, **settings)


# BatchNorm.


@pytest.mark.parametrize(
    ("settings", "training"),
    [
        ({"text_tower": "locked"}, {True}),
        ({"image_tower": "locked"}, {False}),
        ({"image_tower": "locked", "image_unlocked_layers": 1}, {True, False}),
        ({"image_tower": "locked", "image_unlocked_layers": 1, "batch_norm": "frozen"}, {False}),
    ],
)
def test_batch_norm_of_a_tower_that_trains_still_trains_unless_it_is_frozen(settings, training):
    towers = with_modes(build_model("tiny"), **settings).train()
    assert {module.training for module in towers.modules() if isinstance(module, _BatchNorm)} == training


@pytest.mark.parametrize(("batch_norm", "kept"), [("frozen", True), ("train", False)])
def test_frozen_batch_norm_keeps_its_statistics_while_its_scale_and_shift_train(batch_norm, kept):
    """Statistics of other images are other features: fine-tuning lost half of what a model knew in 20 steps."""
    built = build_model("tiny")
    towers, images = with_modes(built, batch_norm=batch_norm), inputs(built)[0]
    norms = [module for module in towers.modules() if isinstance(module, _BatchNorm)]
    before = [norm.running_mean.clone() for norm in norms] + [norm.running_var.clone() for norm in norms]
    with torch.no_grad():
        same = torch.equal(towers.train().encode_image(images), towers.eval().encode_image(images))
    took = trained(towers, built)
    after = [norm.running_mean for norm in norms] + [norm.running_var for norm in norms]
    assert norms and {same, *map(torch.equal, before, after)} == {kept}
    assert all(id(p) in took for norm in norms for p in norm.parameters()) and norms[0].weight.grad.any()


@pytest.mark.parametrize("recipe", ["finetune", "locked"])
def test_recipes_that_start_from_pretrained_weights_freeze_batch_norm(recipe):
    assert read_settings(Path(recipe), []).model.batch_norm == "frozen"


# LoRA.


@pytest.fixture(params=["open_clip", "timm and transformers"])
def adapted(request, tmp_path):
    """A model with LoRA on both towers, and its base."""
    base, built = (build_kind(request.param, tmp_path) for _ in range(2))
    with_modes(built, **LORA)
    return base, built


def low_ranks(built: BuiltModel) -> list[tuple[str, nn.Module, nn.Module]]:
    """Of each adapted weight: its name in a plain model, the module that has it, and its two matrices."""
    found = []
    for place, module in built.towers.model.named_modules():
        for field, adapted in getattr(module, "parametrizations", {}).items():
            found.append((f"{place}.{field}", module, adapted[0]))
    return found


def with_random_b(built: BuiltModel) -> BuiltModel:
    torch.manual_seed(3)
    for _, _, low_rank in low_ranks(built):
        nn.init.normal_(low_rank.b, std=0.3)
    return built


def exported(built: BuiltModel, folder: Path) -> Towers:
    export_model(built, folder / "model")
    return build_model(f"local-dir:{folder / 'model'}").towers


def test_lora_starts_as_its_base_to_the_bit(adapted, tmp_path):
    """With a graph, as in training: without one, torch's attention has a fast path for plain modules that rounds
    differently."""
    base, built = adapted
    ours, theirs = (one.towers.eval()(*inputs(base)) for one in (built, base))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    merged = exported(built, tmp_path).model.state_dict()
    assert all(torch.equal(merged[name], x) for name, x in base.towers.model.state_dict().items())


def test_query_key_and_value_have_matrices_of_their_own(adapted):
    stacked = {name.split(".")[-2:][0]: len(low_rank.b) for name, _, low_rank in low_ranks(adapted[1])}
    packed = {name: number for name, number in stacked.items() if name in ("attn", "qkv")}
    assert packed and {*packed.values()} == {3}
    assert {number for name, number in stacked.items() if name not in packed} == {1}


def test_only_lora_heads_and_temperature_train(adapted):
    _, built = adapted
    towers = built.towers
    towers.logit_scale.backward()
    wanted = {id(p) for part in parts_of(towers) for p in part.head_parameters} | {id(towers.model.logit_scale)}
    wanted |= {id(p) for _, _, low_rank in low_ranks(built) for p in low_rank.parameters()}
    assert trained(towers, built) == wanted


def test_gradients_of_lora_are_those_of_autograd_through_the_merged_weights(adapted):
    """Of the plain model with the merged weights: dL/dB = scale dL/dW A^T and dL/dA = scale B^T dL/dW."""
    base, built = adapted
    towers, plain = with_random_b(built).towers.double().eval(), base.towers.double().eval()
    weights, (images, tokens) = dict(plain.model.named_parameters()), inputs(base)
    with torch.no_grad():
        for name, module, _ in low_ranks(built):
            weights[name].copy_(getattr(module, name.rpartition(".")[2]))
    target = torch.randn(3, base.embed_dim, dtype=torch.float64)
    for encoders in (towers, plain):
        image, text = encoders(images.double(), tokens)[:2]
        (image * target).sum().add((text * target.flip(0)).sum()).backward()
    for name, _, low_rank in low_ranks(built):
        slope = weights[name].grad.unflatten(0, (len(low_rank.b), -1)) * 3.0 / 2  # alpha / rank
        assert torch.allclose(low_rank.b.grad, slope @ low_rank.a.mT, atol=1e-12), name
        assert torch.allclose(low_rank.a.grad, low_rank.b.mT @ slope, atol=1e-12), name


def test_the_exported_folder_is_a_plain_model_with_lora_merged(adapted, tmp_path):
    base, built = adapted
    merged = exported(with_random_b(built), tmp_path).eval()
    assert merged.model.state_dict().keys() == base.towers.model.state_dict().keys()
    with torch.no_grad():
        ours, theirs, before = (x(*inputs(base)) for x in (built.towers.eval(), merged, base.towers.eval()))
    assert all(torch.allclose(ours[i], theirs[i], atol=1e-6) for i in (0, 1))
    assert not any(torch.allclose(before[i], theirs[i], atol=1e-3) for i in (0, 1))


# Texts.

TEXTS = ["a", "a photo of a dog", "the quick brown fox jumps over the lazy dog", "two cats", "", "one two three " * 40]
EOS = {"pool_type": "eos", "eos_id": 49407}
CUT: dict[str, dict] = {
    "clip": {},
    "custom text": {"custom_text": True},
    "end token": {"text_cfg": EOS},
    "custom text, end token, biased projection": {"text_cfg": EOS | {"proj_bias": True}, "custom_text": True},
}


def text_model(folder: Path, text_cfg: dict | None = None, **top) -> BuiltModel:
    text = SMALL["text_cfg"] | {"context_length": 32, "layers": 2} | (text_cfg or {})
    built = build(folder, SMALL | {"text_cfg": text} | top)
    for parameter in built.towers.parameters():  # positions and biases far from zero, so that they matter
        nn.init.normal_(parameter, std=0.2) if parameter.ndim < 3 else None
    return built


def both(built: BuiltModel, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The towers' own features and open_clip's, in float64: cutting is exact, and rounding does not hide a mistake; and
    how many tokens went through the transformer each time."""
    towers, tokens, lengths = built.towers.double().eval(), built.tokenize(texts), []
    transformer = getattr(towers.model, "text", towers.model).transformer
    blocks = next(module for module in transformer.modules() if isinstance(module, nn.ModuleList))
    hook = blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    with torch.no_grad():
        short, whole = towers.encode_text(tokens), towers.model.encode_text(tokens, normalize=True)
    hook.remove()
    return short, whole, lengths


@pytest.mark.parametrize("kind", [*CUT, "timm and transformers"])
def test_texts_are_cut_to_the_longest_of_their_batch_and_have_the_features_of_the_whole_context(kind, tmp_path):
    built = text_model(tmp_path, **CUT[kind]) if kind in CUT else build_kind(kind, tmp_path)
    for texts in (TEXTS[:2], TEXTS[:4], TEXTS) if kind in CUT else (["a red circle", "a"],):
        short, whole, (cut, context) = both(built, texts)
        assert torch.allclose(short, whole, rtol=0, atol=1e-12)
        lengths = built.towers.text_lengths(built.tokenize(texts))
        assert cut == lengths.max() <= context and (cut < context or texts is TEXTS)
    one, two = built.towers.text_lengths(built.tokenize(["a", "a a"])).tolist()
    assert two == one + 1


@pytest.mark.parametrize("other", [{"no_causal_mask": True}, {"pool_type": "first"}, {"pool_type": "last"}])
def test_towers_that_need_the_whole_context_get_it(other, tmp_path):
    built = text_model(tmp_path, other, custom_text=True)
    short, whole, lengths = both(built, TEXTS)
    assert torch.equal(short, whole) and lengths == [32, 32]
    assert built.towers.text_lengths(built.tokenize(TEXTS)).tolist() == [32] * len(TEXTS)


def test_training_encodes_the_whole_context_to_the_bit(tmp_path):
    built = text_model(tmp_path)
    tokens, towers = built.tokenize(TEXTS[:4]), built.towers
    reference = copy.deepcopy(towers).model.encode_text(tokens, normalize=True)
    with torch.no_grad():
        assert torch.equal(towers.train().encode_text(tokens), reference)
    assert torch.equal(towers.eval().encode_text(tokens), reference)  # gradients are wanted


def test_the_hash_of_weights_knows_values_names_shapes_and_types():
    towers = build_model("tiny").towers
    first = towers.weights_sha256()
    assert copy.deepcopy(towers).weights_sha256() == first
    statistics = next(module for module in towers.modules() if isinstance(module, _BatchNorm)).running_mean
    statistics[0] += 1e-6
    assert towers.weights_sha256() != first
    statistics[0] = 0
    assert towers.weights_sha256() == first != copy.deepcopy(towers).half().weights_sha256()
