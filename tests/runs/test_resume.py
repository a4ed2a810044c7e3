"""Whatever ends a run, it continues to the same bits: kills at every write, signals, full disks, damaged files. What
cannot continue is refused in one line that says what to do."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.files import UNFINISHED
from neuclip.records import RunFolder, read_lines
from neuclip.runs.folder import checkpoints_in, load_checkpoint
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml
from tests.builders import processes
from tests.builders.images import write_shard, write_shards
from tests.builders.models import SMALL_FILE
from tests.builders.processes import at_write, main_killed_at_write, main_on_ranks, of_rank, on_ranks, rank_variables
from tests.builders.runs import BATCH, STEPS, assert_equal_runs, assert_equal_weights, last_checkpoint, losses, weights

pytestmark = pytest.mark.slow


@pytest.fixture
def settings_file(finished, tmp_path):
    """The settings of the finished run, for one below `runs` with another name."""

    def write(name: str, *flags: str) -> str:
        settings = read_settings(finished.settings, [f"--run.folder={tmp_path / 'runs'}", f"--run.name={name}", *flags])
        (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
        return str(tmp_path / "settings.yaml")

    return write


def test_killed_at_every_write_and_started_again_it_is_the_same_run_to_the_bit(finished, settings_file, tmp_path):
    for number in count(1):
        file, run = settings_file(f"killed-{number}"), tmp_path / "runs" / f"killed-{number}"
        child = main_killed_at_write(number, ["train", file])
        if child.code != -signal.SIGKILL:
            break
        assert api.train(read_settings(Path(file)), resume="auto") == run
        assert_equal_runs(run, finished.path)
        assert not list((run / "checkpoints").glob(f".*{UNFINISHED}"))
        shutil.rmtree(run)
    assert child.code == 0 and number > 15, child.errors


def ranks_killed_at_write(number: int, file: str) -> int:
    """Rank 0 kills both ranks within its `number`-th write, as a machine that loses power does."""
    (here := Path(os.environ["PIDS"]) / os.environ["RANK"]).write_text(str(os.getpid()))

    def kill_both() -> None:
        os.kill(int((here.parent / "1").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    with at_write(number if os.environ["RANK"] == "0" else 10**9, kill_both):
        return main(["train", file])


def test_two_ranks_killed_at_every_write_continue_to_the_bit(settings_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path))
    model = ["--model.name", str(SMALL_FILE)]
    assert [rank.code for rank in main_on_ranks(2, ["train", settings_file("whole", *model)])] == [0, 0]
    for number in count(1):
        file, run = settings_file(f"killed-{number}", *model), tmp_path / "runs" / f"killed-{number}"
        codes = [rank.code for rank in on_ranks(2, ranks_killed_at_write, number, file)]
        if codes == [0, 0]:
            break
        assert codes == [-signal.SIGKILL] * 2
        ended = main_on_ranks(2, ["train", file, "--resume", "auto"])
        assert [rank.code for rank in ended] == [0, 0], ended[0].errors
        assert_equal_runs(run, tmp_path / "runs" / "whole")
        shutil.rmtree(run)
    assert number > 15


DIES_TWICE = f"""
import os, signal, sys
from neuclip.cli.main import main
from tests.builders.processes import at_write
step = {{"0": 6, "1": 9}}.get(os.environ["TORCHELASTIC_RESTART_COUNT"], 1000)
with at_write(f"samples-{{step * {BATCH}:012d}}", lambda: os.kill(os.getpid(), signal.SIGKILL)):
    sys.exit(main(["train", sys.argv[1]]))
"""


def test_a_run_without_a_name_that_torchrun_restarts_twice_goes_on_from_its_last_checkpoint(
    finished, settings_file, tmp_path
):
    (tmp_path / "dies.py").write_text(DIES_TWICE)
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=3", *rendezvous]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(processes.ROOT), *sys.path])}
    command = [*torchrun, str(tmp_path / "dies.py"), settings_file("")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert all(f"from {step * BATCH} to {STEPS * BATCH} samples" in ended.stderr for step in (4, 8))
    assert_equal_runs(run, finished.path)


def test_an_attempt_that_torchrun_restarts_finds_its_run_wherever_the_one_before_was_killed(
    finished, settings_file, tmp_path, monkeypatch
):
    """Also within the folder's making, and while a resumed attempt tidies up and signs the lock."""
    for name, value in (rank_variables(1) | of_rank(0) | {"TORCHELASTIC_RUN_ID": "job"}).items():
        monkeypatch.setenv(name, value)
    command = ["train", settings_file("")]
    for attempt, number in enumerate((3, 5, 1, 2, 3, 4)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        assert main_killed_at_write(number, command).code == -signal.SIGKILL
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "9")
    ended = processes.run(main, command)
    assert ended.code == 0, ended.errors
    (run,) = (tmp_path / "runs").glob("[!.]*")
    assert_equal_runs(run, finished.path)


