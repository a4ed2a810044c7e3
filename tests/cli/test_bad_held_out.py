"""Held-out sets with bad samples, through a whole run and `neuclip eval`: nothing is dropped silently."""

from __future__ import annotations

import json

import pytest

from neuclip import api
from neuclip.cli.main import main
from neuclip.errors import RunFailed
from neuclip.records import RunFolder, read_lines
from neuclip.runs.folder import checkpoints_in
from neuclip.settings.reading import read_settings
from tests.builders.images import write_shards

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spoilt_run(tmp_path_factory):
    """Trained for two steps, the held-out sets with 1 of 40 and 8 of 40 images broken measured after each."""
    folder = tmp_path_factory.mktemp("spoilt")
    for name, spoilt in (("train", [3]), ("few", [3]), ("many", range(8))):
        write_shards(folder / name, 40, spoilt=spoilt)
    flags = f"""--run.folder {folder} --run.name r --run.threads 1 --data.workers 0 --model.image_size 32
        --train.batch_size 32 --train.samples 64 --objective clip --data.train {folder / "train"}
        --evaluation.every 32 --evaluation.error_anchors 0 --evaluation.gallery 2
        --evaluation.retrieval {folder / "many"},{folder / "few"}""".split()
    return RunFolder(api.train(read_settings(None, flags)))


def test_a_run_finishes_despite_a_spoilt_held_out_set_and_lists_what_is_missing(spoilt_run):
    few, many = f"{spoilt_run.path.parent}/few", f"{spoilt_run.path.parent}/many"
    summary = json.loads(spoilt_run.summary.read_text())
    figures = summary["evaluation"]
    assert (figures[f"{few}.images"], figures[f"{few}.skipped"]) == (39, 1)
    assert f"{few}.image_to_text_recall_at_1" in figures and f"{many}.image_to_text_recall_at_1" not in figures
    assert summary["not_measured"][many].startswith("8 of 40 samples cannot be used (20.0%")
    assert summary["skipped"] == {"image does not decode": 1} and summary["skipped_share"] == 1 / 40
    assert summary["skipped_held_out"][many] == {"image does not decode": 8}
    assert all(line[f"{few}.skipped"] == 1 for line in read_lines(spoilt_run.evaluation))
    assert json.loads(spoilt_run.gallery.read_text())["dataset"] == few
    assert checkpoints_in(spoilt_run) and spoilt_run.model.exists()
    assert f"{many} was not measured: 8 of 40" in spoilt_run.report.read_text()


def test_bad_held_out_samples_are_counted_and_only_those_of_training_are_listed(spoilt_run):
    api.train(read_settings(spoilt_run.settings, []), resume=spoilt_run.path)
    assert [line["id"] for line in read_lines(spoilt_run.skipped)] == [3]
    assert json.loads(spoilt_run.summary.read_text())["skipped"] == {"image does not decode": 1}


def test_eval_prints_what_it_can_measure_and_fails_for_the_rest(spoilt_run, capsys):
    few, many = f"{spoilt_run.path.parent}/few", f"{spoilt_run.path.parent}/many"
    assert main(["eval", str(spoilt_run.path)]) == 1
    printed = capsys.readouterr()
    assert f"{few}: 1 of 40 samples could not be used: 1 x image does not decode\n" in printed.out
    assert f"neuclip: {many} is not measured: 8 of 40 samples" in printed.err and "--max-bad-share" in printed.err
    assert main(["eval", str(spoilt_run.path), "--max-bad-share", "0.2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures[f"{many}.images"], figures[f"{many}.skipped"], figures[f"{few}.skipped"]) == (32, 8, 1)
    assert f"{many}.image_to_text_recall_at_1" in figures
    with pytest.raises(RunFailed, match="8 of 40"):
        api.evaluate(str(spoilt_run.path))
