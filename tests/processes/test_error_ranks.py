"""The normalizer error on two real ranks is that of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from neuclip.distributed.collectives import rank
from neuclip.evaluation.normalizer_error import normalizer_error
from neuclip.objectives.clip import CLIP
from tests.builders.processes import on_ranks
from tests.objectives.features import unit

N, ANCHORS = 30, (1, 7, 30)  # of one anchor the second rank has none


def errors(objective: CLIP | None) -> list[dict[str, Any]]:
    asked = {"logit_scale": 20.0, "eps": 1e-6, "batch_size": 8, "seed": 3, "caption_of": torch.arange(N).clamp(max=26)}
    image, text = unit(N, 6, seed=1), unit(N, 6, seed=2)
    return [normalizer_error(image, text, objective=objective, anchors=count, **asked) for count in ANCHORS]


def save_errors(folder: Path) -> None:
    distributed.init_process_group("gloo")
    torch.save(errors(None if rank() else CLIP()), folder / f"{rank()}.pt")
    distributed.destroy_process_group()


def test_both_ranks_get_what_one_rank_gets_and_only_the_main_one_needs_the_objective(tmp_path):
    assert [ended.code for ended in on_ranks(2, save_errors, tmp_path)] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first == second
    for found, alone in zip(first, errors(CLIP()), strict=True):
        for name, figures in alone.pop("estimators").items():
            assert found["estimators"][name] == pytest.approx(figures, rel=1e-9)
        assert {key: found[key] for key in alone} == pytest.approx(alone)
