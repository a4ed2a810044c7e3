"""A new kind of source is one class and one row of the table in data/open.py: everything else follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import neuclip
from neuclip.cli.main import main
from neuclip.data import open as opening
from neuclip.data.convert import convert
from neuclip.data.open import Kind, OpenOptions
from neuclip.data.source import FACTS, BadSample, Sample, Source, caption_facts
from neuclip.runs.doctor import examine
from tests.builders.images import caption, image_bytes, write_csv
from tests.builders.reading import content, fingerprint, open_source, refusal, retrieval, settings

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
        image, text = self._lines[id]
        try:
            return Sample((self.files[0].parent / image).read_bytes(), (text,))
        except OSError as error:
            raise BadSample("image file cannot be read", self.where(id)) from error

    def where(self, id: int) -> str:
        return f"{self.files[0]} line {id + 1}"

    def caption_facts(self) -> Iterator[np.ndarray]:
        yield np.array([caption_facts([text]) for _, text in self._lines], dtype=FACTS)


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
    source = open_source(pairs)
    assert (source.name, len(source), source.kind) == ("shapes", COUNT, "pairs")
    assert content(source)[3] == (image_bytes(3), (caption(3),))
    mixture = open_source(f"{pairs}:2,{write_csv(tmp_path / 'csv', 4)}")
    assert mixture.kind == "pairs+csv" and mixture[COUNT].captions == (caption(0),)


def test_its_ending_is_known_wherever_endings_are(tmp_path, pairs, capsys):
    (tmp_path / "notes.md").write_text("x")
    assert "known are " in refusal(tmp_path / "notes.md") and ".pairs" in refusal(tmp_path / "notes.md")
    assert "only tar shards can be remote" in refusal("https://host/shapes.pairs")
    assert main(["data", "index", str(pairs)]) == 2
    assert "contains no tar shards" in capsys.readouterr().err


def test_it_has_the_fingerprint_of_the_same_pairs_in_other_files_and_is_converted(tmp_path, pairs):
    source = open_source(pairs)
    assert fingerprint(source) == fingerprint(open_source(write_csv(tmp_path / "csv", COUNT)))
    assert convert(source, tmp_path / "shards", shard_size=10).samples == COUNT
    assert content(open_source(tmp_path / "shards")) == content(source)


def test_it_is_trained_on_held_out_and_examined(tmp_path, pairs):
    held_out = write_pairs(tmp_path / "test", range(COUNT, COUNT + 8))
    assert len(retrieval(held_out)) == 8
    chosen = settings(
        *f"""--data.train {pairs} --evaluation.retrieval {held_out} --run.folder {tmp_path}/runs --model.name tiny
        --run.threads 1 --data.workers 0 --train.batch_size 8 --train.samples 16
        --evaluation.error_anchors 0 --objective.name clip""".split()
    )
    found = examine(chosen).figures
    assert found["data.kind"] == "pairs" and found["data.pairs"] == COUNT and found["read.bad"] == {}
    summary = json.loads((neuclip.train(chosen) / "summary.json").read_text())
    assert summary["samples_seen"] == 16 and any(str(held_out) in figure for figure in summary["evaluation"])
