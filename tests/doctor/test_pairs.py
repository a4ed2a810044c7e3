"""Shares of bad pairs and of duplicate captions, against a run's own rule and against drawn batches."""

from __future__ import annotations

import itertools
import random

import pytest

from neuclip.data.faults import FaultLog
from neuclip.data.source import Fault
from neuclip.doctor.findings import Findings
from neuclip.doctor.pairs import estimate_share_with_duplicate, note_bad, note_caption_lengths, share_with_duplicate
from neuclip.doctor.probe import SampleProbe
from neuclip.models.facts import model_facts
from neuclip.settings.reading import read_settings


@pytest.mark.parametrize(
    ("limit", "read", "bad"), [*itertools.product((0, 0.05, 0.5, 1), (99, 100, 500), (0, 1, 37, 40, 99))]
)
def test_the_share_of_bad_pairs_stops_the_run_exactly_where_training_stops(tmp_path, limit, read, bad):
    settings = read_settings(None, ["--data.max_bad_share", str(limit)])
    probe, findings = SampleProbe(read=read), Findings()
    probe.faults["image does not decode"] = bad
    note_bad(findings, probe, settings, pairs=10_000)
    log = FaultLog(tmp_path / "skipped.jsonl", limit)
    faults = tuple(Fault(number, "image does not decode", "x") for number in range(bad))
    log.add(faults)
    stopped = bool(log.note(read, bad)) or bad == read  # no replacement is left
    assert findings["bad.stops_run"] == stopped


def test_the_share_with_a_duplicate_caption_is_that_of_drawn_batches():
    captions = [0] * 30 + [1] * 10 + list(range(2, 62))
    draw = random.Random(0)
    duplicates = 0
    for _ in range(4000):
        batch = draw.sample(captions, 12)
        duplicates += sum(batch.count(caption) > 1 for caption in batch)
    counts = [30, 10, *[1] * 60]
    assert share_with_duplicate(counts, pairs=100, batch=12) == pytest.approx(duplicates / 48_000, abs=0.02)
    assert share_with_duplicate([1, 1, 1], pairs=3, batch=3) == 0


def test_the_estimate_of_duplicate_captions_from_a_sample_has_no_bias():
    captions = [f"{number % 500}" for number in range(10_000)]
    exact = share_with_duplicate([20] * 500, pairs=10_000, batch=64)
    draw = random.Random(0)
    estimates = [estimate_share_with_duplicate(draw.sample(captions, 500), 64) for _ in range(20)]
    assert sum(estimates) / 20 == pytest.approx(exact, rel=0.1)


def test_captions_that_are_cut_name_a_context_that_fits_them():
    settings, findings = read_settings(None, ["--model.name", "tiny"]), Findings()
    look = SampleProbe(read=200, captions=[("a red circle " * 9,)] * 199 + [("q" * 900_000,)])
    note_caption_lengths(findings, look, settings, model_facts("tiny"))
    (warning,) = findings.warnings
    assert "give --model.context_length 32" in warning.remedy
    assert "up to 29 tokens, the longest has at least" in warning.why
