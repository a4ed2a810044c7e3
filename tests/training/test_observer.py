"""Records of a run: what they count, and copies of them that are closed whatever ends the loop."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import RunFailed, UserError
from neuclip.models import open_clip_module
from neuclip.records import RunFolder, read_lines
from neuclip.settings.writing import settings_as_yaml
from neuclip.training import loop
from neuclip.training.observer import full_caption_test
from tests.builders.images import write_shards
from tests.builders.models import SMALL_FILE
from tests.builders.runs import BATCH, settings_for

LENGTH = 8


def padded_with_its_end(texts: list[str]) -> torch.Tensor:
    """Tokens as some tokenizers give them: no start, and padding with the end token (1)."""
    rows = [[5] * min(len(text.split()), LENGTH - 1) + [1] * LENGTH for text in texts]
    return torch.tensor([row[:LENGTH] for row in rows])


@pytest.mark.parametrize(("kind", "full"), [("open_clip", 6), ("padded with its end", 7)])
def test_captions_as_long_as_the_context_or_longer_are_told(kind, full):
    """open_clip's start and end are two of the eight tokens; an end token as padding hides nothing."""
    tokenize = open_clip_module().SimpleTokenizer(context_length=LENGTH) if kind == "open_clip" else padded_with_its_end
    captions = [" ".join("abcdefgh"[:words]) for words in range(9)] + ["a " * 100]
    assert full_caption_test(tokenize)(tokenize(captions)).tolist() == [words >= full for words in range(9)] + [True]


class Session:
    """What a module `wandb` gives, as far as a run uses it; the package is large and seldom installed."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def settings(tmp_path):
    write_shards(tmp_path / "shards", 40)
    flags = ["--run.name", "run", "--log.tensorboard", "true", "--log.wandb", "true"]
    return settings_for(tmp_path, tmp_path / "shards", *flags, model=SMALL_FILE)


@pytest.mark.parametrize("steps", [2, 12])
def test_tensorboard_and_wandb_have_every_record_and_are_closed_whether_a_run_fails_or_not(
    settings, steps, tmp_path, monkeypatch
):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    session, module, take_step = Session(), ModuleType("wandb"), loop.take_step
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = lambda **given: session if given["mode"] == "offline" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)

    def failing(run, *rest):
        if run.step == steps:
            raise RunFailed("a step failed")
        return take_step(run, *rest)

    monkeypatch.setattr(loop, "take_step", failing)
    if steps < 12:
        with pytest.raises(RunFailed, match="a step failed"):
            api.train(settings)
    else:
        api.train(settings)
    events = loader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    losses = [(record["samples"], record["loss"]) for record in read_lines(RunFolder(tmp_path / "run").records)]
    assert [(event.step, pytest.approx(event.value)) for event in events.Scalars("train/loss")] == losses
    assert [(step, values["train/loss"]) for step, values in session.lines] == losses and len(losses) == steps
    assert session.finished == 1
    assert all("calibration" not in values or values["calibration"] for _, values in session.lines)


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_named_with_what_installs_it(settings, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    log = replace(settings.log, tensorboard=package == "tensorboard", wandb=package == "wandb")
    with pytest.raises(UserError, match=rf"log\.{package} needs {package}; install with: pip install .*\[{package}\]"):
        api.train(replace(settings, log=log))


def test_a_narrow_terminal_shows_the_first_figures_whole(tmp_path, monkeypatch, capsys):
    write_shards(tmp_path / "shards", 40)
    flags = ["--train.samples", str(2 * BATCH), "--run.name", "narrow"]
    settings = settings_for(tmp_path, tmp_path / "shards", *flags, model=SMALL_FILE)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "32")
    (tmp_path / "settings.yaml").write_text(settings_as_yaml(settings))
    assert main(["train", str(tmp_path / "settings.yaml")]) == 0
    shown = [line for line in capsys.readouterr().err.split("\r\x1b[2K") if "left" in line]
    assert shown and all(len(line) < 32 and line.split("  ")[-1].startswith("loss ") for line in shown)
