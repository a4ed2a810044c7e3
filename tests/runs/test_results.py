"""What a run says about itself while it trains, and what it leaves behind when it has finished."""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from neuclip import api, load
from neuclip.errors import RunFailed, UserError
from neuclip.models import open_clip_module
from neuclip.records import RunFolder, read_lines
from neuclip.runs.doctor import examine
from neuclip.settings.reading import read_settings
from neuclip.training.observer import full_caption_test
from tests.builders.images import write_csv, write_shards
from tests.builders.runs import BATCH, STEPS, assert_equal_weights, losses, recorded, summary, weights

pytestmark = pytest.mark.slow


# --- What is left behind


def test_a_run_leaves_every_promised_file(finished):
    promised = "settings.yaml environment.json records.jsonl evaluation.jsonl summary.json gallery.json report.html"
    assert set(promised.split()) <= {path.name for path in finished.path.iterdir()}
    assert {path.name for path in finished.model.iterdir()} == {"open_clip_config.json", "open_clip_model.safetensors"}
    assert not list(finished.path.rglob(".*.part"))


def test_records_have_the_promised_keys_and_are_strict_json(finished):
    records = [json.loads(line, parse_constant=pytest.fail) for line in finished.records.read_text().splitlines()]
    keys = """samples step epoch loss temperature learning_rate accuracy calibration samples_per_second data_share
        towers_share normalizer_share"""
    assert all(set(keys.split()) <= set(record) for record in records)
    assert [record["samples"] for record in records] == [BATCH * step for step in range(1, STEPS + 1)]
    shares = [record["data_share"] + record["towers_share"] + record["normalizer_share"] for record in records]
    assert shares == pytest.approx([1.0] * STEPS)


def test_the_summary_has_the_final_figures(finished):
    found, lines = summary(finished.path), read_lines(finished.evaluation)
    assert found["samples_seen"] == STEPS * BATCH and found["loss"] == losses(finished.path)[-1]
    assert {"temperature", "seconds", "samples_per_second", "peak_memory_bytes", "evaluation"} <= set(found)
    assert found["evaluation"].items() <= lines[-1].items()
    assert [line["samples"] for line in lines] == [4 * BATCH, 8 * BATCH, STEPS * BATCH]


def test_the_model_is_the_trained_one_for_open_clip_too_and_scores_as_the_run_it_came_from(finished, shards):
    model, _, transform = open_clip_module().create_model_and_transforms(f"local-dir:{finished.model}")
    trained, own_transform, tokenize = load(str(finished.path))
    noise = Image.effect_noise((40, 50), 90)
    with torch.no_grad():
        tokens = tokenize(["a red circle"])
        assert torch.allclose(model.eval().encode_text(tokens), trained.encode_text(tokens), atol=1e-6)
    assert torch.equal(transform(noise), own_transform(noise))
    asked, want = {"retrieval": (str(shards),), "zero_shot": ()}, summary(finished.path)["evaluation"]
    assert api.evaluate(str(finished.path), **asked) == want
    assert api.evaluate(f"local-dir:{finished.model}", **asked, batch_size=256) == pytest.approx(want)


def test_a_run_whose_last_measurement_fails_leaves_its_model(train, tmp_path):
    data = write_shards(tmp_path / "data", 2, shards=1, spoilt=[1])
    flags = f"--data.train {data} --train.batch_size 2 --train.samples 4 --evaluation.error_anchors 5"
    with pytest.raises(UserError, match="two or more pairs"):
        train(*flags.split())
    model, *_ = load(f"local-dir:{tmp_path / 'runs' / 'r' / 'model'}")
    assert model.logit_scale.isfinite()


# --- What can be changed, and what that changes


