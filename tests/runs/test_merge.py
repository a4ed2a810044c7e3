"""`neuclip merge`: the ends are the models themselves, the middle lies between, and other models are refused."""

from __future__ import annotations

import shutil

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.models.export import export_model
from neuclip.models.towers import build_model
from neuclip.records import RunFolder, read_lines
from neuclip.runs.target import open_target
from neuclip.settings.reading import read_settings
from tests.builders.models import NORMS_FILE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of another model of the run's architecture."""
    folder = tmp_path_factory.mktemp("base") / "start"
    built = build_model(str(NORMS_FILE))
    export_model(built, folder)
    return folder


@pytest.mark.parametrize("weight", ["0", "0.25", "1"])
def test_a_merged_model_is_the_weighted_mean_of_both(finished, base, weight, tmp_path, capsys):
    folder = tmp_path / "merged"
    assert main(["merge", f"local-dir:{base}", str(finished.path), str(folder), "--weight", weight]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"local-dir:{folder}\n" and "BatchNorm: its statistics are interpolated" in printed.err
    first, second, merged = (
        open_target(target)[0].towers.model.state_dict()
        for target in (f"local-dir:{base}", str(finished.path), f"local-dir:{folder}")
    )
    share = float(weight)
    for name, tensor in merged.items():
        wanted = (1 - share) * first[name].double() + share * second[name].double()
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), wanted, rtol=1e-5, atol=1e-6)
    card = (folder / "README.md").read_text()
    assert f"{1 - share:g} of start and {share:g} of whole" in card and "Not evaluated yet" in card


def test_the_curve_ends_at_the_figures_of_both_models_and_writes_no_model(finished, base, tmp_path, capsys):
    run = RunFolder(shutil.copytree(finished.path, tmp_path / "whole"))
    assert main(["merge", f"local-dir:{base}", str(run.path), "--curve"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
    assert "weight of this run" in run.report.read_text()
    lines = read_lines(run.merges)
    assert [line.pop("weight") for line in lines] == [step / 10 for step in range(11)]
    held_out = read_settings(run.settings, []).evaluation.retrieval
    assert lines[0] == pytest.approx(api.evaluate(f"local-dir:{base}", retrieval=held_out, zero_shot=()), abs=1e-6)
    assert lines[10] == pytest.approx(api.evaluate(str(run.path)), abs=1e-6)
    assert lines[5] != lines[0] and not list(run.path.glob("merged*"))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"name": str(NORMS_FILE), "image_size": 48}, "architecture (vision_cfg)"),
        ({"name": "small"}, "architecture (embed_dim"),
    ],
)
def test_another_architecture_is_refused(finished, other, what, tmp_path, capsys):
    export_model(build_model(**other), tmp_path / "other")
    assert main(["merge", f"local-dir:{tmp_path / 'other'}", str(finished.path), str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert f"have another {what}" in message and not (tmp_path / "out").exists()


def test_other_preprocessing_is_refused(finished, base, tmp_path, capsys):
    built = build_model(str(NORMS_FILE))
    built.towers.model.visual.preprocess_cfg["mean"] = (0.5, 0.5, 0.5)
    export_model(built, tmp_path / "other")
    assert main(["merge", f"local-dir:{tmp_path / 'other'}", str(finished.path), str(tmp_path / "out")]) == 2
    assert "have another preprocessing (mean)" in capsys.readouterr().err


def test_a_run_with_lora_is_merged_as_the_plain_model_that_it_saved(finished, small_settings, tmp_path):
    flags = ["--run.name", "adapted", "--model.text_tower", "lora", "--optimizer.learning_rate", "0.01"]
    adapted = api.train(small_settings(tmp_path, "--model.pretrained", str(finished.path), *flags))
    assert main(["merge", str(finished.path), str(adapted), str(tmp_path / "half")]) == 0
    base, saved, half = (
        open_target(target)[0].towers.model.state_dict()
        for target in (str(finished.path), f"local-dir:{adapted / 'model'}", f"local-dir:{tmp_path / 'half'}")
    )
    name = "transformer.resblocks.0.attn.in_proj_weight"
    assert not torch.equal(saved[name], base[name])
    torch.testing.assert_close(half[name], (base[name] + saved[name]) / 2)
