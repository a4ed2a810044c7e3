"""The comparison: equal budgets, tuning apart from tests, runs that can be cut off, and the table."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.comparison.images import PIXELS, shrunk
from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.plan import (
    ICONS_32,
    ICONS_128,
    SETTINGS,
    PlannedRun,
    Setting,
    choices,
    final_runs,
    tuning_runs,
)
from benchmarks.comparison.processes import execute
from benchmarks.comparison.table import final_tables
from neuclip.data.decoding import decode
from neuclip.data.open import open_source
from neuclip.records import append_line, read_lines, write_json
from neuclip.settings.reading import read_settings
from tests.builders.images import image_bytes, write_shards

ALL_FIRST = {method.name: 0 for method in METHODS}


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder whose data are prepared already: shapes in place of icons and photos."""
    for name in ("icons/train", "icons/new-drawings", "icons/new-concepts", "photos/train", "photos/test"):
        write_shards(tmp_path / "data" / name, 42, shards=6)
    return tmp_path


def finish_tuning(run: PlannedRun, root: Path, recall: float) -> None:
    ways = ("image_to_text", "text_to_image")
    figures = {f"00006.{way}_recall_at_{k}": recall for way in ways for k in (1, 10)}
    run.folder(root).path.mkdir(parents=True)
    write_json(run.folder(root).summary, {"evaluation": figures})


def test_every_method_is_tuned_with_the_same_number_of_runs():
    assert {len(method.tried) for method in METHODS} == {5}


def test_the_settings_of_every_run_can_be_read(root):
    runs = [replace(run, setting=setting) for run in tuning_runs() for setting in (ICONS_128, ICONS_32)]
    for run in runs + final_runs(ALL_FIRST, photos=True):
        _, recipe, *flags = run.arguments(root)
        assert read_settings(Path(recipe), flags).train.batch_size == run.setting.batch_size


def test_tuning_names_no_test_part_and_trains_on_nothing_it_measures_on(root):
    for run in tuning_runs():
        flags = run.flags(root)
        tests = [f"/data/{setting.data}/{part}" for setting in SETTINGS for part in setting.tests]
        assert not any(part in " ".join(flags.values()) for part in tests)
        assert len(open_source(flags["data.train"])) == 28  # four of six shards with seven pairs each
        assert flags["evaluation.retrieval"].endswith("00005.tar")


def test_rates_shrink_with_the_root_of_the_batch(root):
    large, small = (PlannedRun("tune", setting, METHODS[0], 0, 2).flags(root) for setting in (ICONS_128, ICONS_32))
    for rate in ("optimizer.learning_rate", "temperature.learning_rate"):
        assert float(small[rate]) == pytest.approx(float(large[rate]) / 2)


def test_the_best_held_out_recall_is_chosen(root):
    for run in tuning_runs():
        finish_tuning(run, root, recall=[0.1, 0.4, 0.3, 0.2, 0.0][run.choice])
    assert set(choices(root).values()) == {1}


def test_the_mini_batch_forms_rho_follows_the_logarithm_of_the_batch(root):
    minibatch = METHODS[1]
    large, small = (PlannedRun("final", setting, minibatch, 0, 2).flags(root) for setting in (ICONS_128, ICONS_32))
    assert float(large["objective.rho"]) - float(small["objective.rho"]) == pytest.approx(math.log(4), abs=0.01)


def test_shrinking_keeps_pairs_and_their_order(tmp_path):
    source = open_source(str(write_shards(tmp_path / "large", 20)))
    small = open_source(str(shrunk(str(tmp_path / "large"), tmp_path / "small")))
    assert all(small[id].captions == source[id].captions for id in range(20))
    assert decode(small[3].image).size == (PIXELS, PIXELS)
    assert decode(small[3].image).tobytes() == decode(image_bytes(3)).tobytes()  # already of that size: the same pixels


@pytest.mark.slow
def test_runs_measure_the_error_on_the_way_are_skipped_when_done_and_resumed_when_not(root):
    setting = Setting("shapes", "icons", ("new-drawings", "new-concepts"), 8, 4, 64, 1)
    clip, _, siglip, *_ = METHODS
    runs = [PlannedRun("final", setting, method, 0, 0) for method in (clip, siglip)]
    assert execute(runs, root, parallel=2) == []
    lines = {run.method.name: read_lines(run.folder(root).evaluation) for run in runs}
    measured = {name: [line for line in found if "normalizer_error.minibatch" in line] for name, found in lines.items()}
    assert [line["samples"] for line in measured["clip"]] == [16, 32, 48, 64]
    assert [line["samples"] for line in measured["siglip"]] == [16, 32, 48, 64]
    assert all("normalizer_error.method" in line for line in measured["clip"])
    assert not any("normalizer_error.method" in line for line in measured["siglip"])  # SigLIP estimates none
    written = runs[0].folder(root).summary.stat().st_mtime_ns
    runs[1].folder(root).summary.unlink()
    assert runs[1].arguments(root)[:2] == ["train", "--resume"]
    assert execute(runs, root, parallel=2) == []
    assert runs[0].folder(root).summary.stat().st_mtime_ns == written
    assert runs[1].is_done(root)


def test_the_table_holds_every_run_the_mean_and_the_error_at_each_point(root):
    run = final_runs(ALL_FIRST, photos=False)[0]
    for seed, recall in ((0, 0.10), (1, 0.30)):
        folder = replace(run, seed=seed).folder(root)
        folder.path.mkdir(parents=True)
        figures = {f"{root}/data/icons/new-drawings.image_to_text_recall_at_1": recall}
        error = {"estimators": {"minibatch": {"mean": 7.5}}}
        summary = {"evaluation": figures, "temperature": 0.05, "seconds": 61.0, "normalizer_error": error}
        folder.summary.write_text(json.dumps(summary))
        append_line(folder.evaluation, {"samples": run.setting.samples // 4, "normalizer_error.minibatch": 3.25})
        append_line(folder.records, {"samples": 128, "temperature": 0.06, "calibration": 0.875})
    text = final_tables([replace(run, seed=seed) for seed in (0, 1, 2)], root)
    assert "| clip | 0 | 10.0 |" in text and "| clip | 1 | 30.0 |" in text and "| clip | 2 |" not in text
    assert "| **clip** | mean of 2 | 20.0 |" in text
    assert "| clip | 0 | - | - | - | - | 3.25 | - | - | 7.50 |" in text
    assert "0.8750" in text
