"""`neuclip COMMAND`: dispatch, exit codes, one line for a user error, and help that imports nothing heavy."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import neuclip
from neuclip.cli.main import COMMANDS, exit_code_of, main
from neuclip.errors import RunFailed, UserError

SOURCE = Path(neuclip.__file__).parents[1]
HEAVY = ("torch", "numpy", "PIL", "open_clip")


def neuclip_process(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "neuclip"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)


def raising(error: BaseException):
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "no command 'trian'; did you mean train?"),
        ("zzz", "no command 'zzz'; choose train, eval, error, "),
        ("--zzz", "the flag --zzz has no command before it; choose train, eval"),
        ("train --train.batchsize 8", "did you mean --train.batch_size?"),
        ("train --trian.batch_size 8", "did you mean --train.batch_size?"),
        ("train --jsno", "no flag --jsno; did you mean --json?"),
        ("train --train.samples many", "--train.samples is 'many'; give a whole number"),
        ("train --optimizer.learning_rate -1", "--optimizer.learning_rate is -1.0; give a number above 0"),
        ("train --objective.num_prototypes 0", "--objective.num_prototypes is 0; give 1 or more"),
        ("train --objective clip --objective.inner_steps 1", "objective.inner_steps belongs to objective neuclip"),
        ("train tinny.yaml", "no recipe tinny.yaml"),
        ("train tiny tiny", "unexpected 'tiny'"),
        ("train tiny --resume x", "remove the recipe 'tiny'"),
        ("train -x", "no flag '-x'"),
        ("eval", "give neuclip eval RUN|CHECKPOINT|MODEL"),
        ("eval runs/nowhere", "no run or checkpoint at runs/nowhere"),
        ("eval x --bath-size 3", "did you mean --batch-size?"),
        ("eval x --batch-size 1.5", "--batch-size is '1.5'; give a whole number"),
        ("error runs/nowhere", "no run at runs/nowhere"),
        ("error x --zzz", "the flags are --eps, --anchors, --checkpoints, --seed, --json"),
        ("report", "give neuclip report RUN..."),
        ("compare", "give neuclip compare RUN|RESULT..."),
        ("compare runs/nowhere", "no run at runs/nowhere"),
        ("doctor", "give neuclip doctor DATA [RECIPE]"),
        ("doctor nowhere", "nowhere: no such file"),
        ("doctor x tinny.yaml", "no recipe tinny.yaml"),
        ("doctor x --rnaks 2", "did you mean --ranks?"),
        ("doctor x --ranks 0", "--ranks is 0; give 1 or more"),
        ("doctor x --data.train y", "the data is given twice"),
        ("doctor x --train.batchsize 8", "did you mean --train.batch_size?"),
        ("data idnex", "did you mean index?"),
        ("data prepare icons-30k", "no action 'prepare' of data; choose get, convert or index"),
        ("data convert", "give neuclip data convert SOURCE FOLDER"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("neuclip: ") and err.count("\n") == 1
    assert message in err


def test_the_installed_program_prints_the_same_line_and_exits_with_2():
    done = neuclip_process("train", "--train.batchsize", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "neuclip: --train.batchsize is not a setting; did you mean --train.batch_size?\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("a\nb"), 2, "neuclip: a b\n"),
        (RunFailed("loss is not a number at step 3"), 1, "neuclip: loss is not a number at step 3\n"),
        (KeyboardInterrupt(), 130, "neuclip: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x/records.jsonl"), 1, "neuclip: the disk is full"),
        (OSError(errno.EFBIG, "File too large"), 1, "neuclip: the disk is full"),
        (OSError(errno.EROFS, "Read-only file system", "cache/x"), 1, "neuclip: cache/x: Read-only file system; check"),
    ],
)
def test_expected_failures_are_one_line(error, code, line, capsys):
    assert exit_code_of(raising(error)) == code
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [KeyError("x"), OSError(errno.EACCES, "Permission denied"), BrokenPipeError(), ValueError()]
)
def test_a_bug_keeps_its_traceback(error, capsys):
    assert exit_code_of(raising(error)) == 1
    assert "Traceback" in capsys.readouterr().err


def test_with_neuclip_debug_a_user_error_shows_its_traceback(capsys, monkeypatch):
    monkeypatch.setenv("NEUCLIP_DEBUG", "1")
    assert main(["trian"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)


def test_help_on_a_command_can_be_asked_for_in_both_ways(capsys):
    pages = []
    for arguments in (["help", "data", "convert"], ["data", "convert", "--help"]):
        assert main(arguments) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] and pages[0].startswith("usage: neuclip data convert")


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"neuclip {neuclip.__version__}\n"


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from neuclip.cli.main import COMMANDS, main
for arguments in [[], ["--help"], ["--version"], ["zzz"], *[[command, "--help"] for command in COMMANDS]]:
    main(arguments)
sys.exit(str([name for name in {HEAVY} if name in sys.modules] or ""))
"""
    done = neuclip_process(code=code)
    assert done.stderr.strip().splitlines()[1:] == [], done.stderr  # the first line is the answer to zzz
    assert "usage: neuclip train" in done.stdout


def test_a_command_imports_no_other_command():
    code = """
import sys
from neuclip.cli.main import main
main(["report", "--help"])
print("neuclip.cli.train" in sys.modules)
"""
    assert neuclip_process(code=code).stdout.endswith("False\n")


def test_a_pipe_that_is_closed_early_causes_no_message():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "neuclip", "train", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_help_of_every_command_has_its_flags_and_two_examples(command, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: neuclip {command}")
    assert out.partition("examples:\n")[2].count(f"  neuclip {command} ") == 2
    assert all(f"--{flag.name}" in out for flag in import_module(f"neuclip.cli.{command}").COMMAND.flags)
