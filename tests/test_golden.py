"""The first steps of every method are those that were recorded: `python scripts/golden.py` says how."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDED = json.loads((ROOT / "tests" / "golden" / "figures.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    figures = runpy.run_path(str(ROOT / "scripts" / "golden.py"))["figures"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)  # a busy disk would take longer than all steps
        return figures(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("method", RECORDED["runs"])
def test_a_method_has_the_losses_recall_and_normalizer_errors_that_were_recorded(found, method):
    before, now = RECORDED["runs"][method], found["runs"][method]
    assert now["losses"] == pytest.approx(before["losses"], rel=1e-4)  # on another processor: 1e-5
    assert now["error"] == pytest.approx(before["error"], rel=2e-3)
    assert now["recall"] == before["recall"]


def test_every_method_and_source_is_recorded_and_samples_come_in_the_same_order(found):
    assert list(found["runs"]) == list(RECORDED["runs"])
    assert found["sources"] == RECORDED["sources"]
