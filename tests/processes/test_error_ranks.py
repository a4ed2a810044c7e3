"""The normalizer error on two real ranks is that of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from neuclip.evaluation.normalizer_error import normalizer_error
from neuclip.objectives.clip import CLIP
from tests.objectives.features import unit

pytestmark = pytest.mark.slow

N, ANCHORS = 30, (1, 7, 30)  # of one anchor the second rank has none


def errors(objective: CLIP | None) -> list[dict[str, Any]]:
    asked = {"logit_scale": 20.0, "eps": 1e-6, "batch_size": 8, "seed": 3, "caption_of": torch.arange(N).clamp(max=26)}
    image, text = unit(N, 6, seed=1), unit(N, 6, seed=2)
    return [normalizer_error(image, text, objective=objective, anchors=count, **asked) for count in ANCHORS]


def on_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(errors(None if rank else CLIP()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_both_ranks_get_what_one_rank_gets_and_only_the_main_one_needs_the_objective(tmp_path):
    multiprocessing.spawn(on_rank, args=(tmp_path,), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first == second
    for found, alone in zip(first, errors(CLIP()), strict=True):
        for name, figures in alone.pop("estimators").items():
            assert found["estimators"][name] == pytest.approx(figures, rel=1e-9)
        assert {key: found[key] for key in alone} == pytest.approx(alone)
