"""Whatever ends a run, it continues to the same bits: kills at every write, signals, full disks, damaged files. What
cannot continue is refused in one line that says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.files import UNFINISHED
from neuclip.records import RunFolder, read_lines
from neuclip.runs import results
from neuclip.runs.folder import checkpoint_name, checkpoints_in, load_checkpoint
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.builders import processes
from tests.builders.images import write_shards
from tests.builders.models import SMALL_FILE
from tests.builders.processes import main_killed_at_write, of_rank, on_ranks, rank_variables
from tests.builders.runs import BATCH, STEPS, losses

pytestmark = pytest.mark.slow
ON_THE_WAY = ["--evaluation.every", str(5 * BATCH)]


@pytest.fixture
def settings_file(small_settings, shards, tmp_path):
    """Of a run below `runs`, by its name; it is evaluated on the way."""

    def write(name: str, *flags: str) -> Path:
        flags = ("--run.name", name, "--evaluation.retrieval", str(shards), *ON_THE_WAY, *flags)
        (tmp_path / "settings.yaml").write_text(settings_as_yaml(small_settings(tmp_path / "runs", *flags)))
        return tmp_path / "settings.yaml"

    return write


def assert_same_run(one: Path, other: Path) -> None:
    """Losses, figures and weights, to the bit."""
    assert losses(one) == losses(other)
    assert read_lines(RunFolder(one).evaluation) == read_lines(RunFolder(other).evaluation)
    first, second = (load_checkpoint(checkpoints_in(RunFolder(run))[-1])["model"] for run in (one, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads(RunFolder(one).summary.read_text())["samples_seen"] == STEPS * BATCH


def test_killed_at_every_write_and_started_again_it_is_the_same_run_to_the_bit(settings_file, tmp_path):
    settings = read_settings(settings_file("whole"))
    whole, number = api.train(settings), 0
    while True:
        number += 1
        file = settings_file(f"killed-{number}")
        child = main_killed_at_write(number, ["train", str(file)])
        if child.code != -signal.SIGKILL:
            break
        run = api.train(read_settings(file), resume="auto")
        assert_same_run(run, whole)
        assert not [path for path in (run / "checkpoints").iterdir() if path.name.endswith(UNFINISHED)]
        shutil.rmtree(run)
    assert child.code == 0 and number > 15, child.errors


def ranks_killed_at_write(number: int, arguments: list[str]) -> int:
    """Rank 0 kills all ranks within its `number`-th write, as a machine that loses power does."""
    (here := Path(os.environ["PIDS"]) / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "0":
        kill = os.kill

        def kill_all(*_) -> None:
            kill(int((here.parent / "1").read_text()), signal.SIGKILL)
            kill(os.getpid(), signal.SIGKILL)

        os.kill = kill_all
        return processes._killed_at_write(number, arguments)
    return main(arguments)


def test_two_ranks_killed_at_every_write_continue_to_the_bit(settings_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path))
    train = ["train", str(settings_file("whole", "--model.name", str(SMALL_FILE)))]
    assert [rank.code for rank in on_ranks(2, main, train)] == [0, 0]
    for number in count(1):
        file = settings_file(f"killed-{number}", "--model.name", str(SMALL_FILE))
        codes = [rank.code for rank in on_ranks(2, ranks_killed_at_write, number, ["train", str(file)])]
        if codes == [0, 0]:
            break
        assert codes == [-signal.SIGKILL] * 2
        ended = on_ranks(2, train_again, file)
        assert [rank.code for rank in ended] == [0, 0], ended[0].errors
        assert_same_run(run := tmp_path / "runs" / f"killed-{number}", tmp_path / "runs" / "whole")
        shutil.rmtree(run)
    assert number > 15


def train_again(file: Path) -> None:
    api.train(read_settings(file), resume="auto")


DIES_TWICE = """
import os, signal, sys
from neuclip.cli.main import main
from neuclip.training import loop
take_step, deaths = loop.take_step, {"0": 4, "1": 7}
def die(run, *rest):
    if run.step == deaths.get(os.environ["TORCHELASTIC_RESTART_COUNT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(run, *rest)
loop.take_step = die
sys.exit(main(["train", sys.argv[1]]))
"""


def test_a_run_without_a_name_that_torchrun_restarts_twice_goes_on_from_its_last_checkpoint(
    finished, settings_file, tmp_path
):
    (tmp_path / "dies.py").write_text(DIES_TWICE)
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=3", *rendezvous]
    ended = subprocess.run([*torchrun, str(tmp_path / "dies.py"), settings_file("")], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "runs").iterdir()
    told = [f"from {step * BATCH} to {STEPS * BATCH} samples" in ended.stderr for step in (3, 6)]
    assert told == [True, True] and losses(run) == losses(finished.path)


def test_an_attempt_that_torchrun_restarts_finds_its_run_wherever_the_one_before_was_killed(
    finished, settings_file, tmp_path, monkeypatch
):
    """Also within the folder's making, and while a resumed attempt tidies up and signs the lock."""
    for name, value in (rank_variables(1) | of_rank(0) | {"TORCHELASTIC_RUN_ID": "job"}).items():
        monkeypatch.setenv(name, value)
    train = ["train", str(settings_file(""))]
    for attempt, number in enumerate((3, 5, 1, 2, 3, 4)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        assert main_killed_at_write(number, train).code == -signal.SIGKILL
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "9")
    ended = processes.run(main, train)
    assert ended.code == 0, ended.errors
    (run,) = (tmp_path / "runs").glob("[!.]*")
    assert losses(run) == losses(finished.path)


def test_auto_starts_a_run_continues_it_and_leaves_a_finished_one_as_it_is(finished, settings_file):
    file = settings_file("again")
    run = api.train(read_settings(file), resume="auto")
    for path in checkpoints_in(RunFolder(run))[1:]:
        path.unlink()
    for _ in range(2):
        assert main(["train", str(file), "--resume", "auto"]) == 0
        assert losses(run) == losses(finished.path)
        assert [line["samples"] for line in read_lines(RunFolder(run).evaluation)] == [40, 80, 96]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_asked_to_stop_it_saves_and_can_go_on(finished, small_settings, tmp_path, monkeypatch, number):
    settings = small_settings(tmp_path, "--run.name", "stopped", "--evaluation.every", str(4 * BATCH))
    monkeypatch.setattr(results, "evaluate_on_the_way", lambda run, sets: signal.raise_signal(number))

    def before(*_: object) -> None:
        """A handler that somebody else set."""

    handler = signal.signal(number, before)  # below nohup SIGHUP is ignored, and would stay so
    with pytest.raises(RunInterrupted, match=r"stopped and saved at 32 of 96 .*--resume") as stopped:
        api.train(settings)
    monkeypatch.undo()
    assert stopped.value.exit_code == 128 + number and signal.signal(number, handler) == before
    folder = tmp_path / "stopped"
    # Asked during the evaluation after step 4, and no step more.
    assert load_checkpoint(checkpoints_in(RunFolder(folder))[-1])["step"] == 4
    api.train(read_settings(folder / "settings.yaml", ["--evaluation.every", "0"]), resume=folder)
    assert losses(folder) == losses(finished.path)


def test_a_disk_that_fills_up_stops_the_run_and_it_can_go_on(finished, small_settings, tmp_path, monkeypatch):
    settings, flush = small_settings(tmp_path, "--run.name", "full"), os.fsync

    def full(file: int) -> None:
        if checkpoint_name(6 * BATCH) in str(Path(f"/proc/self/fd/{file}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(file)

    monkeypatch.setattr(os, "fsync", full)
    told = r"the disk is full \(\S+ \w+ needed, .* free\); the last good checkpoint is .*024\.pt; make room, .*--resume"
    with pytest.raises(RunFailed, match=told):
        api.train(settings)
    monkeypatch.undo()
    folder = RunFolder(tmp_path / "full")
    assert [path.name for path in checkpoints_in(folder)][-1] == checkpoint_name(3 * BATCH)
    assert losses(api.train(settings, resume=folder.path)) == losses(finished.path)


@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_a_temporary_folder_without_room_is_one_line(finished, settings_file, tmp_path, monkeypatch, capsys, flags):
    import tempfile

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "_get_default_tempdir", nowhere)
    monkeypatch.setattr(tempfile, "tempdir", None)
    run = shutil.copytree(finished.path, tmp_path / "run")
    arguments = ["train", "--resume", str(run)] if flags else ["train", str(settings_file("x"))]
    code, told = main(arguments), capsys.readouterr().err
    assert code == 0 or ("TMPDIR" in told.splitlines()[-1] and "Traceback" not in told)


def damage_checkpoint(folder: RunFolder) -> Path:
    newest = checkpoints_in(folder)[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    return newest


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(finished, tmp_path, capsys):
    folder = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    newest = damage_checkpoint(folder)
    for path in (folder.records, folder.evaluation):
        path.write_bytes(path.read_bytes() + b'{"samples": 8, "lo')  # a kill cut it off
    (folder.checkpoints / f".samples-7.pt.ab{UNFINISHED}").write_bytes(b"half")
    assert main(["train", "--resume", str(folder.path)]) == 0
    told = capsys.readouterr().err
    assert f"{newest}: is damaged" in told and f"from {9 * BATCH} to {STEPS * BATCH} samples" in told
    assert losses(folder.path) == losses(finished.path)
    assert read_lines(folder.evaluation) == read_lines(finished.evaluation) and read_lines(folder.skipped) == []
    assert not list(folder.checkpoints.glob(f".*{UNFINISHED}"))
    assert newest.with_suffix(".damaged").exists() and load_checkpoint(newest)["step"] == STEPS
    for path in checkpoints_in(folder):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match="no earlier one; restore it, or start anew"):
        api.train(read_settings(folder.settings), resume=folder.path)


def without_a_key(path: Path) -> None:
    if path.suffix == ".pt":
        state = torch.load(path)
        del state["optimizer"]
        torch.save(state, path)
    elif path.suffix == ".yaml":
        path.write_text(path.read_text().replace("batch_size:", "batch_syze:"))
    elif path.suffix == ".jsonl":
        path.write_text('{"other": 1}\n')
    else:
        path.write_text("{}")


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "noise": lambda path: path.write_bytes(b"\xff\xfe\x00{]\n" * 20),
    "another kind of value": lambda path: path.write_bytes(b"[1, 2]\n7\n"),
    "nested without end": lambda path: path.write_bytes(b"[" * 100_000 + b"\n"),
    "without a key": without_a_key,
    "a folder": replaced_by_a_folder,
    "a pipe": replaced_by_a_pipe,
}
FILES = [
    *("settings.yaml", "environment.json", "records.jsonl", "evaluation.jsonl", "skipped.jsonl", "summary.json"),
    *("gallery.json", "run.lock", "checkpoints/samples-000000000096.pt", "model/open_clip_config.json", "report.html"),
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_whatever_is_wrong_with_a_file_of_a_run_is_one_line_that_names_it(
    finished, tmp_path, file, damage, capsys, monkeypatch
):
    """Or it does not matter to the command. With NEUCLIP_DEBUG=1 the original error is shown too."""
    commands = [["report"], ["train", "--resume"]]
    if file.startswith(("settings", "checkpoints")):
        commands += [["eval"], ["error", "--checkpoints", "1", "--anchors", "20"]]
    for command in commands:
        run = shutil.copytree(finished.path, tmp_path / command[0])
        DAMAGES[damage](run / file)
        code, told = main([*command, str(run)]), capsys.readouterr().err
        assert "Traceback" not in told
        if code:
            *_, last = told.splitlines()
            named = (
                file.rpartition("/")[2],
                f"no run, checkpoint or model {run}",
                f"{run} is not a run",
                f"no run at {run}",
            )
            assert last.startswith("neuclip: ") and any(name in last for name in named), last
            monkeypatch.setenv("NEUCLIP_DEBUG", "1")
            assert main([*command, str(run)]) == code
            assert "Traceback" in capsys.readouterr().err
            monkeypatch.delenv("NEUCLIP_DEBUG")


@pytest.mark.parametrize("planted", ["report.html", "records.jsonl", "evaluation.jsonl", "summary.json", "run.lock"])
def test_links_planted_in_a_run_folder_are_never_written_through(finished, tmp_path, planted, capsys):
    run = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    victim = tmp_path / "victim"
    victim.write_bytes((run.path / planted).read_bytes())
    before = victim.read_bytes()
    (run.path / planted).unlink()
    for name in (planted, f"{planted}.partial", f".{planted}{UNFINISHED}", "tasks.jsonl.partial"):
        (run.path / name).symlink_to(victim)
    checkpoints_in(run)[-1].unlink()  # so that steps are made and recorded
    code, told = main(["train", "--resume", str(run.path)]), capsys.readouterr().err
    assert code == 0 or (planted in told.splitlines()[-1] and "Traceback" not in told)
    assert main(["report", str(run.path)]) == 0
    assert victim.read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--objective", "clip"], "objective.name"),
        (["--model.name", "small"], "model.name"),
        (["--train.samples", "1k"], "train.samples"),
        (["--run.seed", "5"], "run.seed"),
    ],
)
def test_resuming_with_another_setting_that_matters_is_refused(finished, flags, field):
    with pytest.raises(UserError, match=field):
        api.train(read_settings(finished.settings, flags), resume=finished.path)


def test_a_checkpoint_of_another_objective_is_one_line(finished, small_settings, tmp_path):
    run = RunFolder(api.train(small_settings(tmp_path, "--objective", "clip", "--run.name", "other")))
    newest = checkpoints_in(run)[-1]
    newest.write_bytes(checkpoints_in(finished)[-1].read_bytes())
    with pytest.raises(UserError, match=rf"{newest.name}: is damaged, or not what it should be .*; move it away"):
        api.train(read_settings(run.settings), resume=run.path)


def test_resuming_on_changed_data_is_refused(small_settings, tmp_path):
    data = write_shards(tmp_path / "data", 40)
    settings = small_settings(tmp_path, "--run.name", "first", "--data.train", str(data), "--train.samples", "8")
    api.train(settings)
    write_shards(data, 44)
    with pytest.raises(RunFailed, match=r"40 samples then, 44 now"):
        api.train(settings, resume=tmp_path / "first")


def test_only_a_message_about_the_data_says_that_they_may_have_moved(finished, tmp_path):
    folder = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    resume = partial(api.train, resume=folder.path)
    with pytest.raises(UserError) as refusal:
        resume(read_settings(folder.settings, ["--train.micro_batch_size", "1"]))
    assert str(refusal.value).endswith("give --train.micro_batch_size 2 or more")
    with pytest.raises(UserError) as refusal:
        resume(read_settings(folder.settings, ["--data.train", str(tmp_path / "gone")]))
    assert str(refusal.value).endswith("; if the data were moved, add --data.train and where they are now")
