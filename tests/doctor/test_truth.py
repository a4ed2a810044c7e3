"""What doctor says is true: training starts if it says ready and fails if not, with the numbers of its plan; its
remedies work when they are followed."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from neuclip import api
from neuclip.doctor import resources
from neuclip.doctor.diagnosis import examine
from neuclip.doctor.findings import Advice, Findings
from neuclip.doctor.resources import Memory
from neuclip.errors import RunFailed, UserError
from neuclip.records import RunFolder, read_lines
from neuclip.settings.reading import read_settings
from tests.builders.data import pair, write_tar
from tests.builders.images import write_shard, write_shards

SHORT = ["--train.batch_size", "8", "--train.samples", "16", "--data.workers", "0", "--evaluation.error_anchors", "0"]
FAILING = [
    "--train.batch_size 1",
    "--train.micro_batch_size 1",
    "--train.batch_size 41 --train.samples 41",
    "--evaluation.retrieval empty",
    "--evaluation.retrieval nowhere",
    "--evaluation.retrieval auto,shapes",
    "--evaluation.zero_shot shapes",
    "--evaluation.zero_shot nowhere",
    "--run.folder file",
    "--run.folder file/runs",
    "--run.name taken",
    "--run.precision fp16 --run.device cpu",
    "--log.wandb true",
    "--data.max_bad_share 0 --data.train spoilt",
    "--data.max_bad_share 1 --data.train hollow",
    "--data.train halves",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """40 good pairs; 40 with three bad ones; 200 of which the last 150 are bad; 120 captions, half of them
    without an image."""
    place = tmp_path_factory.mktemp("truth")
    write_shards(place / "shapes", 40, shards=2)
    write_shards(place / "spoilt", 40, shards=2, spoilt=range(5, 8))
    write_shards(place / "hollow", 200, shards=1, spoilt=range(50, 200))
    alone = [(f"{number}.txt", b"alone") for number in range(100, 160)]
    write_tar(place / "halves" / "0.tar", [member for number in range(60) for member in pair(number)] + alone)
    (place / "empty").mkdir()
    (place / "file").touch()
    (place / "runs" / "taken" / "checkpoints").mkdir(parents=True)
    return place


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def settings_with(flags: str):
    return read_settings(None, ["--data.train", "shapes", *SHORT, *flags.split()])


@pytest.mark.parametrize("flags", FAILING)
def test_where_training_fails_doctor_is_not_ready(here, flags):
    if "wandb" in flags and find_spec("wandb"):
        pytest.skip("wandb is installed")
    findings, _ = examine(settings_with(flags))
    assert not findings.ready
    with pytest.raises((UserError, RunFailed, OSError)):
        api.train(settings_with(flags))


def test_where_doctor_is_ready_training_starts_and_has_the_numbers_of_the_plan(here, capsys):
    flags = "--evaluation.retrieval spoilt --data.max_bad_share 0.2 --train.micro_batch_size 3 --train.samples 36"
    flags += " --optimizer.warmup 0.5 --log.every 1"
    findings, _ = examine(settings_with(flags))
    assert findings.ready
    run = RunFolder(api.train(settings_with(flags)))
    summary, environment = (json.loads(file.read_text()) for file in (run.summary, run.environment))
    assert summary["samples_seen"] == findings["plan.samples"] == 32
    rates = [record["learning_rate"] for record in read_lines(run.records)]
    assert len(rates) == findings["plan.steps"] and rates.index(max(rates)) + 1 == findings["plan.warmup_steps"] == 2
    assert environment["device"] == findings["memory.device"]
    assert environment["precision"] == findings["memory.precision"]
    last = max(run.checkpoints.iterdir())
    assert last.stat().st_size == pytest.approx(findings["disk.checkpoint_bytes"], rel=0.01)


def advice_of(findings: Findings) -> list[Advice]:
    return findings.problems + findings.warnings


def ways(remedy: str) -> list[list[str]]:
    """The flags of each alternative: one `--flag value`, or several that stand together."""
    flags_of_ways = [re.findall(r"(--[a-z_.]+) ([\w./-]+)", way) for way in remedy.split(", or ")]
    words = ("DATA", "a", "the", "or")  # "--model.name a model with a longer context" is nothing to follow
    return [[part for flag in flags for part in flag] for flags in flags_of_ways if flags and flags[0][1] not in words]


SITUATIONS = [
    ("shapes", "--train.samples 20", 1),
    ("shapes", "--train.batch_size 16 --train.samples 32 --objective.num_prototypes 4096", 1),
    ("shapes", "--train.batch_size 50 --train.samples 50", 1),
    ("shapes", "--train.batch_size 50 --train.samples 50", 3),
    ("shapes", "--train.batch_size 16 --train.samples 160", 3),
    ("shapes", "--train.batch_size 1 --train.samples 4", 1),
    ("shapes", "--train.batch_size 2 --train.samples 400", 2),
    ("shapes", "--train.batch_size 3 --train.micro_batch_size 2", 1),
    ("shapes", "--train.samples 800 --objective.restart_every 500 --objective.num_prototypes 20", 1),
    ("shapes", "--optimizer.warmup 5000 --temperature.learning_rate 1e-6", 1),
    ("shapes", "--objective fastclip --train.samples 40", 1),
    ("shapes", "--objective amorlip --train.samples 40", 1),
    ("shapes", "--objective.rho 9", 1),
    ("shapes", "--data.workers 64", 1),
    ("shapes", "--data.workers 64", 4),
    ("shapes", "--model.image_size 96", 1),
    ("spoilt", "--data.max_bad_share 0.01 --train.samples 4000", 1),
    ("hollow", "", 1),
]


@pytest.mark.parametrize(("data", "flags", "ranks"), SITUATIONS)
def test_a_remedy_that_is_followed_removes_its_warning_or_problem(here, data, flags, ranks):
    given = ["--data.train", data, *SHORT, *flags.split()]
    advices = advice_of(examine(read_settings(None, given), ranks=ranks, sample=40)[0])
    assert advices
    for advice in advices:
        for way in ways(advice.remedy):
            left = advice_of(examine(read_settings(None, [*given, *way]), ranks=ranks, sample=40)[0])
            assert advice.why not in [other.why for other in left], (advice, way)


@pytest.mark.parametrize("model", ["tiny", "ViT-B-32"])
@pytest.mark.parametrize("gigabytes", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2])
def test_remedies_against_running_out_of_memory_make_the_run_fit(here, monkeypatch, model, gigabytes, ranks):
    monkeypatch.setattr(resources, "available_memory", lambda device: Memory(gigabytes * 10**9, gigabytes * 10**9))
    given = ["--data.train", "hollow", "--model.name", model, "--train.batch_size", "180", "--train.samples", "9000"]
    if model == "tiny":
        given += ["--model.image_size", "224"]
    findings = examine(read_settings(None, given), ranks=ranks, sample=5)[0]
    for advice in [one for one in advice_of(findings) if "run out of memory" in one.why]:
        assert ways(advice.remedy) or "not even the smallest forward pass fits" in advice.remedy
        for way in ways(advice.remedy):
            left = advice_of(examine(read_settings(None, [*given, *way]), ranks=ranks, sample=5)[0])
            assert advice.why not in [other.why for other in left], (advice, way)


def test_all_advice_on_the_number_of_prototypes_gives_the_same_number(here):
    advices = advice_of(examine(settings_with("--train.samples 32 --objective.num_prototypes 4096"))[0])
    figures = [remedy for _, _, remedy in advices if "num_prototypes" in remedy]
    assert len(figures) == 2 and len(set(figures)) == 1


def test_a_larger_share_of_bad_pairs_is_not_proposed_where_no_replacement_exists(here):
    write_shard(here / "bad.tar", range(20), spoilt=range(20))
    for data in ("bad.tar", "hollow"):
        problems = examine(read_settings(None, ["--data.train", data, *SHORT]))[0].problems
        assert len(problems) == 1 and "max_bad_share" not in problems[0].remedy


def test_recall_on_the_training_data_is_warned_of(here):
    for address in ("shapes", "shapes/*.tar", f"copy={here}/shapes"):
        warnings = examine(settings_with(f"--evaluation.retrieval {address}"), sample=5)[0].warnings
        assert any("is both training data" in warning.what for warning in warnings)
    warnings = examine(settings_with("--evaluation.retrieval spoilt"), sample=5)[0].warnings
    assert not any("training data" in warning.what or "held-out data" in warning.what for warning in warnings)


def test_doctor_leaves_nothing_in_the_folder_of_runs(here):
    before = sorted(Path("runs").iterdir())
    examine(settings_with(""), sample=5)
    assert sorted(Path("runs").iterdir()) == before


def test_of_locked_weights_a_checkpoint_has_no_moments_as_doctor_says(here):
    flags = "--model.image_tower locked --model.text_tower locked --run.name locked"
    findings, _ = examine(settings_with(flags))
    last = max(RunFolder(api.train(settings_with(flags))).checkpoints.iterdir())
    assert last.stat().st_size == pytest.approx(findings["disk.checkpoint_bytes"], rel=0.01)
