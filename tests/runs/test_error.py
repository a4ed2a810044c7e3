"""`neuclip error` on real runs: at equal anchors, eps and samples seen, and on the way; the checkpoints it needs."""

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
from neuclip.runs.folder import checkpoints_in, samples_at
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.builders.images import write_shards
from tests.builders.processes import main_killed_at_write
from tests.builders.runs import BATCH, summary

pytestmark = pytest.mark.slow

CLIP = ["--objective", "clip", "--objective.eps", "1e-4", "--train.batch_size", "12"]
THIRDS = ["--checkpoint.milestones", "3", "--checkpoint.every_samples", "0", "--checkpoint.keep", "1"]
ANCHORS = ["--evaluation.error_anchors", "20"]


@pytest.fixture(scope="module")
def runs(small_settings, tmp_path_factory) -> list[RunFolder]:
    """Two methods, two batch sizes, two eps, one budget."""
    folder = tmp_path_factory.mktemp("methods")
    return [
        RunFolder(api.train(small_settings(folder, "--run.name", name, *THIRDS, *ANCHORS, *more)))
        for name, more in (("neuclip", []), ("clip", CLIP))
    ]


def samples_of(folder: RunFolder) -> list[int]:
    return [samples_at(path) for path in checkpoints_in(folder)]


def test_milestones_are_the_first_steps_past_equal_parts_of_the_budget_also_of_a_killed_run(
    runs, small_settings, tmp_path
):
    assert [samples_of(run) for run in runs] == [[32, 64, 96], [36, 72, 96]]
    settings = small_settings(tmp_path, "--run.name", "killed", *THIRDS)
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    child = main_killed_at_write(f"samples-{64:012d}", ["train", str(tmp_path / "settings.yaml")])
    assert child.code == -signal.SIGKILL, child.errors
    folder = RunFolder(tmp_path / "killed")
    assert samples_of(folder) == [32]
    api.train(read_settings(folder.settings), resume=folder.path)
    assert samples_of(folder) == [32, 64, 96]


def test_runs_are_measured_with_one_eps_at_the_same_samples_and_the_mean_is_over_them(runs):
    found = api.normalizer_errors([run.path for run in runs], anchors=20, seed=0, checkpoints=100)
    assert found["eps"] == 1e-4 and [run["own_eps"] for run in found["runs"]] == [1e-6, 1e-4]
    for run, samples in zip(found["runs"], ([32, 64, 96], [36, 72, 96]), strict=True):
        assert [at["samples"] for at in run["checkpoints"]] == samples
        assert all(at["eps"] == 1e-4 and at["anchors"] == 20 for at in run["checkpoints"])
        errors = [at["estimators"]["method"]["mean"] for at in run["checkpoints"]]
        assert run["mean"]["method"] == pytest.approx(sum(errors) / 3) and len(set(errors)) == 3
    # Of the same anchors.
    assert len({at["duplicates"] for run in found["runs"] for at in run["checkpoints"]}) == 1
    fewer = api.normalizer_errors([runs[0].path], anchors=5, seed=0, checkpoints=2)
    assert [at["samples"] for at in fewer["runs"][0]["checkpoints"]] == [32, 96]


def test_the_figure_of_the_summary_is_that_of_the_last_checkpoint(runs):
    for run, eps in zip(runs, (1e-6, 1e-4), strict=True):
        own = summary(run.path)["normalizer_error"]
        found = api.normalizer_errors([run.path], anchors=20, seed=0, checkpoints=1)
        (last,) = found["runs"][0]["checkpoints"]
        assert own["eps"] == found["eps"] == eps
        for name in ("method", "minibatch"):
            assert own["estimators"][name] == pytest.approx(last["estimators"][name], rel=1e-4)


def test_every_evaluation_after_the_first_step_has_the_error_with_the_held_out_figures(train, shards):
    every = ["--evaluation.every", str(4 * BATCH), "--evaluation.at_start", "true", "--evaluation.retrieval"]
    run = train(*ANCHORS, *every, str(shards))
    lines, last = read_lines(run.evaluation), summary(run.path)["normalizer_error"]["estimators"]
    assert [line["samples"] for line in lines] == [0, 32, 64, 96]
    assert [{key for key in line if "error" in key} for line in lines] == [
        set(),
        *[{"normalizer_error.method", "normalizer_error.minibatch"}] * 3,
    ]
    assert all("image_to_text_recall_at_1" in " ".join(line) for line in lines)
    assert all(lines[-1][f"normalizer_error.{name}"] == errors["mean"] for name, errors in last.items())
    (only,) = read_lines(train(*ANCHORS, "--run.name", "siglip", "--objective", "siglip").evaluation)
    assert "normalizer_error.minibatch" in only and "normalizer_error.method" not in only  # SigLIP estimates none
    assert "normalizer_error" not in train("--run.name", "never", *every, str(shards)).evaluation.read_text()


def test_the_command_prints_the_definition_the_eps_and_a_judgement_per_run(runs, capsys):
    names = [str(run.path) for run in runs]
    assert main(["error", *names, "--anchors", "20", "--checkpoints", "4", "--eps", "1e-5"]) == 0
    text, stderr = capsys.readouterr()
    assert text.startswith("mean over anchors of (log estimate - log exact normalizer)^2")
    assert "eps 1e-5 for all; 20 anchors (seed 0)" in text and "(trained with eps 1e-6)\n" in text
    assert f"{names[1]}, clip, batch 12: the error is as large as a mini-batch's (trained with eps 1e-4)\n" in text
    assert max(map(len, text.splitlines())) < 120 + len(names[0]) and "measured 3 of 4 checkpoints" in stderr


def test_runs_that_cannot_be_compared_are_refused_in_one_line(runs, train, tmp_path, capsys):
    other = train("--data.train", str(write_shards(tmp_path / "data", 30)), "--train.samples", str(BATCH)).path
    short = train("--run.name", "short", "--train.samples", str(BATCH)).path
    for folder, message in (
        (other, r"trained on different data \(40 and 30 samples, or other captions\)"),
        (short, r"no checkpoints at equal numbers .* has 32, 64, 96; .* has 8; train with"),
    ):
        with pytest.raises(UserError, match=message):
            api.normalizer_errors([runs[0].path, folder], anchors=5, seed=0)
    assert main(["error", str(short), f"{short}/"]) == 2
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
    run = shutil.copytree(runs[1].path, tmp_path / "stranger")
    settings = (run / "settings.yaml").read_text()
    error = ["error", str(run), "--anchors", "5", "--checkpoints", "1", "--json"]
    for named in (address, str(listed)):
        held_out = re.sub(r"retrieval: .*", f"retrieval: ['{named}']", settings.replace(str(shards), named))
        (run / "settings.yaml").write_text(held_out)
        for arguments in (error, ["eval", str(run)], ["merge", str(runs[1].path), str(run), "--curve"]):
            assert main(arguments) == 2
            stderr = capsys.readouterr().err
            assert stderr.startswith(f"neuclip: {server.url}/00000.tar: is not fetched") and stderr.count("\n") == 1
            assert f"the settings of {run} name it; set HF_HUB_OFFLINE=0 for this command" in stderr
    assert not server.got
    assert main(["eval", str(run), "--retrieval", f"mine={address}", "--json"]) == 0
    by_flag = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert main(["eval", str(run), "--json"]) == 0
    allowed = json.loads(capsys.readouterr().out)
    assert by_flag["mine.image_to_text_median_rank"] == allowed[f"{listed}.image_to_text_median_rank"]
    assert main(error) == 0 and server.got
    assert json.loads(capsys.readouterr().out)["runs"][0]["mean"]["method"] > 0
