"""What is known of a model before it is built."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from neuclip.errors import UserError
from neuclip.models.build import build_model
from neuclip.models.facts import model_facts, pretrained_is_known, token_counter
from neuclip.settings.sections import ModelSettings


def test_the_facts_are_those_of_the_built_model():
    facts, built = model_facts("tiny"), build_model("tiny")
    assert (facts.embed_dim, facts.image_size, facts.context_length) == (built.embed_dim, (48, 48), 16)
    assert facts.parameters == sum(p.numel() for p in built.towers.parameters())
    stored = built.towers.model.state_dict().values()
    assert facts.state_bytes == sum(tensor.numel() * tensor.element_size() for tensor in stored)


def test_activations_are_what_autograd_keeps_of_a_real_pass():
    model = build_model("tiny").towers.model
    own = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = {}
    batch = 8

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model.encode_image(torch.randn(batch, 3, 48, 48)), model.encode_text(torch.ones(batch, 16).long())
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / batch
    assert len(outputs) == 2 and model_facts("tiny").activation_bytes == pytest.approx(found, rel=0.3)


def test_larger_images_need_more_and_checkpointing_less(tmp_path):
    config = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 4, "width": 64, "patch_size": 16},
        "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 4},
    }
    file = tmp_path / "little-vit.json"
    file.write_text(json.dumps(config))
    sized = ModelSettings(name=str(file), image_size=96)
    small, large = model_facts(str(file)), model_facts(str(file), sized)
    saving = model_facts(str(file), replace(sized, gradient_checkpointing=True))
    assert (small.image_size, large.image_size, small.context_length) == ((32, 32), (96, 96), 8)
    assert saving.activation_bytes < large.activation_bytes / 2 and small.activation_bytes < large.activation_bytes / 2


def test_tokens_are_counted_as_the_tokenizer_writes_them_and_beyond_its_context():
    count = token_counter("tiny")
    captions = ["a red circle", "", "naïve café, 3 × 4"]
    tokens = build_model("tiny").tokenize(captions)
    assert count(captions) == (tokens != 0).sum(dim=1).tolist()
    assert count(["word " * 40]) == [42]


def test_weights_are_a_file_or_a_known_tag(tmp_path):
    (tmp_path / "weights.pt").touch()
    assert pretrained_is_known("ViT-B-32", "openai") and pretrained_is_known("tiny", str(tmp_path / "weights.pt"))
    assert pretrained_is_known("ViT-B-32", "laion2b-s34b-b79k")  # as open_clip itself takes it
    assert not pretrained_is_known("tiny", str(tmp_path))
    assert not pretrained_is_known("ViT-B-32", "opnai") and not pretrained_is_known("tiny", "openai")


def test_an_unknown_model_is_named_with_the_nearest():
    with pytest.raises(UserError, match="did you mean"):
        model_facts("ViT-B-33")
