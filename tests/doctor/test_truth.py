"""What doctor says is true: where it says ready training starts, where it does not training fails, and its remedies,
followed, remove what they are given for."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from neuclip import api
from neuclip.doctor import plan, resources
from neuclip.doctor.diagnosis import examine
from neuclip.doctor.findings import Advice, Findings
from neuclip.doctor.resources import Memory
from neuclip.errors import RunFailed, UserError
from neuclip.settings.reading import read_settings
from tests.data.small_shards import pair, write_tar
from tests.images import write_shard, write_shards

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
    (place / "runs" / "taken").mkdir(parents=True)
    return place


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def asked(flags: str):
    return read_settings(None, ["--data.train", "shapes", *SHORT, *flags.split()])


@pytest.mark.parametrize("flags", FAILING)
def test_where_training_fails_doctor_is_not_ready(here, flags):
    if "wandb" in flags and find_spec("wandb"):
        pytest.skip("wandb is installed")
    findings, _ = examine(asked(flags))
    assert not findings.ready
    with pytest.raises((UserError, RunFailed, OSError)):
        api.train(asked(flags))


def test_where_doctor_is_ready_training_starts(here, capsys):
    flags = "--evaluation.retrieval spoilt --data.max_bad_share 0.2 --train.micro_batch_size 3"
    findings, _ = examine(asked(flags))
    assert findings.ready
    assert (api.train(asked(flags)) / "summary.json").is_file()


def advice_of(findings: Findings) -> list[Advice]:
    return findings.problems + findings.warnings


def ways(remedy: str) -> list[list[str]]:
    """The flags of each alternative: one `--flag value`, or several that stand together."""
    found = [re.findall(r"(--[a-z_.]+) ([\w./-]+)", way) for way in remedy.split(", or ")]
    words = ("DATA", "a", "the", "or")  # "--model.name a model with a longer context" is nothing to follow
    return [[part for flag in flags for part in flag] for flags in found if flags and flags[0][1] not in words]


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
def test_every_remedy_removes_what_it_is_given_for(here, data, flags, ranks):
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


def test_prototypes_have_one_figure_however_much_is_wrong_with_their_number(here):
    advices = advice_of(examine(asked("--train.samples 32 --objective.num_prototypes 4096"))[0])
    figures = [remedy for _, _, remedy in advices if "num_prototypes" in remedy]
    assert len(figures) == 2 and len(set(figures)) == 1


def test_of_all_bad_data_no_allowed_share_is_offered(here):
    write_shard(here / "bad.tar", range(20), spoilt=range(20))
    for data in ("bad.tar", "hollow"):
        problems = examine(read_settings(None, ["--data.train", data, *SHORT]))[0].problems
        assert len(problems) == 1 and "max_bad_share" not in problems[0].remedy


def test_cores_are_counted_over_all_processes(here, monkeypatch):
    monkeypatch.setattr(plan, "available_cores", lambda: 8)
    for ranks, workers, warned in ((1, 8, False), (1, 9, True), (4, 2, False), (4, 3, True)):
        findings = examine(asked(f"--data.workers {workers} --train.batch_size 8"), ranks=ranks, sample=5)[0]
        told = [what for what, _, _ in findings.warnings if "cores" in what]
        assert bool(told) == warned
        assert all(f"if all {ranks} ranks are on this machine" in what for what in told if ranks > 1)


def test_recall_on_the_training_data_is_not_taken_for_held_out(here):
    for address in ("shapes", f"{here}/shapes/00000.tar", "shapes/*.tar"):
        told = [str(advice) for advice in examine(asked(f"--evaluation.retrieval {address}"), sample=5)[0].warnings]
        assert any("is both training data" in text for text in told)
    told = [str(advice) for advice in examine(asked("--evaluation.retrieval spoilt"), sample=5)[0].warnings]
    assert not any("is both training data" in text or "no held-out data" in text for text in told)


def test_a_look_leaves_nothing_in_the_folder_of_runs(here):
    before = sorted(Path("runs").iterdir())
    examine(asked(""), sample=5)
    assert sorted(Path("runs").iterdir()) == before
