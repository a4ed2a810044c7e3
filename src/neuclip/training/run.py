"""The run: everything that the training loop works with, and the part of it that a checkpoint stores."""

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
    """Everything that the loop works with. `neuclip doctor` builds a run without a folder: it cannot write anything."""

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
    reference: BuiltModel | None = None  # a frozen model that the objective needs beside the trained one
    folder: RunFolder = field(default_factory=lambda: RunFolder(os.devnull))
    faults: FaultLog = field(default_factory=lambda: FaultLog(None, 1.0))  # the bad samples found so far
    step: int = 0
    saved_step: int = -1  # of the newest checkpoint
    seconds_before: float = 0.0  # training time before the run was resumed
    stored: list[str] = field(default_factory=list)  # locked towers whose features are stored: "image", "text"
    stored_sides: Callable[[Source], Mapping[str, StoredSide]] = lambda source: {}  # their features of any source
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
        """Samples per epoch: the size of the data set, or its weighted size."""
        return self.batches.windows.order.size

    @property
    def order(self) -> str:
        """A description of the order of samples without its seed: it differs between local and remote data."""
        return self.batches.windows.order.description

    def remaining_batches(self) -> Iterator[Batch]:
        """This rank's rows of all batches that are left, from the step that the run has reached."""
        return self.batches.steps(self.samples, self.plan.steps - self.step)

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint. Collective: each rank contributes its part of the objective's state and its
        random generators. Towers and AdamW's moments are the same on all ranks."""
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
                name: gather_values(x[None].to(self.device)).cpu() for name, x in random_state(self.device).items()
            },
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a saved `state`, on any number of ranks."""
        self.built.towers.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        if rank() < len(state["random"]["cpu"]):  # a rank that the saved run did not have keeps its seed
            # Cloned, because torch reads a state from the start of its storage, where a row of a matrix does not begin.
            set_random_state({name: rows[rank()].clone() for name, rows in state["random"].items()}, self.device)
        self.step = self.saved_step = state["step"]
        self.seconds_before = state["seconds"]
