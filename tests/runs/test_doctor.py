"""What doctor says is true: where it is ready, training starts with these numbers; where not, training fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import RunFailed, UserError
from neuclip.records import RunFolder, read_lines
from neuclip.runs.doctor import examine
from neuclip.settings.objectives import OBJECTIVES
from neuclip.settings.reading import read_settings
from tests.builders.data import pair, write_tar
from tests.builders.images import write_shard, write_shards
from tests.builders.models import NORMS_FILE

SHORT = f"""--model.name {NORMS_FILE} --train.batch_size 8 --train.samples 16 --data.workers 0 --run.threads 1
    --evaluation.error_anchors 0 --evaluation.every 0 --log.every 1""".split()
FAILING = {  # flags: a part of what both say
    "--train.batch_size 1": "has BatchNorm, which cannot train on one image at a time; give --train.batch_size 2 or",
    "--train.micro_batch_size 1": "give --train.micro_batch_size 2 or more",
    "--train.batch_size 3 --train.micro_batch_size 2": "give --train.micro_batch_size 3 or more",  # cut into 2 and 1
    "--train.batch_size 41 --train.samples 41": "is larger than the data set (40 samples",
    "--evaluation.retrieval empty": "empty",
    "--evaluation.retrieval nowhere": "nowhere: no such file",
    "--evaluation.retrieval auto,shapes": "auto",
    "--evaluation.zero_shot shapes": "shapes",
    "--evaluation.zero_shot nowhere": "nowhere",
    "--run.folder file": "file: cannot be written (Not a directory); give another --run.folder",
    "--run.folder file/runs": "runs: cannot be written (Not a directory); give another --run.folder",
    "--run.folder /proc/runs": "/proc/runs: cannot be written (No such file or directory); give another --run.folder",
    f"--run.folder {'long/' * 1000}": "cannot be written (File name too long); give another --run.folder",
    f"--run.name {'n' * 300}": "cannot be written (File name too long); give another",
    "--run.name taken": "taken exists; give another --run.name, or continue it",
    "--run.name ../x": "is a path; give --run.name x and its folder as --run.folder",
    "--run.name ..": "is a path; give --run.name NAME and its folder as --run.folder",
    "--run.precision fp16 --run.device cpu": "fp16",
    "--checkpoint.keep 1000000": "the disk is too full: 1,000,001 checkpoints and the model need",
    "--data.max_bad_share 0 --data.train spoilt": "--data.max_bad_share",
    "--data.max_bad_share 1 --data.train hollow": "no replacement found",
    "--data.train halves": "60 of 120 pairs (at least) could not be indexed (50.0%",
    "--data.train single --train.batch_size 1": "has one sample, but a contrastive loss compares samples",
    "--data.train nowhere": "nowhere: no such file",
    "--data.train=": "data.train is not set; give --data.train icons-30k",
    "--model.name tinny": "did you mean tiny?",
    "--model.name gone.json": "gone.json",
}
STARTS = ("--data.max_bad_share",)  # what shows only when the data are read


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """40 good pairs; 40 with three bad ones; 200 of which the last 150 are bad; 120 captions, half of them without an
    image."""
    place = tmp_path_factory.mktemp("truth")
    write_shards(place / "shapes", 40, shards=2)
    write_shards(place / "single", 1, shards=1)
    write_shards(place / "twice", 100, shards=1)  # 48 different captions
    write_shards(place / "spoilt", 40, shards=2, spoilt=range(5, 8))
    write_shards(place / "hollow", 200, shards=1, spoilt=range(50, 200))
    alone = [(f"{number}.txt", b"alone") for number in range(100, 160)]
    write_tar(place / "halves" / "0.tar", [member for number in range(60) for member in pair(number)] + alone)
    (place / "empty").mkdir()
    (place / "file").touch()
    (place / "runs" / "taken" / "checkpoints").mkdir(parents=True)
    return place


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def settings_with(flags: str = "", data: str = "shapes"):
    return read_settings(None, ["--data.train", data, *SHORT, *flags.split()])


@pytest.mark.parametrize("flags", FAILING, ids=lambda flags: flags[:60])
def test_where_training_fails_doctor_is_not_ready_and_reports_the_same_error(flags, here):
    """In one line, with a remedy; and before training starts there is no folder."""
    problems, before = examine(settings_with(flags)).problems, {*here.rglob("*")}
    assert any(FAILING[flags] in problem for problem in problems), problems
    assert all("\n" not in problem and "; " in problem for problem in problems)
    with pytest.raises((UserError, RunFailed)) as refused:
        api.train(settings_with(flags))
    if not flags.startswith(STARTS):
        texts = str(refused.value), "\n".join(problems)
        error, lines = (re.sub(r"has [\d.]+ GB", "has room", text) for text in texts)
        assert error in lines.splitlines() and {*here.rglob("*")} == before  # other tests fill the disk meanwhile


def test_a_problem_does_not_stop_the_examination_of_later_stages():
    flags = "--run.name taken --evaluation.retrieval nowhere --train.micro_batch_size 1"
    assert len(examine(settings_with(flags)).problems) == 3


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "drrho"])  # there without its reference
def test_the_loss_of_its_step_is_the_first_record_of_the_run(objective, tmp_path):
    flags = f"--objective {objective} --run.folder {tmp_path} --train.micro_batch_size 3"
    found = examine(settings_with(flags))
    assert found.ready and list(tmp_path.iterdir()) == []
    first = read_lines(RunFolder(api.train(settings_with(flags))).records)[0]
    assert found.figures["step.loss"] == first["loss"]
    assert found.figures["step.pairs"] == 8


def test_locked_towers_too_though_the_run_reads_stored_features(tmp_path):
    flags = f"--model.image_tower locked --model.text_tower locked --data.crop_scale 1,1 --run.folder {tmp_path}"
    found = examine(settings_with(f"{flags} --train.samples 96"))
    run = RunFolder(api.train(settings_with(f"{flags} --train.samples 96")))
    assert json.loads(run.summary.read_text())["stored_features"] == ["image", "text"]
    assert found.figures["step.loss"] == read_lines(run.records)[0]["loss"]


def test_the_plan_is_that_of_the_run(tmp_path):
    flags = f"--train.samples 36 --optimizer.warmup 0.5 --run.folder {tmp_path} --evaluation.retrieval spoilt"
    found = examine(settings_with(f"{flags} --data.max_bad_share 0.2"))
    run = RunFolder(api.train(settings_with(f"{flags} --data.max_bad_share 0.2")))
    rates = [record["learning_rate"] for record in read_lines(run.records)]
    assert len(rates) == found.figures["plan.steps"] == 4
    assert rates.index(max(rates)) + 1 == found.figures["plan.warmup_steps"] == 2
    assert found.figures["plan.held_out"] == 1
    assert any("4 steps of 8, to 32 samples (0.8 epochs)" in line for line in found.lines)
    # Two checkpoints stay, there are three while the last is written; from the second on they have AdamW's moments.
    checkpoint, model = (max(f.stat().st_size for f in folder.iterdir()) for folder in (run.checkpoints, run.model))
    assert found.figures["plan.disk_bytes"] == pytest.approx(3 * checkpoint + model, rel=0.02)


def test_several_ranks_share_the_batch_and_one_that_cannot_be_shared_is_refused():
    assert examine(settings_with(), ranks=4).figures["step.pairs"] == 2
    assert "--train.batch_size 6 or 9" in examine(settings_with(), ranks=3).problems[0]


WARNINGS = {  # data and flags: what is warned of
    ("shapes", "--train.samples 24"): "of the data",
    ("shapes", "--optimizer.warmup 5000"): "warm-up of 5,000 steps",
    ("shapes", "--optimizer.warmup 8 --train.samples 96"): "warm-up of 8 steps in a run of 12",
    ("shapes", "--temperature.learning_rate 1e-6"): "the temperature can only fall from",
    ("shapes", "--temperature.minimum 0.07"): "the temperature starts at its minimum 0.07",
    ("shapes", "--objective.rho 9"): "rho 9 is above",
    ("shapes", "--objective fastclip --train.samples 40"): "seen 1.0 times",
    ("shapes", "--objective amorlip --train.samples 40"): "first epoch",
    ("shapes", "--objective.num_prototypes 4096"): "4,096 prototypes",
    ("shapes", "--data.workers 64"): "64 workers on",
    ("shapes", "--model.image_size 96"): "smaller than the model's 96 pixels",
    ("twice", "--train.batch_size 40 --train.samples 240"): "share their caption",
    ("shapes", ""): "there is no held-out data",
    ("shapes", "--evaluation.retrieval shapes"): "names the training data",
    ("shapes", "--evaluation.retrieval x=shapes --data.hold_out 5"): "names the training data",
    ("spoilt", "--data.max_bad_share 0.5"): "of the pairs read are bad",
}


@pytest.mark.parametrize(("data", "flags"), WARNINGS)
def test_a_warning_is_given_and_its_remedy_removes_it(data, flags):
    expected = WARNINGS[data, flags]
    found = [advice for advice in examine(settings_with(flags, data)).warnings if expected in advice[0]]
    assert found, expected
    _, why, remedy = found[0]
    for way in remedy.split(", or "):
        given = re.findall(r"(--[a-z_.]+ [\w.-]+)", way)
        if given and "DATA" not in way:
            left = examine(settings_with(f"{flags} {' '.join(given)}", data)).warnings
            assert why not in [advice[1] for advice in left], way


def test_a_sound_run_gets_no_warning():
    flags = """--evaluation.retrieval spoilt --data.max_bad_share 0.2 --objective clip --train.samples 400
        --temperature.learning_rate 0.01 --model.image_size 32 --objective.mask_duplicates true"""
    assert examine(settings_with(flags)).warnings == []


def test_json_has_stable_flat_keys_and_nothing_else_is_on_stdout(capsys):
    assert main(["doctor", "shapes", *SHORT, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {key.partition(".")[0] for key in printed} == {
        *("ready", "problems", "warnings", "plan", "data", "model", "read", "pairs", "captions", "step")
    }
    assert printed["data.pairs"] == 40 and set(printed["warnings"][0]) == {"what", "why", "remedy"}


def test_lines_fit_the_terminal_and_the_last_one_is_the_verdict(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["doctor", "shapes", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready" and max(map(len, lines)) <= 90 + len(str(Path.cwd()))
    assert main(["doctor", "shapes", *SHORT, "--train.batch_size", "50", "--train.samples", "50"]) == 1
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "not ready" and "give --train.batch_size 40 or less" in " ".join(map(str.strip, lines))


def test_the_page_shows_the_stored_pairs_and_follows_no_link(tmp_path, capsys):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "page.html").symlink_to(tmp_path / "victim")
    assert main(["doctor", "spoilt", *SHORT, "--data.max_bad_share", "0.5", "--page", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert 21 <= page.count("data:image/") <= 24
    assert "a orange circle" in page and "of the pairs read are bad" in page
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_larger_share_of_bad_pairs_is_not_proposed_where_no_replacement_exists(tmp_path):
    write_shard(tmp_path / "bad.tar", range(20), spoilt=range(20))
    problems = examine(settings_with("--data.max_bad_share 1", str(tmp_path / "bad.tar"))).problems
    assert len(problems) == 1 and "max_bad_share" not in problems[0]
