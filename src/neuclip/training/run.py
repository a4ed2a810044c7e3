"""What the training loop works with, and the state of it that a checkpoint keeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from neuclip.data.faults import FaultLog
from neuclip.data.features import StoredSide
from neuclip.data.loader import Batch, Batches
from neuclip.data.source import CaptionCounts, Source
from neuclip.distributed.collectives import gather_values, rank
from neuclip.models.build import BuiltModel
from neuclip.objectives.objective import Objective
from neuclip.plan import Plan
from neuclip.records import RunFolder
from neuclip.settings.sections import Settings
from neuclip.training.large_batch import random_state, set_random_state
from neuclip.training.optimizer import TowerOptimizer


@dataclass
class Run:
    """Everything the loop works with. A run that is only examined has no folder, and nothing can be written to it."""

    settings: Settings
    plan: Plan
    device: torch.device
    precision: torch.dtype
    source: Source
    fingerprint: dict[str, Any]  # of the source
    caption_counts: CaptionCounts
    batches: Batches
    built: BuiltModel
    objective: Objective
    optimizer: TowerOptimizer
    folder: RunFolder = field(default_factory=lambda: RunFolder(os.devnull))
    faults: FaultLog = field(default_factory=lambda: FaultLog(None, 1.0))  # of the samples read
    step: int = 0
    saved_step: int = -1  # of the newest checkpoint
    seconds_before: float = 0.0  # of training, before the run was resumed
    stored: list[str] = field(default_factory=list)  # the towers whose stored features it reads: "image", "text"
    stored_sides: Callable[[Source], Mapping[str, StoredSide]] = lambda source: {}  # the same of any source
    started: float = field(default_factory=time.monotonic)

    @property
    def samples(self) -> int:
        return self.step * self.plan.batch_size

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    @property
    def temperature(self) -> float:
        return 1 / self.built.towers.logit_scale.item()

    @property
    def epoch_samples(self) -> int:
        """Samples that an epoch draws: the size of the data set, or its weighted size."""
        return self.batches.windows.order.size

    @property
    def order(self) -> str:
        """The kind of order, apart from the seed: it differs between local and remote data."""
        return self.batches.windows.order.description

    def remaining_batches(self) -> Iterator[Batch]:
        """This rank's rows of the rest of the run, from the step it has reached."""
        return self.batches.steps(self.samples, self.plan.steps - self.step)

    def state(self) -> dict[str, Any]:
        """Collective: each rank gives its part of the objective's state and its random generators. Towers and AdamW's
        moments are the same on all."""
        return {
            "step": self.step,
            "samples": self.samples,
            "seconds": self.seconds,
            "objective_name": self.settings.objective_name,
            "model_name": self.settings.model.name,
            "data": self.fingerprint,
            "order": self.order,
            "model": self.built.towers.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": {
                name: gather_values(own[None].to(self.device)).cpu() for name, own in random_state(self.device).items()
            },
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any number of ranks."""
        self.built.towers.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        if rank() < len(state["random"]["cpu"]):  # a rank that did not exist before keeps its seed
            # Cloned, because torch reads a state from the start of its storage, and a row is not there.
            set_random_state({name: rows[rank()].clone() for name, rows in state["random"].items()}, self.device)
        self.step = self.saved_step = state["step"]
        self.seconds_before = state["seconds"]
