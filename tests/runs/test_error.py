"""The error of real runs: at equal anchors, eps and samples seen, and on the way; and the checkpoints it needs."""

from __future__ import annotations

import json
import re
import shutil
import signal

import pytest

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import UserError
from neuclip.records import RunFolder, read_lines
from neuclip.runs.error import normalizer_errors
from neuclip.runs.folder import checkpoints_in, samples_at
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.builders.images import write_shards
from tests.builders.processes import main_killed_at_step
from tests.builders.runs import BATCH

pytestmark = pytest.mark.slow

NEUCLIP, CLIP_BATCH = ["--objective.num_prototypes", "20", "--objective.restart_every", "5"], 12
THIRDS = ["--checkpoint.milestones", "3", "--checkpoint.every_samples", "0", "--checkpoint.keep", "1"]


@pytest.fixture(scope="module")
def runs(small_settings, tmp_path_factory) -> dict[str, RunFolder]:
    """Two methods, two batch sizes, two eps, one budget."""
    folder = tmp_path_factory.mktemp("methods")
    flags = {
        "neuclip": [],
        "clip": ["--objective", "clip", "--objective.eps", "1e-4", "--train.batch_size", str(CLIP_BATCH)],
    }
    return {
        name: RunFolder(
            api.train(small_settings(folder, "--run.name", name, *THIRDS, "--evaluation.error_anchors", "20", *more))
        )
        for name, more in flags.items()
    }


def samples_of(folder: RunFolder) -> list[int]:
    return [samples_at(path) for path in checkpoints_in(folder)]


def test_milestones_are_the_first_steps_past_equal_parts_of_the_budget(runs):
    assert samples_of(runs["neuclip"]) == [32, 64, 96]
    assert samples_of(runs["clip"]) == [36, 72, 96]


def test_a_killed_run_that_goes_on_has_the_milestones_of_one_that_was_not(runs, small_settings, tmp_path):
    settings = small_settings(tmp_path, "--run.name", "killed", *THIRDS)
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    child = main_killed_at_step(6, ["train", str(tmp_path / "settings.yaml")])
    assert child.code == -signal.SIGKILL, child.errors
    folder = RunFolder(tmp_path / "killed")
    assert samples_of(folder) == [32]
    api.train(read_settings(folder.settings), resume=folder.path)
    assert samples_of(folder) == samples_of(runs["neuclip"])


def test_runs_are_measured_with_one_eps_at_the_same_samples_and_the_mean_is_over_them(runs):
    found = normalizer_errors([folder.path for folder in runs.values()], anchors=20, seed=0, checkpoints=100)
    assert found["eps"] == 1e-4 and [run["own_eps"] for run in found["runs"]] == [1e-6, 1e-4]
    neuclip, clip = found["runs"]
    assert [at["samples"] for at in neuclip["checkpoints"]] == [32, 64, 96]
    assert [at["samples"] for at in clip["checkpoints"]] == [36, 72, 96]
    for run in (neuclip, clip):
        assert all(at["eps"] == 1e-4 and at["anchors"] == 20 for at in run["checkpoints"])
        errors = [at["estimators"]["method"]["mean"] for at in run["checkpoints"]]
        assert run["mean"]["method"] == pytest.approx(sum(errors) / 3) and len(set(errors)) == 3
    assert len({at["duplicates"] for run in (neuclip, clip) for at in run["checkpoints"]}) == 1  # of the same anchors


def test_the_figure_of_the_summary_is_that_of_the_last_checkpoint(runs):
    for folder, eps in zip(runs.values(), (1e-6, 1e-4), strict=True):
        summary = json.loads(folder.summary.read_text())["normalizer_error"]
        found = normalizer_errors([folder.path], anchors=20, seed=0, checkpoints=1)
        (last,) = found["runs"][0]["checkpoints"]
        assert summary["eps"] == found["eps"] == eps
        for name in ("method", "minibatch"):
            assert summary["estimators"][name] == pytest.approx(last["estimators"][name], rel=1e-4)


def test_every_evaluation_after_the_first_step_has_the_error_with_the_held_out_figures(
    small_settings, shards, tmp_path
):
    flags = [
        "--evaluation.every",
        str(4 * BATCH),
        "--evaluation.at_start",
        "true",
        "--evaluation.retrieval",
        str(shards),
    ]
    run = small_settings(tmp_path, "--evaluation.error_anchors", "20", "--run.name", "curve", *flags)
    siglip = small_settings(
        tmp_path, "--evaluation.error_anchors", "20", "--run.name", "siglip", "--objective", "siglip"
    )
    never = small_settings(tmp_path, "--run.name", "never", *flags)
    folders = [RunFolder(api.train(one)) for one in (run, siglip, never)]
    lines = read_lines(folders[0].evaluation)
    assert [line["samples"] for line in lines] == [0, 32, 64, 96]
    for name in ("method", "minibatch"):
        assert [f"normalizer_error.{name}" in line for line in lines] == [False, True, True, True]
    assert all("image_to_text_recall_at_1" in " ".join(line) for line in lines)
    last = json.loads(folders[0].summary.read_text())["normalizer_error"]["estimators"]
    assert {name: lines[-1][f"normalizer_error.{name}"] for name in last} == {
        name: errors["mean"] for name, errors in last.items()
    }
    (only,) = read_lines(folders[1].evaluation)  # SigLIP estimates none
    assert "normalizer_error.minibatch" in only and "normalizer_error.method" not in only
    assert not any("normalizer_error" in key for line in read_lines(folders[2].evaluation) for key in line)


