"""`neuclip COMMAND`: dispatch, exit codes, one line for a user error, and help that imports nothing heavy."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import neuclip
from neuclip.cli.main import COMMANDS, main
from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.settings.reading import read_settings
from neuclip.settings.writing import settings_as_yaml

SOURCE = Path(neuclip.__file__).parents[1]
HEAVY = ("torch", "numpy", "PIL", "open_clip")
THREADS_WAIT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def start(arguments: list[str], **streams) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, *arguments], text=True, env=environment, check=False, **streams)


@pytest.fixture
def exit_code_of(add_command):
    """Of a command that ends with this error."""

    def run(error: BaseException) -> int:
        def fail() -> int:
            """neuclip fail

            neuclip fail
            """
            raise error

        add_command("fail", fail)
        return main(["fail"])

    return run


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """A run as far as the command line looks: a folder with its settings. It is the working folder's only run."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/first")
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(settings_as_yaml(read_settings(None, ["--run.seed", "7"])))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "no command 'trian'; did you mean train?"),
        ("zzz", "no command 'zzz'; choose train, eval, error, "),
        ("--zzz", "no command before --zzz; choose train, eval"),
        ("data", "data needs an action; choose get, convert or index"),
        ("data convert", "usage: neuclip data convert SOURCE FOLDER"),
        ("data covnert", "no action 'covnert' of data; did you mean convert?"),
        ("train --train.batchsize 8", "did you mean --train.batch_size?"),
        ("train --jsno", "no flag --jsno; did you mean --json?"),
        ("train --objective neuclp", "did you mean neuclip?"),
        ("train --train.samples many", "--train.samples is 'many'; give a whole number"),
        ("train --optimizer.learning_rate -1", "--optimizer.learning_rate is -1.0; give a number above 0"),
        ("train --objective clip --objective.inner_steps 1", "objective.inner_steps belongs to objective neuclip"),
        ("train --resume runs/first --checkpoint.keep 0", "neuclip: --checkpoint.keep is 0; give 1 or more"),
        ("train --resume runs/frist", "no run at runs/frist; did you mean runs/first?"),
        ("train tinny.yaml", "no recipe tinny.yaml"),
        ("train runs", "if it is data, give --data.train runs"),
        ("train tiny tiny", "unexpected argument 'tiny'; usage: neuclip train [RECIPE]"),
        ("train tiny --resume x", "remove the recipe 'tiny'"),
        ("train -x", "no flag '-x'; flags begin with two dashes"),
        ("eval", "an argument is missing; usage: neuclip eval RUN|CHECKPOINT|MODEL"),
        ("eval runs/nowhere", "no run or checkpoint at runs/nowhere; runs contains first"),
        ("eval first", "did you mean runs/first?"),
        ("eval x --batch-size 0", "--batch-size is 0; give 1 or more"),
        ("eval x --max-bad-share 5", "--max-bad-share is 5; give 0 or more and at most 1"),
        ("error", "an argument is missing; usage: neuclip error RUN..."),
        ("error first", "no run at first; did you mean runs/first?"),
        ("error runs", "runs is not a run: it has no settings.yaml"),
        ("error runs/first runs/first/", "runs/first is given twice"),
        ("error runs/first --anchors 0", "--anchors is 0; give 1 or more"),
        ("report", "an argument is missing; usage: neuclip report RUN..."),
        ("compare runs/nowhere", "no run at runs/nowhere"),
        ("export runs/first --to onx", "did you mean onnx?"),
        ("merge runs/first runs/first --weight 2", "--weight is 2; give 0 or more and at most 1"),
        ("merge runs/first runs/first x --curve", "leave out --weight and the folder"),
        ("doctor", "an argument is missing; usage: neuclip doctor DATA [RECIPE]"),
        ("doctor x --ranks 0", "--ranks is 0; give 1 or more"),
        ("doctor x --data.train y", "the data is given twice"),
        (f"report {'x' * 300}", "a path is too long for this system; give a shorter one than xxx"),
        (f"train --resume {'x' * 300}", "a path is too long for this system"),
        ("recipe cc3", "no setting 'cc3' in the paper; did you mean cc3m?"),
        ("recipe imagenet", "choose cc3m, cc12m, dfn-14m, dfn-192m or dfn-1b"),
        ("recipe cc3m neuclp", "no objective 'neuclp' in the paper; did you mean neuclip?"),
        ("recipe neuclip cc3m", "neuclip is an objective; name the setting first: neuclip recipe"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(arguments, message, capsys, run_folder):
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("neuclip: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("a\nb"), 2, "neuclip: a b\n"),
        (RunFailed("loss is not a number at step 3"), 1, "neuclip: loss is not a number at step 3\n"),
        (RunInterrupted("stopped and saved", 143), 143, "neuclip: stopped and saved\n"),
        (KeyboardInterrupt(), 130, "neuclip: interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x/records.jsonl"),
            1,
            "neuclip: the disk is full: no space for runs/x/rec",
        ),
        (OSError(errno.EFBIG, "File too large"), 1, "neuclip: the disk is full"),
        (OSError(errno.ENOENT, "No such file", "/proc/x"), 1, "neuclip: /proc/x: No such file; check"),
        (OSError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), 1, "neuclip: no folder for tempor"),
        (OSError(errno.EROFS, "Read-only file system", "cache/x"), 1, "neuclip: cache/x: Read-only file system; check"),
    ],
)
def test_expected_failures_are_one_line(error, code, line, capsys, exit_code_of):
    assert exit_code_of(error) == code
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), ValueError(), BrokenPipeError(), OSError(errno.EACCES, "Denied"), OSError(errno.ENOENT, "No", "x")],
)
def test_a_bug_keeps_its_traceback(error, capsys, exit_code_of):
    assert exit_code_of(error) == 1
    assert "Traceback" in capsys.readouterr().err


