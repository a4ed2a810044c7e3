"""Towers: texts without their padding, locked trunks to the bit, BatchNorm that keeps its statistics, hashes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.models.build import BuiltModel, build_model
from neuclip.models.modes import apply_modes
from neuclip.settings.sections import ModelSettings
from tests.builders.models import build, inputs, timm_and_bert, write_bert

TEXTS = ["a", "a photo of a dog", "the quick brown fox jumps over the lazy dog", "two cats", "", "one two three " * 40]
TEXT = {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
VISION = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32}
EOS = {"pool_type": "eos", "eos_id": 49407}


def text_model(folder, custom_text: bool = False, **text) -> BuiltModel:
    config = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT | text, "custom_text": custom_text}
    (folder / "model.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    built = build_model(str(folder / "model.json"))
    for parameter in built.towers.parameters():  # positions and biases far from zero, so that they matter
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim < 3 else None
    return built


def both(built: BuiltModel, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The towers' own features and open_clip's, in float64: cutting is exact, and rounding does not hide a mistake; and
    how many tokens went through the transformer each time."""
    towers, tokens, lengths = built.towers.double().eval(), built.tokenize(texts), []
    transformer = getattr(towers.model, "text", towers.model).transformer
    blocks = next(module for module in transformer.modules() if isinstance(module, torch.nn.ModuleList))
    hook = blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    with torch.no_grad():
        short, whole = towers.encode_text(tokens), towers.model.encode_text(tokens, normalize=True)
    hook.remove()
    return short, whole, lengths


KNOWN = {
    "clip": {},
    "custom text": {"custom_text": True},
    "end token": EOS,
    "custom text, end token, biased projection": EOS | {"custom_text": True, "proj_bias": True},
}


@pytest.mark.parametrize("kind", [*KNOWN, "transformers"])
def test_texts_are_cut_to_the_longest_of_their_batch_and_have_the_features_of_the_whole_context(kind, tmp_path):
    built = text_model(tmp_path, **KNOWN[kind]) if kind in KNOWN else None
    built = built or build(tmp_path, timm_and_bert(write_bert(tmp_path / "bert")))
    for texts in (TEXTS[:2], TEXTS[:4], TEXTS) if kind in KNOWN else (["a red circle", "a"],):
        short, whole, (cut, context) = both(built, texts)
        assert torch.allclose(short, whole, rtol=0, atol=1e-12)
        lengths = built.towers.text_lengths(built.tokenize(texts))
        assert cut == lengths.max() <= context and (cut < context or texts is TEXTS)
    one, two = built.towers.text_lengths(built.tokenize(["a", "a a"])).tolist()
    assert two == one + 1


@pytest.mark.parametrize("other", [{"no_causal_mask": True}, {"pool_type": "first"}, {"pool_type": "last"}])
def test_towers_that_need_the_whole_context_get_it(other, tmp_path):
    built = text_model(tmp_path, custom_text=True, **other)
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


@pytest.mark.parametrize(("batch_norm", "kept"), [("frozen", True), ("train", False)])
def test_frozen_batch_norm_keeps_its_statistics_while_its_scale_and_shift_train(batch_norm, kept):
    """Statistics of other images are other features: fine-tuning lost half of what a model knew in 20 steps."""
    built = build_model("tiny")
    apply_modes(built.towers, ModelSettings(name="tiny", batch_norm=batch_norm))
    towers, (images, tokens) = built.towers, inputs(built)
    norms = [module for module in towers.modules() if isinstance(module, _BatchNorm)]
    with torch.no_grad():
        same = torch.equal(towers.train().encode_image(images), towers.eval().encode_image(images))
    before = [(norm.running_mean.clone(), norm.running_var.clone(), norm.weight.clone()) for norm in norms]
    optimizer = torch.optim.SGD(towers.parameters(), 0.1)
    for _ in range(3):
        image, text = towers.train()(images, tokens)[:2]
        (image - text).pow(2).sum().backward()
        optimizer.step()
    statistics = [torch.equal(norm.running_mean, mean) for norm, (mean, _, _) in zip(norms, before, strict=True)]
    statistics += [torch.equal(norm.running_var, var) for norm, (_, var, _) in zip(norms, before, strict=True)]
    assert norms and {same, *statistics} == {kept}
    assert all(parameter.requires_grad for norm in norms for parameter in norm.parameters())
    assert not all(torch.equal(norm.weight, weight) for norm, (_, _, weight) in zip(norms, before, strict=True))


def test_the_hash_of_weights_knows_values_names_shapes_and_types():
    towers = build_model("tiny").towers
    first = towers.weights_sha256()
    assert copy.deepcopy(towers).weights_sha256() == first
    statistics = next(module for module in towers.modules() if isinstance(module, _BatchNorm)).running_mean
    statistics[0] += 1e-6
    assert towers.weights_sha256() != first
    statistics[0] = 0
    assert towers.weights_sha256() == first != copy.deepcopy(towers).half().weights_sha256()
