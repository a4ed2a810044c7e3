"""The page: complete for every objective and kind of data, within the terminal's width, and safe to print."""

from __future__ import annotations

import pytest

from neuclip.doctor import pairs
from neuclip.doctor.diagnosis import examine
from neuclip.doctor.findings import Findings
from neuclip.doctor.page import page_text
from neuclip.settings.reading import read_settings
from tests.builders.images import image_bytes, write_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("page") / "shapes", 140)


def examined(data, flags: str = "", ranks: int = 1) -> Findings:
    settings = read_settings(None, ["--data.train", str(data), "--train.batch_size", "32", *flags.split()])
    return examine(settings, ranks=ranks, sample=3)[0]


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ("--objective clip", ["objective   clip; its state takes 0 bytes", "can fall to 0.01"]),
        ("--objective siglip", ["objective   siglip;", "prototypes by default"]),
        ("--objective fastclip --objective.temperature constant", ["starts at 0.07, constant"]),
        ("--objective fastclip --objective.temperature individual", ["starts at 0.07, one per sample"]),
        ("--objective amorlip", ["objective   amorlip;"]),
        ("--objective.restart rolling", ["m = 1,024 prototypes for n = 140 candidates"]),
        ("--objective.restart_every 0", ["never replaced"]),
        ("--train.micro_batch_size 5", ["2 ranks; per rank 16 pairs per step, 5 per forward pass"]),
    ],
)
def test_the_page_has_the_figures_of_every_objective(shards, flags, lines):
    page = page_text(examined(shards, flags, ranks=2), width=200)
    assert all(line in page for line in lines) and "None" not in page
    assert page.splitlines()[-1] == "ready: training would start"


def test_remote_shards_and_an_estimate_of_duplicates_are_described(shards, monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.setattr(pairs, "CAPTIONS_COMPARED", 100)
    page = page_text(examined(f"file://{shards}"), width=200)
    assert "2 shards to download, mixed 16 at a time" in page and "(estimated from 3 captions)" in page


def test_the_number_of_captions_stands_on_the_page_also_of_held_out_data(shards, tmp_path):
    assert "captions    140 samples, 1 caption each\n" in page_text(examined(shards), width=200)
    (tmp_path / "a.png").write_bytes(image_bytes(0))
    (tmp_path / "b.png").write_bytes(image_bytes(1))
    rows = "".join(f"{'ab'[number % 2]}.png,caption {number}\n" for number in range(40))
    (tmp_path / "rows.csv").write_text(f"image,caption\n{rows}")
    page = page_text(examined(tmp_path / "rows.csv", f"--evaluation.retrieval mine={tmp_path}/rows.csv"), width=200)
    assert "captions    40 samples, 1 caption each\n" in page
    assert "2 different images: rows of one image are separate samples in training, and one sample where" in page
    assert "held out    mine: 2 samples with 40 captions (20 each)\n" in page


def test_captions_cannot_command_the_terminal_and_are_cut_to_its_width(shards, monkeypatch):
    monkeypatch.chdir(shards.parent)
    findings = examined(shards.name)
    findings["sample.shown"][0]["caption"] = "red\x1b[2J" + "long " * 100
    page = page_text(findings, width=80)
    assert "\x1b" not in page and max(map(len, page.splitlines())) <= 80