def test_with_neuclip_debug_a_user_error_shows_its_traceback(capsys, monkeypatch):
    monkeypatch.setenv("NEUCLIP_DEBUG", "1")
    assert main(["trian"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS) and max(map(len, out.splitlines())) <= 100


def test_help_can_be_asked_for_in_both_ways_also_of_a_group_and_of_a_section(capsys):
    for before, after, first in (
        ("help data convert", "data convert --help", "usage: neuclip data convert"),
        ("help data", "data -h", "usage: neuclip data ACTION"),
        ("help train optimizer", "train --help optimizer", "optimizer: AdamW"),
    ):
        assert main(before.split()) == main(after.split()) == 0
        page = capsys.readouterr().out
        assert page[: len(page) // 2] == page[len(page) // 2 :] and page.startswith(first)


def test_the_version_line_names_torch_open_clip_and_python(capsys):
    assert main(["--version"]) == 0
    packages = r"\(torch 2\.\d+\.\d+, open_clip \d+\.\d+\.\d+, Python 3\.\d+\)"
    assert re.fullmatch(rf"neuclip {re.escape(neuclip.__version__)} {packages}\n", capsys.readouterr().out)


def test_help_of_every_command_imports_nothing_heavy_and_a_command_no_other():
    code = f"""
import sys
from neuclip.cli.main import COMMANDS, main
main(["report", "--help"])
assert "neuclip.cli.train" not in sys.modules
for arguments in [[], ["--version"], ["zzz"], *[[*command.split(), "--help"] for command in COMMANDS]]:
    main(arguments)
sys.exit(str([name for name in {HEAVY} if name in sys.modules] or ""))
"""
    done = start(["-c", code], capture_output=True)
    assert done.stderr.strip().splitlines()[1:] == [], done.stderr  # the first line is the answer to zzz
    assert "usage: neuclip train" in done.stdout


def test_the_program_exits_with_the_code_and_says_nothing_when_its_reader_is_gone():
    done = start(["-m", "neuclip", "train", "--train.batchsize", "8"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    reading, writing = os.pipe()
    os.close(reading)
    done = start(["-m", "neuclip", "train", "--help"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "9"}, {"TORCH_CPP_LOG_LEVEL": "INFO"}]
)
def test_waiting_threads_sleep_and_torch_is_quiet_unless_the_user_chose(given, monkeypatch, capsys):
    for name in (*THREADS_WAIT, "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # restored after the test, whatever `main` does
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    threads = {name: os.environ[name] for name in THREADS_WAIT if name in os.environ}
    chosen = {name: value for name, value in given.items() if name in THREADS_WAIT}
    assert threads == (chosen or {"OMP_WAIT_POLICY": "PASSIVE"})
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == given.get("TORCH_CPP_LOG_LEVEL", "ERROR")
