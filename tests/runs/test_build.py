"""Paths that a run stores; its own model; SigLIP's bias, which other objectives do not have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.models.build import build_model
from neuclip.models.export import export_model
from neuclip.records import RunFolder
from neuclip.runs.build import absolute_address, resolve
from neuclip.runs.load import build_towers
from neuclip.settings.sections import EvaluationSettings, Settings
from tests.builders.images import write_shards
from tests.builders.models import NORMS_FILE
from tests.builders.runs import BATCH


def test_a_softmax_objective_has_no_bias_and_leaves_one_that_a_model_brings_alone(small_settings, tmp_path):
    settings = small_settings(tmp_path, "--objective", "clip")
    assert build_towers(settings, torch.device("cpu")).towers.logit_bias is None
    export_model(build_model(str(NORMS_FILE), initial_bias=-5.0), tmp_path / "model")
    settings = small_settings(tmp_path, "--objective", "clip", "--model.name", f"local-dir:{tmp_path / 'model'}")
    towers = build_towers(settings, torch.device("cpu")).towers
    assert towers.logit_bias.item() == -5 and not towers.logit_bias.requires_grad


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("photos", "{}/photos"),
        ("photos:3,pairs.csv:2", "{}/photos:3,{}/pairs.csv:2"),
        ("photos/{00000..00001}.tar", "{}/photos/{{00000..00001}}.tar"),
        ("photos/*.tar", "{}/photos/*.tar"),
        ("{photos/00000,photos/00001}.tar", "{}/{{photos/00000,photos/00001}}.tar"),
        ("a,b:3.csv", "{}/a,b:3.csv"),  # the name of one file
        ("./icons-30k", "{}/icons-30k"),  # a folder; without the dot it is a data set by name
        ("icons-30k,photos", "icons-30k,{}/photos"),
        ("s3://bucket/{0..9}.tar:2,https://host/a.tar?x=1,2", "s3://bucket/{{0..9}}.tar:2,https://host/a.tar?x=1,2"),
        ("/data/gone.csv,gone/*.tar", "/data/gone.csv,gone/*.tar"),  # the error names it as it was given
        ("", ""),
    ],
)
def test_addresses_are_stored_so_that_they_mean_the_same_from_any_folder(given, stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shards(tmp_path / "photos", 4)
    for name in ("pairs.csv", "a,b:3.csv"):
        (tmp_path / name).touch()
    (tmp_path / "icons-30k").mkdir()
    assert absolute_address(given) == stored.format(*[tmp_path] * 2)
    assert absolute_address(absolute_address(given)) == absolute_address(given)


def test_the_names_of_held_out_sets_are_stored_with_absolute_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "a=b", "cars"):
        (tmp_path / name).mkdir()
    by_name = "x=icons-30k/zero-shot/names"
    sets = EvaluationSettings(retrieval=("mine=photos", "a=b"), zero_shot=("cars", "wheels=cars", by_name))
    stored = resolve(Settings(evaluation=sets)).evaluation
    assert stored.retrieval == (f"mine={tmp_path}/photos", f"{tmp_path}/a=b")
    assert stored.zero_shot == (f"{tmp_path}/cars", f"wheels={tmp_path}/cars", by_name)
    assert resolve(Settings(evaluation=stored)).evaluation == stored


def test_a_pattern_in_a_folder_whose_name_is_a_pattern_stays_as_it_is(tmp_path, monkeypatch):
    write_shards(tmp_path / "[x]" / "photos", 4)
    monkeypatch.chdir(tmp_path / "[x]")
    assert absolute_address("photos/*.tar") == "photos/*.tar"
    assert absolute_address("photos") == f"{tmp_path}/[x]/photos"


@pytest.mark.slow
def test_a_fine_tuned_run_is_evaluated_and_resumed_from_another_folder_without_its_parent(
    small_settings, shards, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shards, "photos")
    export_model(build_model(str(NORMS_FILE), image_size=48, initial_bias=-5.0), Path("parent"))
    flags = f"""--data.train photos --evaluation.retrieval photos --model.name local-dir:parent --model.image_size 0
        --run.name child --train.samples {2 * BATCH}""".split()
    folder = RunFolder(api.train(small_settings(tmp_path, "--objective", "clip", *flags)))
    want = json.loads(folder.summary.read_text())["evaluation"]
    shutil.rmtree("parent")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["eval", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == want and f"{tmp_path}/photos.images" in want
    shutil.rmtree(folder.model)
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert api.evaluate(f"local-dir:{folder.model}", retrieval=(f"{tmp_path}/photos",), zero_shot=()) == want
