"""A run whose objective needs a reference model: its features, where they come from, and what is refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.distributed.ranks import stop_requests
from neuclip.evaluation.embedding import Embedder
from neuclip.records import RunFolder
from neuclip.runs.build import build_run, open_training_source, resolve
from neuclip.runs.doctor import examine
from neuclip.runs.folder import checkpoints_in
from neuclip.runs.load import open_target
from neuclip.training import stored_features
from neuclip.training.run import Run
from tests.builders.images import BAD_IMAGE, NO_CAPTION
from tests.builders.models import SMALL_FILE
from tests.builders.runs import STEPS, last_checkpoint, losses, settings_for

DRRHO = ["--objective", "drrho", "--objective.reference"]


@pytest.fixture(scope="session")
def reference(shards, tmp_path_factory) -> Path:
    """A run of a model without dropout. No test may change it."""
    return api.train(settings_for(tmp_path_factory.mktemp("runs"), shards, "--run.name", "reference", model=SMALL_FILE))


def store(settings) -> Run:
    run = build_run(resolve(settings), open_training_source(settings))
    with stop_requests() as stop:
        stored_features.store_features(run, stop)
    return run


@pytest.mark.parametrize("crop", ["0.5,1", "1,1"])
def test_it_reads_the_references_features_of_each_image_without_augmentation_and_of_its_first_caption(
    reference, table, tmp_path, crop
):
    flags = [*DRRHO, str(reference), "--data.max_bad_share", "0.2", "--data.crop_scale", crop]
    run = store(settings_for(tmp_path, table, *flags))
    pairs = Embedder(open_target(str(reference))[0], batch_size=5, workers=0).embed_pairs(
        run.source, "embedding", first_caption_only=True
    )
    ids = pairs.ids
    image, text = run.objective.look_up(ids)
    assert torch.allclose(image, pairs.image_features, atol=1e-5)
    assert torch.allclose(text, pairs.text_features[pairs.first_text], atol=1e-5)
    # A sample that cannot be used keeps its id, and the next one takes its place.
    for bad in (BAD_IMAGE, NO_CAPTION):
        assert bad not in ids
        assert torch.equal(run.objective.look_up(torch.tensor([bad])), run.objective.look_up(torch.tensor([bad + 1])))


def test_a_model_that_is_its_own_reference_starts_where_every_normalizer_is_one(reference, shards, tmp_path):
    flags = ["--model.pretrained", str(reference), "--data.crop_scale", "1,1", "--objective.eps", "0.5"]
    flags += ["--optimizer.learning_rate", "1e-3", "--optimizer.warmup", "0"]
    run = api.train(settings_for(tmp_path, shards, *DRRHO, str(reference), *flags, model=SMALL_FILE))
    found = losses(run)
    tau = math.exp(-last_checkpoint(reference)["model"]["logit_scale"].item())
    assert found[0] == pytest.approx(2 * tau * math.log(1.5), rel=1e-4)
    assert len(found) == STEPS and all(math.isfinite(loss) for loss in found) and found[3] != found[0]


def test_features_are_stored_once_and_a_run_continues_to_the_same_bits(reference, shards, tmp_path, monkeypatch):
    settings = settings_for(tmp_path, shards, *DRRHO, str(reference), "--run.name", "whole", model=SMALL_FILE)
    whole, cut = api.train(settings), tmp_path / "cut"
    shutil.copytree(whole, cut)
    for checkpoint in checkpoints_in(RunFolder(cut))[1:]:
        checkpoint.unlink()
    monkeypatch.setattr(stored_features, "_compute", lambda *_: pytest.fail("computed again"))
    assert losses(api.train(settings, resume=cut)) == losses(whole)
    first, second = (last_checkpoint(run)["model"] for run in (whole, cut))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_relative_path_is_stored_as_an_absolute_one(reference, shards, tmp_path, monkeypatch):
    monkeypatch.chdir(reference.parent)
    assert resolve(settings_for(tmp_path, shards, *DRRHO, reference.name)).objective.reference == str(reference)


def test_doctor_builds_the_reference_takes_a_step_and_stores_nothing(reference, shards, tmp_path, cache):
    found = examine(settings_for(tmp_path, shards, *DRRHO, str(reference), model=SMALL_FILE))
    assert found.ready, found.problems
    assert math.isfinite(found.figures["step.loss"]) and not (cache / "features").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "objective.reference is not set, but DRRho needs a trained model; give --objective.reference runs/NAME"),
        (["--objective.reference", "nowhere"], "no run, checkpoint or model nowhere"),
        (["--objective.reference", "ViT-B-32"], "ViT-B-32 names a model without weights; give ViT-B-32:TAG"),
    ],
)
def test_without_a_trained_reference_no_run_is_started(shards, tmp_path, capsys, given, message):
    flags = f"--run.folder {tmp_path}/runs --data.train {shards} --data.workers 0 --train.batch_size 8".split()
    assert main(["train", *flags, "--evaluation.retrieval", "", "--objective", "drrho", *given]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "runs").exists()
