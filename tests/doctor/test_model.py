"""What is remembered of a model: the same figures, of this model and no other."""

from __future__ import annotations

import json
import socket

import pytest

from neuclip.doctor.diagnosis import examine
from neuclip.doctor.model import cached_facts
from neuclip.errors import UserError
from neuclip.models.build import build_model
from neuclip.models.config import SHIPPED
from neuclip.models.export import export_model
from neuclip.models.facts import model_facts, token_counter
from neuclip.models.hub import NotDownloaded
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import ModelSettings
from tests.builders.images import write_shard


def test_the_second_time_facts_are_read_and_equal_those_of_the_first(cache):
    first = cached_facts(ModelSettings(name="tiny"))
    assert first == cached_facts(ModelSettings(name="tiny")) == model_facts("tiny")
    (kept,) = cache.glob("models/*.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"parameters": 7}))
    assert cached_facts(ModelSettings(name="tiny")).parameters == 7


@pytest.mark.parametrize("changes", [{"image_size": 64}, {"gradient_checkpointing": True}])
def test_other_settings_of_a_model_have_their_own_cached_facts(changes, cache):
    assert cached_facts(ModelSettings(name="tiny")) != cached_facts(ModelSettings(name="tiny", **changes))


def test_a_changed_configuration_is_looked_at_again(cache, tmp_path):
    file = tmp_path / "mine.json"
    config = json.loads((SHIPPED / "tiny.json").read_text())
    widths = []
    for width in (128, 64):
        file.write_text(json.dumps(config | {"embed_dim": width}))
        widths.append(cached_facts(ModelSettings(name=str(file))).embed_dim)
    assert widths == [128, 64]


def test_a_folder_that_lost_its_weights_is_refused_despite_cached_facts(cache, tmp_path):
    export_model(build_model("tiny"), tmp_path / "model")
    settings = ModelSettings(name=f"local-dir:{tmp_path / 'model'}")
    assert cached_facts(settings).embed_dim == 128
    (tmp_path / "model" / "open_clip_model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        cached_facts(settings)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"image_size": [1, 1], "other": 1}'])
def test_a_spoilt_file_is_made_again(content, cache):
    first = cached_facts(ModelSettings(name="tiny"))
    (kept,) = cache.glob("models/*.json")
    kept.write_text(content)
    assert cached_facts(ModelSettings(name="tiny")) == first and json.loads(kept.read_text())


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "file"))
    assert cached_facts(ModelSettings(name="tiny")) == model_facts("tiny")


def test_the_usual_tokenizer_counts_alone_as_within_open_clip(tmp_path):
    captions = ["a cat", "", "Zwölf Boxkämpfer &amp; 3 dogs!", "x" * 300]
    alone, whole = token_counter("tiny", usual=True), token_counter("tiny")
    assert alone is not None and whole is not None and alone(captions) == whole(captions)
    config = json.loads((SHIPPED / "tiny.json").read_text())
    config["text_cfg"]["tokenizer_kwargs"] = {"clean": "canonicalize"}
    (tmp_path / "other.json").write_text(json.dumps(config))
    assert model_facts("tiny").usual_tokenizer and not model_facts(str(tmp_path / "other.json")).usual_tokenizer


@pytest.fixture
def no_network(monkeypatch):
    addresses = []

    def refuse(*address, **options):
        addresses.append(address)
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return addresses


@pytest.mark.parametrize("field", ["hf_tokenizer_name", "hf_model_name"])
def test_a_model_whose_files_are_on_a_hub_asks_no_network_and_is_one_problem(field, cache, tmp_path, no_network):
    pytest.importorskip("transformers")
    config = json.loads((SHIPPED / "tiny.json").read_text())
    config["text_cfg"] |= {field: "nobody/nothing"} | ({"hf_proj_type": "linear"} if "model" in field else {})
    (tmp_path / "hub.json").write_text(json.dumps(config))
    name = str(tmp_path / "hub.json")
    data = write_shard(tmp_path / "x.tar", range(20))
    settings = read_settings(None, ["--data.train", str(data), "--model.name", name, "--train.batch_size", "4"])
    findings, _ = examine(settings, sample=5)
    assert [problem.remedy for problem in findings.problems if "HF_HUB_OFFLINE=0" in problem.remedy]
    assert len(findings.problems) == 1 and "nobody/nothing" in findings.problems[0].what
    with pytest.raises(NotDownloaded, match="nobody/nothing"):
        build_model(name)
    assert no_network == []