def test_only_a_restart_of_the_same_torchrun_finds_its_run_again(train, tmp_path, monkeypatch):
    def attempt(job: str, restarts: int) -> Path:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return train("--run.name=", "--train.samples", str(BATCH)).path

    first = attempt("job", 0)
    half = tmp_path / "runs" / f".half.ab{UNFINISHED}"  # of an attempt that was killed while it made its folder
    for folder, content in ((half, (first / "run.lock").read_bytes()), (tmp_path / "runs" / "another", b"damaged")):
        folder.mkdir()
        (folder / "run.lock").write_bytes(content)
    assert attempt("job", 2) == first
    assert first not in (attempt("job", 0), attempt("other", 1))


def test_auto_starts_a_run_continues_it_and_leaves_a_finished_one_as_it_is(finished, settings_file, capsys):
    command = ["train", settings_file("again"), "--resume", "auto"]
    assert main(command) == 0
    run = Path(read_settings(Path(command[1])).run.folder) / "again"
    for path in checkpoints_in(RunFolder(run))[1:]:
        path.unlink()
    for _ in range(2):
        assert main(command) == 0
        assert_equal_runs(run, finished.path)
    assert main([*command, "--run.name="]) == 2
    assert capsys.readouterr().err.endswith("if there is one; give --run.name too\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_asked_to_stop_it_saves_and_can_go_on(finished, settings_file, tmp_path, number):
    def before(*_: object) -> None:
        """A handler that somebody else set."""

    settings, folder = read_settings(Path(settings_file("stopped"))), tmp_path / "runs" / "stopped"
    handler = signal.signal(number, before)  # below nohup SIGHUP is ignored, and would stay so
    stop = at_write(f"samples-{4 * BATCH:012d}", lambda: signal.raise_signal(number))
    with stop, pytest.raises(RunInterrupted, match=r"stopped and saved at 32 of 96 .*--resume") as stopped:
        api.train(settings)
    assert stopped.value.exit_code == 128 + number and signal.signal(number, handler) == before
    assert last_checkpoint(folder)["step"] == 4 and not read_lines(RunFolder(folder).evaluation)
    api.train(settings, resume=folder)
    assert_equal_runs(folder, finished.path)


def test_a_disk_that_fills_up_stops_the_run_and_it_can_go_on(finished, settings_file, tmp_path):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings, folder = read_settings(Path(settings_file("full"))), RunFolder(tmp_path / "runs" / "full")
    line = r"the disk is full \(\S+ \w+ needed, .* free\); the last good checkpoint is .*032\.pt; make room, .*--resume"
    with at_write(f"samples-{6 * BATCH:012d}", full), pytest.raises(RunFailed, match=line):
        api.train(settings)
    assert checkpoints_in(folder)[-1].stem.endswith(str(4 * BATCH))
    assert_equal_runs(api.train(settings, resume=folder.path), finished.path)


# --- Files that are damaged, or planted


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(finished, copied, capsys):
    newest = checkpoints_in(copied)[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    for path in (copied.records, copied.evaluation):
        path.write_bytes(path.read_bytes() + b'{"samples": 8, "lo')  # a kill cut it off
    (copied.checkpoints / f".samples-7.pt.ab{UNFINISHED}").write_bytes(b"half")
    assert main(["train", "--resume", str(copied.path)]) == 0
    stderr = capsys.readouterr().err
    assert f"{newest}: is damaged" in stderr and f"from {9 * BATCH} to {STEPS * BATCH} samples" in stderr
    assert_equal_runs(copied.path, finished.path)
    assert not list(copied.checkpoints.glob(f".*{UNFINISHED}")) and newest.with_suffix(".damaged").exists()
    for path in checkpoints_in(copied):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match="no earlier one; restore it, or start anew"):
        api.train(read_settings(copied.settings), resume=copied.path)


def without_a_key(path: Path) -> None:
    if path.suffix == ".pt":
        state = torch.load(path)
        del state["optimizer"]
        torch.save(state, path)
    elif path.suffix == ".yaml":
        path.write_text(path.read_text().replace("batch_size:", "batch_syze:"))
    else:
        path.write_text('{"other": 1}\n' if path.suffix == ".jsonl" else "{}")


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "noise": lambda path: path.write_bytes(b"\xff\xfe\x00{]\n" * 20),
    "another kind of value": lambda path: path.write_bytes(b"[1, 2]\n7\n"),
    "nested without end": lambda path: path.write_bytes(b"[" * 20_000 + b"\n"),
    "without a key": without_a_key,
    "a folder": lambda path: replaced(path, Path.mkdir),
    "a pipe": lambda path: replaced(path, os.mkfifo),
}
FILES = [
    *("settings.yaml", "environment.json", "records.jsonl", "evaluation.jsonl", "skipped.jsonl", "summary.json"),
    *("gallery.json", "run.lock", "checkpoints/samples-000000000096.pt", "model/open_clip_config.json", "report.html"),
]
NO_RUN = ("no run, checkpoint or model", "is not a run", "no run at")


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
        code, stderr = main([*command, str(run)]), capsys.readouterr().err
        assert "Traceback" not in stderr
        if code:
            *_, last = stderr.splitlines()
            named = Path(file).name in last or (str(run) in last and any(words in last for words in NO_RUN))
            assert last.startswith("neuclip: ") and named, last
            monkeypatch.setenv("NEUCLIP_DEBUG", "1")
            assert main([*command, str(run)]) == code
            assert "Traceback" in capsys.readouterr().err
            monkeypatch.delenv("NEUCLIP_DEBUG")


