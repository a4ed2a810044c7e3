"""data.hold_out through a whole run: train, stop, resume, eval, error and doctor see the same two sides."""

from __future__ import annotations

import json

import pytest

from neuclip import api
from neuclip.cli.main import main
from neuclip.data.loader import Batches
from neuclip.errors import UserError
from neuclip.records import RunFolder, read_lines
from neuclip.runs import lifecycle
from neuclip.settings.reading import read_settings
from tests.builders.images import write_csv, write_shards
from tests.builders.runs import BATCH, losses

pytestmark = pytest.mark.slow
HELD_OUT = ["--data.hold_out", "10", "--evaluation.every", str(4 * BATCH)]


class Halt(Exception):
    pass


def test_a_run_never_trains_on_what_it_holds_out_and_resumes_to_the_bit(
    small_settings, tmp_path, monkeypatch, capfd
):  # fmt: skip
    shards = str(write_shards(tmp_path / "shapes", 40))
    flags = ["--data.train", shards, *HELD_OUT]
    whole = RunFolder(api.train(small_settings(tmp_path, *flags, "--run.name", "whole")))
    summary = json.loads(whole.summary.read_text())
    assert summary["evaluation"]["shapes#held-out.images"] == 10
    assert "30 samples, 1 caption each" in capfd.readouterr().err
    steps, seen = Batches.steps, []

    def interrupted(self, *arguments):
        for number, batch in enumerate(steps(self, *arguments)):
            if number == 5:
                raise Halt
            seen.extend(self.windows.source.where(id) for id in batch.ids.tolist())
            yield batch

    monkeypatch.setattr(Batches, "steps", interrupted)
    with pytest.raises(Halt):
        api.train(small_settings(tmp_path, *flags, "--run.name", "part"))
    monkeypatch.undo()
    part = RunFolder(tmp_path / "part")
    api.train(read_settings(part.settings), resume=part.path)
    assert losses(part.path) == losses(whole.path) and read_lines(part.evaluation) == read_lines(whole.evaluation)
    with pytest.raises(UserError, match=r"another data\.hold_out"):
        api.train(read_settings(part.settings, ["--data.hold_out", "11"]), resume=part.path)
    source = lifecycle.open_data(read_settings(part.settings))
    assert len(set(seen) | {source.where(id) for id in range(30)}) == 30  # five steps of eight saw only these


def test_eval_error_and_doctor_know_what_is_held_out(small_settings, tmp_path, capsys):
    table = str(write_csv(tmp_path / "pairs", 40))
    run = api.train(small_settings(tmp_path, "--data.train", table, *HELD_OUT, "--run.name", "r"))
    capsys.readouterr()
    assert main(["eval", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    summary = json.loads(RunFolder(run).summary.read_text())
    assert figures == summary["evaluation"] and figures["pairs#held-out.images"] == 10
    odd = tmp_path / "pairs" / "odd.csv"
    header, rows = (tmp_path / "pairs" / "pairs.csv").read_text().split("\n", 1)
    odd.write_text(f"number,words\n{rows}" if header.startswith("filepath") else f"words,number\n{rows}")
    assert main(["eval", str(run), "--retrieval", str(odd), "--json"]) == 2
    assert "name it with --evaluation.image_column" in capsys.readouterr().err
    columns = ["--evaluation.image_column", "number", "--evaluation.caption_column", "words"]
    assert main(["eval", str(run), "--retrieval", str(odd), *columns, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[f"{odd}.images"] == 40
    assert main(["error", str(run), "--anchors", "30", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["anchors"] == 30  # there are no more in training
    small = ["--train.batch_size", "8", "--json"]
    assert main(["doctor", table, "--data.hold_out", "10", *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data.pairs"] == 30 and found["evaluation.sets"] == 1
    assert not [warning for warning in found["warnings"] if "held-out" in str(warning) or "both" in str(warning)]
    assert main(["doctor", table, "--evaluation.retrieval", str(odd), *small]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert any("no column looks like the image" in problem["what"] for problem in problems)
    assert main(["doctor", str(odd), "--evaluation.retrieval", table, "--data.image_column", "number", *small]) == 1
