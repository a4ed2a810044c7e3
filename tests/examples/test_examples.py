"""The examples do what they show: they learn, and their checkpoints restore the objective."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.builders import processes

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINERS = ("hugging_face_trainer", "sentence_transformers_trainer")
SCRIPTS = ("plain_loop", "open_clip_trainer", "lightning_module", *TRAINERS)
CHANCE = 1 / 32  # accuracy within a batch


def run(folder: Path, *commands: Sequence[str], lost: Sequence[str] = (), ranks: int | None = None) -> list[str]:
    """What each command, a script and its flags, printed; run in turn in one process of each rank, because importing
    a trainer takes longer than using it. Between the first and the second, the folders `lost` are removed."""
    work = (in_turn, folder, commands, lost)
    ended = processes.on_ranks(ranks, *work) if ranks else [processes.run(*work)]
    outputs = [(folder / f"output-{number}-of-0").read_text() for number in range(len(commands))]
    assert all(each.code == 0 for each in ended), outputs
    return outputs


def in_turn(folder: Path, commands: Sequence[Sequence[str]], lost: Sequence[str]) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    for number, (script, *flags) in enumerate(commands):
        if number == 1:
            for name in lost:
                shutil.rmtree(name)
        with open(f"output-{number}-of-{os.environ.get('RANK', 0)}", "w") as output:  # noqa: PTH123
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.argv = [script, *flags]
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        sys.stdout.flush()


def figures(output: str, name: str) -> list[float]:
    """The values of a figure in the order in which they were printed, in whichever way the loop prints."""
    return [float(value) for value in re.findall(rf"\b{name}\b'?:? '?(-?[\d.]+)", output, flags=re.IGNORECASE)]


def assert_learned(output: str) -> None:
    loss, accuracy = figures(output, "loss"), figures(output, "accuracy")
    assert loss[-1] < loss[0]
    # The loss alone would also fall with the temperature.
    assert accuracy[-1] > 5 * CHANCE
    assert all(0.1 < value < 10 for value in figures(output, "calibration"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """Plain loops, `whole` of four epochs and `half` stopped after two: their folders, and what they printed."""
    folders = {name: (tmp_path_factory.mktemp(name), epochs) for name, epochs in (("whole", "4"), ("half", "2"))}
    return {name: (at, run(at, ["plain_loop", "--epochs", epochs])[0]) for name, (at, epochs) in folders.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_example_is_short_enough_to_read_before_it_is_copied(script):
    most = 130 if script == "sentence_transformers_trainer" else 96  # that one holds a loss of its own
    assert len((EXAMPLES / f"{script}.py").read_text(encoding="utf-8").splitlines()) < most


@pytest.mark.slow
def test_the_plain_loop_learns_and_resumes_to_the_digit(plain, tmp_path):
    assert_learned(plain["whole"][1])
    shutil.copytree(plain["half"][0] / "runs", tmp_path / "runs")
    (resumed,) = run(tmp_path, ["plain_loop", "--resume", "--epochs", "4"])
    assert resumed.splitlines() == plain["whole"][1].splitlines()[2:]


@pytest.mark.slow
def test_two_processes_in_chunks_go_on_from_the_state_of_one_and_train_the_same_weights(plain, tmp_path):
    shutil.copytree(plain["half"][0] / "runs", tmp_path / "runs")
    run(tmp_path, ["plain_loop", "--resume", "--epochs", "4", "--micro-batch-size", "5"], ranks=2)
    files = [folder / "runs" / "plain_loop.pt" for folder in (plain["half"][0], plain["whole"][0], tmp_path)]
    before, one, two = (torch.load(file, weights_only=True)["towers"]["text.0.weight"] for file in files)
    assert torch.allclose(one, two, atol=1e-3)
    assert not torch.allclose(one, before, atol=1e-2)  # the two epochs in between moved them by far more


@pytest.mark.slow
def test_lightning_in_chunks_stopped_and_resumed_gives_the_figures_of_the_plain_loop(plain, tmp_path):
    begun, resumed = ["lightning_module", "--epochs", "2"], ["lightning_module", "--resume", "--epochs", "4"]
    _, printed = run(tmp_path, [*begun, "--micro-batch-size", "7"], [*resumed, "--micro-batch-size", "5"])
    for name in ("loss", "accuracy", "calibration"):
        assert figures(printed, name) == pytest.approx(figures(plain["whole"][1], name)[2:], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINERS)
def test_trainers_of_the_hugging_face_kind_learn_and_resume_to_the_digit_and_chunks_change_no_figure(script, tmp_path):
    if script == "sentence_transformers_trainer" and find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    later, begun = [f"runs/{script}/checkpoint-{steps}" for steps in (48, 64)], [script, "--epochs", "4"]
    chunks = ["--micro-batch-size", "5", "--folder", "runs/chunks"]
    commands = [begun, [*begun, "--resume"], *([[*begun, *chunks]] if script == "hugging_face_trainer" else [])]
    whole, resumed, *in_chunks = run(tmp_path, *commands, lost=later)
    assert_learned(whole)
    calibration = figures(whole, "calibration")
    assert figures(resumed, "calibration") == calibration[2:]
    for printed in in_chunks:
        assert figures(printed, "calibration") == pytest.approx(calibration, abs=1e-3)


@pytest.mark.slow
def test_open_clips_trainer_learns_and_resumes_with_the_objectives_state(tmp_path):
    begun = ["open_clip_trainer", "--name", "shapes", "--epochs", "2"]
    resumed = ["open_clip_trainer", "--name", "shapes", "--epochs", "5", "--resume", "latest"]
    assert_learned("".join(run(tmp_path, begun, resumed)))
    states = tmp_path / "runs" / "open_clip_trainer" / "shapes" / "objective"
    loaded = [torch.load(states / f"epoch_{epoch}.pt", weights_only=True) for epoch in (2, 5)]
    # The trainer does not keep its order over a resume, so figures cannot be compared; the count of steps can.
    assert [state["_extra_state"]["steps"] for state in loaded] == [32, 80]
