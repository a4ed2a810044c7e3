"""What a finished run leaves behind."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from neuclip import api, load
from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.records import RunFolder, read_lines
from tests.builders.data import pair, write_tar
from tests.builders.images import write_csv, write_shards
from tests.builders.runs import BATCH, STEPS, losses

pytestmark = pytest.mark.slow


def test_a_run_leaves_every_promised_file(finished):
    promised = "settings.yaml environment.json records.jsonl evaluation.jsonl summary.json gallery.json report.html"
    assert set(promised.split()) <= {path.name for path in finished.path.iterdir()}
    assert {path.name for path in finished.model.iterdir()} == {"open_clip_config.json", "open_clip_model.safetensors"}
    assert not list(finished.path.rglob(".*.part"))


def test_records_have_the_promised_keys_and_are_strict_json(finished):
    records = [json.loads(line, parse_constant=pytest.fail) for line in finished.records.read_text().splitlines()]
    keys = """samples step epoch loss temperature learning_rate accuracy calibration samples_per_second data_share
        towers_share normalizer_share"""
    assert all(set(keys.split()) <= set(record) for record in records)
    assert [record["samples"] for record in records] == [BATCH * step for step in range(1, STEPS + 1)]
    shares = [record["data_share"] + record["towers_share"] + record["normalizer_share"] for record in records]
    assert shares == pytest.approx([1.0] * STEPS)


def test_the_summary_has_the_final_figures(finished):
    summary = json.loads(finished.summary.read_text())
    assert summary["samples_seen"] == STEPS * BATCH and summary["loss"] == losses(finished.path)[-1]
    assert {"temperature", "seconds", "samples_per_second", "peak_memory_bytes", "evaluation"} <= set(summary)
    lines = read_lines(finished.evaluation)
    assert summary["evaluation"].items() <= lines[-1].items()
    assert [line["samples"] for line in lines] == [4 * BATCH, 8 * BATCH, STEPS * BATCH]


def test_the_exported_model_is_the_trained_one(finished):
    model, _, transform = open_clip_module().create_model_and_transforms(f"local-dir:{finished.model}")
    trained, own_transform, tokenize = load(str(finished.path))
    noise = Image.effect_noise((40, 50), 90)
    with torch.no_grad():
        tokens = tokenize(["a red circle"])
        assert torch.allclose(model.eval().encode_text(tokens), trained.encode_text(tokens), atol=1e-6)
    assert torch.equal(transform(noise), own_transform(noise))


def test_the_model_folder_scores_as_the_run_it_came_from(finished, shards):
    asked = {"retrieval": (str(shards),), "zero_shot": ()}
    want = json.loads(finished.summary.read_text())["evaluation"]
    assert api.evaluate(str(finished.path), **asked) == want
    assert api.evaluate(f"local-dir:{finished.model}", **asked, batch_size=256) == pytest.approx(want)


def test_what_could_not_be_indexed_is_counted_once_however_often_a_run_is_resumed(small_settings, tmp_path):
    data = tmp_path / "0.tar"
    write_tar(data, [member for number in range(60) for member in pair(number)] + [("x.txt", b"alone")])
    flags = ["--data.train", str(data), "--run.name", "r", "--data.max_bad_share", "1"]
    for _ in range(2):
        folder = RunFolder(api.train(small_settings(tmp_path, *flags), resume="auto"))
        assert json.loads(folder.summary.read_text())["skipped"] == {"no image": 1}
        assert len(read_lines(folder.skipped)) == 1


def test_the_share_of_full_captions_is_the_mean_over_the_records(small_settings, tmp_path):
    table = write_csv(tmp_path / "pairs", 40)
    header, *rows = table.read_text().splitlines()
    rows[::3] = [row + " and so on" * 50 for row in rows[::3]]
    table.write_text("\n".join([header, *rows]))
    folder = RunFolder(api.train(small_settings(tmp_path, "--data.train", str(table), "--train.samples", "40")))
    shares = [record["truncated_captions"] for record in read_lines(folder.records)]
    assert len(set(shares)) > 2 and sum(shares) / len(shares) == pytest.approx(14 / 40)  # one epoch
    assert json.loads(folder.summary.read_text())["truncated_captions"] == pytest.approx(14 / 40)


def test_clip_trains_in_the_same_loop_and_has_no_calibration(small_settings, tmp_path):
    folder = RunFolder(api.train(small_settings(tmp_path, "--objective", "clip", "--log.tensorboard", "true")))
    records = read_lines(folder.records)
    assert all(record["calibration"] is None for record in records)
    assert any((folder.path / "tensorboard").iterdir())


def test_one_sample_is_refused_before_training(small_settings, tmp_path):
    data = write_shards(tmp_path / "data", 1, shards=1)
    with pytest.raises(UserError, match="holds one sample, and a contrastive loss compares samples"):
        api.train(small_settings(tmp_path / "runs", "--data.train", str(data), "--train.batch_size", "1"))
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_last_measurement_fails_leaves_its_model(small_settings, tmp_path):
    data = write_shards(tmp_path / "data", 2, shards=1, spoilt=[1])
    flags = f"--data.train {data} --train.batch_size 2 --train.samples 4 --run.name r --evaluation.error_anchors 5"
    with pytest.raises(UserError, match="two or more pairs"):
        api.train(small_settings(tmp_path, *flags.split()))
    model, *_ = load(f"local-dir:{tmp_path / 'r' / 'model'}")
    assert model.logit_scale.isfinite()