@pytest.mark.parametrize("planted", ["report.html", "records.jsonl", "evaluation.jsonl", "summary.json", "run.lock"])
def test_links_planted_in_a_run_folder_are_never_written_through(copied, tmp_path, planted, capsys):
    victim = tmp_path / "victim"
    shutil.move(copied.path / planted, victim)
    before = victim.read_bytes()
    for name in (planted, f"{planted}.partial", f".{planted}{UNFINISHED}", "tasks.jsonl.partial"):
        (copied.path / name).symlink_to(victim)
    checkpoints_in(copied)[-1].unlink()  # so that steps are made and recorded
    code, stderr = main(["train", "--resume", str(copied.path)]), capsys.readouterr().err
    assert code == 0 or (planted in stderr.splitlines()[-1] and "Traceback" not in stderr)
    assert main(["report", str(copied.path)]) == 0
    assert victim.read_bytes() == before


# --- What cannot be continued


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--objective clip", r"cannot be resumed with another objective\.name"),
        ("--model.name small", r"another model\.name"),
        ("--train.samples 1k", r"another train\.samples"),
        ("--run.seed 5", r"another run\.seed"),
        ("--data.train {more}", "40 samples then, 44 now, or other captions"),
        ("--data.train {other}", "40 samples then, 40 now, or other captions"),
        ("--data.train {gone}", "; if the data were moved, add --data.train with their new path$"),
        ("--train.micro_batch_size 1", "give --train.micro_batch_size 2 or more$"),  # and no word of data
        ("--checkpoint.keep 1000000", "the disk is too full"),
    ],
)
def test_a_run_cannot_go_on_with_other_settings_that_matter_or_other_data(copied, tmp_path, flags, message):
    places = {name: tmp_path / name for name in ("more", "other", "gone")}
    write_shards(places["more"], 44)
    write_shard(places["other"] / "0.tar", range(1, 41))
    before = losses(copied.path)
    with pytest.raises((UserError, RunFailed), match=message) as refused:
        api.train(read_settings(copied.settings, flags.format_map(places).split()), resume=copied.path)
    assert "\n" not in str(refused.value) and losses(copied.path) == before


def test_a_checkpoint_of_another_objective_is_one_line(finished, train):
    run = train("--objective", "clip")
    newest = checkpoints_in(run)[-1]
    newest.write_bytes(checkpoints_in(finished)[-1].read_bytes())
    with pytest.raises(UserError, match=rf"{newest.name}: is damaged or has the wrong format .*; move it away"):
        train("--objective", "clip", resume=run.path)


def test_a_checkpoint_is_loaded_into_memory_of_its_own_and_nothing_in_its_file_runs_code(finished, copied):
    newest = checkpoints_in(copied)[-1]
    loaded = load_checkpoint(newest)["model"]
    newest.write_bytes(b"")
    assert_equal_weights(loaded, weights(finished.path))
    for value in (last_checkpoint(finished.path) | {"model": Path("x")}, {"model": 1}, [1, 2]):
        torch.save(value, newest)
        with pytest.raises(UserError, match=r"096\.pt: is damaged or has the wrong format .*one before it is .*072"):
            load_checkpoint(newest)
