"""LoRA against what it must equal: the base at the start, its merged weights, and autograd through those."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.models.export import export_model
from neuclip.models.lora import LowRank, apply_adapter, merge
from neuclip.models.tower_modes import apply_modes
from neuclip.models.towers import build_model
from neuclip.settings.sections import ModelSettings
from tests.builders.models import build, inputs, timm_and_bert, write_bert

BOTH = ModelSettings(name="mine", image_tower="lora", text_tower="lora", lora_rank=2, lora_alpha=3.0)


def low_ranks(built) -> dict[str, LowRank]:
    return {name: module for name, module in built.towers.model.named_modules() if isinstance(module, LowRank)}


def with_random_b(built):
    torch.manual_seed(3)
    for low_rank in low_ranks(built).values():
        torch.nn.init.normal_(low_rank.b, std=0.3)
    return built


@pytest.fixture(params=["open_clip", "timm and transformers"])
def adapted(request, tmp_path):
    """A model with LoRA on both towers, and its base."""
    config = [] if request.param == "open_clip" else [timm_and_bert(write_bert(tmp_path / "bert"))]
    base, built = (build(tmp_path, *config) for _ in range(2))
    apply_modes(built.towers, BOTH)
    return base, built


def test_it_starts_as_its_base_to_the_bit(adapted):
    """With a graph, as in training: without one, torch's attention has a fast path for plain modules that rounds
    differently."""
    base, built = adapted
    for ours, theirs in zip(built.towers.eval()(*inputs(base)), base.towers.eval()(*inputs(base)), strict=True):
        assert torch.equal(ours, theirs)
    state = merge(built.towers.model.state_dict())
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
    image, text, *_ = towers(*inputs(built))
    ((image - text).pow(2).sum() + towers.logit_scale).backward()
    trained = {id(p) for part in (towers.image_parts, towers.text_parts) for p in part.head_parameters}
    trained |= {id(p) for low_rank in low_ranks(built).values() for p in low_rank.parameters()}
    trained.add(id(towers.model.logit_scale))
    assert {id(p) for p in towers.parameters() if p.grad is not None} == trained


def test_the_gradients_are_those_of_autograd_through_the_merged_weights(adapted):
    """Of the plain model with the merged weights: dL/dB = scale dL/dW A^T and dL/dA = scale B^T dL/dW."""
    base, built = adapted
    images, tokens = inputs(base)
    with_random_b(built)
    plain = base.towers.double().eval()
    state = merge({name: x.double() for name, x in built.towers.model.state_dict().items()})
    plain.model.load_state_dict(state)
    towers = built.towers.double().eval()
    target = torch.randn(3, base.embed_dim, dtype=torch.float64)
    for encoders in (towers, plain):
        image, text = encoders(images.double(), tokens)
        (image * target).sum().add((text * target.flip(0)).sum()).backward()
    weights = dict(plain.model.named_parameters())
    for name, low_rank in low_ranks(built).items():
        before, _, after = name.partition("parametrizations.")
        slope = weights[before + after.removesuffix(".0")].grad
        slope = slope.unflatten(0, (len(low_rank.b), -1)) * low_rank.scale
        assert torch.allclose(low_rank.b.grad, slope @ low_rank.a.mT, atol=1e-12), name
        assert torch.allclose(low_rank.a.grad, low_rank.b.mT @ slope, atol=1e-12), name


def test_the_exported_folder_is_a_plain_model_and_the_adapter_lies_beside_it(adapted, tmp_path):
    base, built = adapted
    with_random_b(built)
    export_model(built, tmp_path / "model")
    merged = build_model(f"local-dir:{tmp_path / 'model'}").towers.eval()
    with torch.no_grad():
        for ours, theirs in zip(built.towers.eval()(*inputs(base)), merged(*inputs(base)), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
        assert not torch.allclose(
            merged.encode_image(inputs(base)[0]), base.towers.eval().encode_image(inputs(base)[0])
        )
    adapter = load_file(tmp_path / "model" / "lora.safetensors")
    again = apply_adapter(base.towers.model.state_dict(), adapter)
    assert all(torch.equal(again[name], x) for name, x in merged.model.state_dict().items())
    assert "logit_scale" in adapter and not any(name.endswith("embedding.weight") for name in adapter)


def test_open_clip_alone_loads_the_merged_folder(tmp_path):
    built = build(tmp_path)
    apply_modes(built.towers, BOTH)
    export_model(with_random_b(built), tmp_path / "model")
    model = open_clip_module().create_model(f"local-dir:{tmp_path / 'model'}").eval()
    images, _ = inputs(built)
    with torch.no_grad():
        want = built.towers.eval().encode_image(images)
        assert torch.allclose(model.encode_image(images, normalize=True), want, atol=1e-6)


def test_a_tower_without_attention_is_one_line():
    with pytest.raises(UserError, match=r"no transformer blocks.*locked or train"):
        apply_modes(build_model("tiny").towers, ModelSettings(name="tiny", image_tower="lora"))