@pytest.mark.parametrize("change", ["nothing", "workers", "csv", "fast pixels"])
def test_stored_settings_repeat_the_run_to_the_bit_with_other_workers_and_from_other_files(finished, tmp_path, change):
    """Fast pixels change the losses a little."""
    flags = {
        "workers": ["--data.workers", "2"],
        "csv": ["--data.train", str(write_csv(tmp_path / "pairs", 40))],
        "fast pixels": ["--data.pixels", "fast"],
    }.get(change, [])
    off = ["--evaluation.every", "0", "--evaluation.error_anchors", "0", "--run.folder", str(tmp_path)]
    run = api.train(read_settings(finished.settings, [*off, *flags]))
    if change == "fast pixels":
        assert losses(run) != losses(finished.path)
        assert losses(run) == pytest.approx(losses(finished.path), rel=0.02)
    else:
        assert losses(run) == losses(finished.path)
        assert_equal_weights(weights(run), weights(finished.path))


# --- What is said on the way


def test_the_share_of_full_captions_is_the_mean_over_the_records(train, tmp_path):
    table = write_csv(tmp_path / "pairs", 40)
    header, *rows = table.read_text().splitlines()
    rows[::3] = [row + " and so on" * 50 for row in rows[::3]]
    table.write_text("\n".join([header, *rows]))
    run = train("--data.train", str(table), "--train.samples", "40")
    shares = recorded(run.path, "truncated_captions")
    assert len(set(shares)) > 2 and sum(shares) / len(shares) == pytest.approx(14 / 40)  # one epoch
    assert summary(run.path)["truncated_captions"] == pytest.approx(14 / 40)


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


@pytest.mark.parametrize(("objective", "fails"), [("neuclip", False), ("clip", True)])
def test_tensorboard_and_wandb_have_every_record_and_are_closed_whether_a_run_fails_or_not(
    train, objective, fails, tmp_path, monkeypatch
):
    """CLIP has no calibration: null in a record, nothing in its copies."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    session, module = Session(), ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = lambda **given: session if given["mode"] == "offline" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    flags = ["--objective.name", objective, "--log.tensorboard", "true", "--log.wandb", "true"]
    if fails:
        with pytest.raises(RunFailed, match="NaN or infinity at step 1"):
            train(*flags, "--optimizer.learning_rate", "1e30", "--optimizer.warmup", "0")
    else:
        train(*flags)
    run = RunFolder(tmp_path / "runs" / "r")
    events = loader.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    losses = [(record["samples"], record["loss"]) for record in read_lines(run.records)]
    assert [(event.step, pytest.approx(event.value)) for event in events.Scalars("train/loss")] == losses
    assert [(step, values["train/loss"]) for step, values in session.lines] == losses
    assert len(losses) == (1 if fails else STEPS) and session.finished == 1
    if objective == "clip":
        assert recorded(run.path, "calibration") == [None] and "train/calibration" not in session.lines[0][1]


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_named_with_what_installs_it_also_by_doctor(train, small_settings, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    needed = rf"log\.{package} needs {package}; install with: pip install .*\[{package}\]"
    with pytest.raises(UserError, match=needed) as refused:
        train(f"--log.{package}", "true")
    assert examine(small_settings(Path("runs"), f"--log.{package}", "true")).problems == [str(refused.value)]


def test_a_narrow_terminal_shows_the_first_figures_whole(train, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "32")
    train("--train.samples", str(2 * BATCH))
    shown = [line for line in capsys.readouterr().err.split("\r\x1b[2K") if "left" in line]
    assert shown and all(len(line) < 32 and line.split("  ")[-1].startswith("loss ") for line in shown)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot lend a process fewer cores")
def test_advice_is_one_line_each_before_the_first_step_and_torch_adds_none(train, capfd, recwarn):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        train("--data.workers", "2", "--train.samples", "24")
    finally:
        os.sched_setaffinity(0, cores)
    lines = capfd.readouterr().err.splitlines()
    advice = [line for line in lines if "orkers " in line]
    assert len(advice) == 1 and advice[0].startswith("2 workers on 1 core: ") and "--data.workers 1" in advice[0]
    assert not [warning for warning in recwarn if "DataLoader" in str(warning.message)]
    no_set = "there is no held-out data: the loss alone does not show quality; give --data.hold_out 4"
    assert sum(line.startswith(no_set) for line in lines) == 1