def test_a_number_of_checkpoints_are_those_nearest_to_equal_parts(runs):
    found = normalizer_errors([runs["neuclip"].path], anchors=5, seed=0, checkpoints=2)
    assert [at["samples"] for at in found["runs"][0]["checkpoints"]] == [32, 96]


def test_the_command_prints_the_definition_the_eps_and_a_judgement_per_run(runs, capsys):
    names = [str(folder.path) for folder in runs.values()]
    assert main(["error", *names, "--anchors", "20", "--checkpoints", "1", "--eps", "1e-5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("mean over anchors of (log estimate - log exact normalizer)^2")
    assert "eps 1e-5 for all; 20 anchors (seed 0)" in text and "(trained with eps 1e-6)\n" in text
    assert f"{names[1]}, clip, batch 12: the error is as large as a mini-batch's (trained with eps 1e-4)\n" in text
    assert max(map(len, text.splitlines())) < 120 + len(names[0])


def test_runs_on_other_data_are_refused_in_one_line(runs, small_settings, tmp_path):
    other = write_shards(tmp_path / "shards", 30)
    flags = ["--data.train", str(other), "--train.samples", str(BATCH), "--run.name", "other"]
    folder = api.train(small_settings(tmp_path, *flags))
    with pytest.raises(UserError, match=r"trained on different data \(40 and 30 samples, or other captions\)"):
        normalizer_errors([runs["neuclip"].path, folder], anchors=5, seed=0)


def test_runs_without_common_checkpoints_are_refused_with_what_they_have(runs, small_settings, tmp_path):
    folder = api.train(small_settings(tmp_path, "--train.samples", str(BATCH), "--run.name", "short"))
    with pytest.raises(UserError, match=r"no checkpoints at equal numbers .* has 32, 64, 96; .* has 8; train with"):
        normalizer_errors([runs["neuclip"].path, folder], anchors=5, seed=0)


def test_fewer_checkpoints_than_asked_for_are_told(runs, capsys):
    assert main(["error", str(runs["clip"].path), "--anchors", "5", "--checkpoints", "4"]) == 0
    assert "3 of 4 checkpoints measured" in capsys.readouterr().err


def test_a_run_is_not_compared_with_itself(runs, capsys):
    name = str(runs["clip"].path)
    assert main(["error", name, f"{name}/"]) == 2
    assert "is given twice; give each run once" in capsys.readouterr().err


def test_a_strangers_run_fetches_none_of_the_addresses_in_its_settings_unless_the_user_says_so(
    runs, shards, server, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for shard in shards.glob("*.tar"):
        shutil.copy(shard, server.folder)
    address = f"{server.url}/{{00000..00001}}.tar"
    listed = tmp_path / "shards.txt"  # a list in a file is no way round
    listed.write_text("".join(f"{server.url}/{name}\n" for name in ("00000.tar", "00001.tar")))
    run = tmp_path / "stranger"
    shutil.copytree(runs["clip"].path, run)
    settings = (run / "settings.yaml").read_text()
    error = ["error", str(run), "--anchors", "5", "--checkpoints", "1", "--json"]
    for named in (address, str(listed)):
        held_out = re.sub(r"retrieval: .*", f"retrieval: ['{named}']", settings.replace(str(shards), named))
        (run / "settings.yaml").write_text(held_out)
        curve = ["merge", str(runs["clip"].path), str(run), "--curve"]
        for arguments in (error, ["eval", str(run)], curve):
            assert main(arguments) == 2
            told = capsys.readouterr().err
            assert told.startswith(f"neuclip: {server.url}/00000.tar: is not fetched") and told.count("\n") == 1
            assert f"the settings of {run} name it; set HF_HUB_OFFLINE=0 for this command" in told
    assert not server.got
    assert main(["eval", str(run), "--retrieval", f"mine={address}", "--json"]) == 0
    by_flag = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert main(["eval", str(run), "--json"]) == 0
    allowed = json.loads(capsys.readouterr().out)
    assert by_flag["mine.image_to_text_median_rank"] == allowed[f"{listed}.image_to_text_median_rank"]
    assert main(error) == 0 and server.got
    assert json.loads(capsys.readouterr().out)["runs"][0]["mean"]["method"] > 0
