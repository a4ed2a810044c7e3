"""Texts without their padding: the features of the whole context, where the tower looks back only."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from neuclip.models.towers import BuiltModel, build_model
from tests.builders.models import build, timm_and_bert, write_bert

TEXTS = ["a", "a photo of a dog", "the quick brown fox jumps over the lazy dog", "two cats", "", "one two three " * 40]
TEXT = {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
VISION = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32}


def built(folder, custom_text: bool = False, **text) -> BuiltModel:
    config = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT | text, "custom_text": custom_text}
    (folder / "model.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = build_model(str(folder / "model.json"))
    for parameter in model.towers.parameters():  # positions and biases far from zero, so that they matter
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim < 3 else None
    return model


def both(model: BuiltModel, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The towers' own features and open_clip's, in float64: cutting is exact, and rounding does not hide a mistake."""
    towers, tokens = model.towers.double().eval(), model.tokenize(texts)
    with torch.no_grad():
        return towers.encode_text(tokens), towers.model.encode_text(tokens, normalize=True)


KNOWN = {
    "clip": {},
    "custom text": {"custom_text": True},
    "eos": {"pool_type": "eos", "eos_id": 49407},
    "custom text, eos, biased projection": {
        "custom_text": True,
        "pool_type": "eos",
        "eos_id": 49407,
        "proj_bias": True,
    },
}


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:4]])
def test_features_are_those_of_the_whole_context(tmp_path, kind, texts):
    model = built(tmp_path, **KNOWN[kind])
    short, whole = both(model, texts)
    assert torch.allclose(short, whole, rtol=0, atol=1e-12)
    assert model.towers.short_context.is_exact  # they did come from the shorter one


def test_features_of_a_hugging_face_tower_are_those_of_the_whole_context(tmp_path):
    model = build(tmp_path, timm_and_bert(write_bert(tmp_path / "bert")))
    short, whole = both(model, TEXTS[:4])
    assert torch.allclose(short, whole, rtol=0, atol=1e-12) and model.towers.short_context.is_exact
    lengths = model.towers.text_lengths(model.tokenize(["a", "a a a"])).tolist()
    assert lengths[0] < lengths[1] < model.tokenize(["a"]).shape[1]


def test_texts_are_cut_to_the_longest_of_their_batch(tmp_path):
    model, lengths = built(tmp_path), []
    model.towers.model.transformer.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    both(model, ["a", "two cats"])
    compared, whole, encoded, reference = lengths
    assert (compared, whole, encoded, reference) == (4, 32, 4, 32)  # start, two words, end


UNKNOWN = {
    "looks ahead": {"no_causal_mask": True},
    "first token": {"pool_type": "first"},
    "last token": {"pool_type": "last"},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_other_towers_get_the_whole_context(tmp_path, kind):
    model = built(tmp_path, custom_text=True, **UNKNOWN[kind])
    short, whole = both(model, TEXTS)
    assert torch.equal(short, whole) and model.towers.short_context.is_exact is False


def test_a_tower_whose_features_would_change_gets_the_whole_context(tmp_path):
    model = built(tmp_path)
    model.towers.model.attn_mask.zero_()  # looks causal by its attributes, and is not
    short, whole = both(model, TEXTS[:4])
    assert torch.equal(short, whole) and model.towers.short_context.is_exact is False


def test_training_encodes_the_whole_context_to_the_bit(tmp_path):
    model = built(tmp_path)
    tokens, towers = model.tokenize(TEXTS[:4]), model.towers
    reference = copy.deepcopy(towers).model.encode_text(tokens, normalize=True)
    with torch.no_grad():
        assert torch.equal(towers.train().encode_text(tokens), reference)
    assert torch.equal(towers.eval().encode_text(tokens), reference)  # gradients are wanted
    assert towers.short_context.is_exact is None
