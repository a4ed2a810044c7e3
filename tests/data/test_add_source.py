"""A new kind of source is one class and one row of the table in data/open.py: everything else follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from neuclip.data.captions import Captions
from neuclip.data.fingerprint import fingerprint
from neuclip.data.sample import BadSample, Sample

import neuclip
from neuclip.cli.data import run
from neuclip.data import open as opening
from neuclip.data.convert import convert
from neuclip.data.held_out import HeldOutSets
from neuclip.data.open import Kind, OpenOptions, open_source
from neuclip.data.source import Source
from neuclip.doctor.diagnosis import examine
from neuclip.errors import UserError
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import EvaluationSettings, Settings
from tests.data.small_shards import contents
from tests.images import caption, image_bytes, write_csv

COUNT = 24


class PairsFile(Source):
    """One pair per line: image > caption."""

    kind = "pairs"

    def __init__(self, name: str, files: list[Path], options: OpenOptions):
        self.name, self.files = name, files
        self._lines = [line.split(" > ") for line in files[0].read_text().splitlines()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, id: int) -> Sample:
        self.check_id(id)
        image, text = self._lines[id]
        try:
            return Sample((self.files[0].parent / image).read_bytes(), (text,))
        except OSError as error:
            raise BadSample("image file cannot be read", self.where(id)) from error

    def where(self, id: int) -> str:
        return f"{self.files[0]} line {id + 1}"

    def caption_pieces(self) -> Iterator[Captions]:
        yield Captions.of([text] for _, text in self._lines)


@pytest.fixture(autouse=True)
def new_kind(monkeypatch):
    monkeypatch.setattr(opening, "KINDS", [*opening.KINDS, Kind((".pairs",), PairsFile)])


def write_pairs(folder: Path, numbers: range) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        (folder / f"{number}.png").write_bytes(image_bytes(number))
    lines = [f"{number}.png > {caption(number)}" for number in numbers]
    (folder / "shapes.pairs").write_text("\n".join(lines))
    return folder / "shapes.pairs"


@pytest.fixture
def pairs(tmp_path) -> Path:
    return write_pairs(tmp_path / "train", range(COUNT))


def test_it_is_opened_by_its_ending_alone_or_with_others(tmp_path, pairs):
    source = open_source(str(pairs))
    assert (source.name, len(source), source.kind) == ("shapes", COUNT, "pairs")
    assert source[3] == Sample(image_bytes(3), (caption(3),)) and source.captions()[3] == caption(3)
    mixture = open_source(f"{pairs}:2,{write_csv(tmp_path / 'csv', 4)}")
    assert mixture.kind == "pairs+csv" and mixture[COUNT].captions == (caption(0),)


def test_its_ending_is_known_wherever_endings_are(tmp_path, pairs):
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(UserError, match=r"known are .*\.pairs"):
        open_source(str(tmp_path / "notes.md"))
    with pytest.raises(UserError, match="only tar shards can be remote"):
        open_source("https://host/shapes.pairs")
    with pytest.raises(UserError, match="holds no tar shards, and other data need no index"):
        run(["index", str(pairs)])


def test_it_has_the_fingerprint_of_the_same_pairs_in_other_files(tmp_path, pairs):
    assert fingerprint(open_source(str(pairs))) == fingerprint(open_source(str(write_csv(tmp_path / "csv", COUNT))))


def test_it_is_converted(tmp_path, pairs):
    source = open_source(str(pairs))
    assert convert(source, tmp_path / "shards", shard_size=10).samples == COUNT
    assert contents(open_source(str(tmp_path / "shards"))) == contents(source)


def test_it_is_trained_on_held_out_and_examined(tmp_path, pairs):
    held_out = write_pairs(tmp_path / "test", range(COUNT, COUNT + 8))
    evaluation = EvaluationSettings(retrieval=(str(held_out),), zero_shot=())
    assert list(HeldOutSets.open(Settings(evaluation=evaluation)).retrieval) == [str(held_out)]
    settings = read_settings(
        None,
        f"""--data.train {pairs} --evaluation.retrieval {held_out} --run.folder {tmp_path}/runs
        --run.threads 1 --data.workers 0 --model.image_size 32 --train.batch_size 8 --train.samples 16
        --evaluation.error_anchors 0 --objective.name clip""".split(),
    )
    findings, probe = examine(settings)
    assert findings["data.kind"] == "pairs" and findings["data.files"] == 1 and findings["data.pairs"] == COUNT
    assert findings["data.file_bytes"] == pairs.stat().st_size and probe.read == COUNT and probe.bad == 0
    summary = json.loads((neuclip.train(settings) / "summary.json").read_text())
    assert summary["samples_seen"] == 16 and any(str(held_out) in figure for figure in summary["evaluation"])
