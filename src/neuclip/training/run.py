"""What the training loop works with, and the state of it that a checkpoint keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from neuclip.data.loader import Batch, Batches
from neuclip.data.source import CaptionCounts, Source
from neuclip.models.build import BuiltModel
from neuclip.objectives.objective import Objective
from neuclip.plan import Plan
from neuclip.records import RunFolder
from neuclip.settings.sections import Settings
from neuclip.training.batches import TruncatedCaptions
from neuclip.training.optimizer import TowerOptimizer
from neuclip.training.randomness import gather_random_states, restore_random_state


@dataclass(frozen=True)
class StoringTime:
    """What it took to store the features of locked towers."""

    sides: list[str]
    seconds: float  # of this run: next to nothing where all were stored before


@dataclass
class Run:
    """Everything the loop works with."""

    settings: Settings
    folder: RunFolder
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
    truncated_captions: TruncatedCaptions
    step: int = 0
    seconds_before: float = 0.0  # of training, before the run was resumed
    storing: StoringTime | None = None  # where the towers' features are stored
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
            "random": gather_random_states(self.device),
            "truncated_captions": self.truncated_captions.sum_over_ranks(self.device),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any number of ranks."""
        self.built.towers.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_random_state(state["random"], self.device)
        self.step, self.seconds_before = state["step"], state["seconds"]
        self.truncated_captions.before = state["truncated_captions"]
