"""What a target names is found on this machine, and nothing is downloaded unasked."""

from __future__ import annotations

import shutil

import pytest
import torch
from huggingface_hub import constants

from neuclip.errors import UserError
from neuclip.models.export import export_model
from neuclip.models.hub import NotHere
from neuclip.models.towers import build_model
from neuclip.runs.target import open_target


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub's cache that holds the model someone/small."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    copy = tmp_path / "hub" / "models--someone--small"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text("1" * 40)
    export_model(build_model("tiny"), copy / "snapshots" / ("1" * 40))
    return copy


def test_a_model_of_the_hub_that_is_here_needs_no_network(hub, tmp_path):
    built, _ = open_target("hf-hub:someone/small")
    folder, _ = open_target(f"local-dir:{hub / 'snapshots' / ('1' * 40)}")
    assert built.has_trained_weights
    for name, weights in folder.towers.model.state_dict().items():
        assert torch.equal(built.towers.model.state_dict()[name], weights), name


def test_one_that_is_not_here_is_not_fetched_but_said(hub):
    shutil.rmtree(hub)
    for target in ("hf-hub:someone/small", "ViT-B-32-quickgelu:openai"):
        with pytest.raises(NotHere, match=f"{target} is not on this machine; to download it set HF_HUB_OFFLINE=0"):
            open_target(target)
    assert constants.HF_HUB_OFFLINE is False  # as it was


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_file_of_weights_asks_for_its_model(name, tmp_path):
    torch.save({}, tmp_path / name)
    with pytest.raises(UserError, match="is not a checkpoint of a run; give MODEL:"):
        open_target(str(tmp_path / name))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("NOTHING", "no run, checkpoint or model NOTHING"),
        ("vit-b-32", "no run, checkpoint or model vit-b-32; did you mean .*ViT-B-32"),
        ("tiny", "tiny names a model without weights; give tiny:TAG or tiny:FILE"),
        ("ViT-B-32:openay", "openay is neither a file nor a tag of ViT-B-32; .* such as openai"),
        ("nothing:openai", "nothing is not known"),
    ],
)
def test_a_target_that_is_nothing_is_told_apart(target, message):
    with pytest.raises(UserError, match=message):
        open_target(target)
