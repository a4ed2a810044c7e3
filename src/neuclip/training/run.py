"""A run: settings turned into towers, objective, optimizer and data, with the state that a checkpoint keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from neuclip.data.faults import FaultLog
from neuclip.data.fingerprint import fingerprint
from neuclip.data.loader import Batches
from neuclip.data.order import Order
from neuclip.data.sample import Batch
from neuclip.data.source import Source, open_source
from neuclip.distributed import rank, world_size
from neuclip.errors import AskedWrongly, RunFailed
from neuclip.models.towers import BuiltModel, build_model
from neuclip.objectives.objective import Objective
from neuclip.objectives.registry import build_objective
from neuclip.records import RunFolder
from neuclip.settings.sections import Settings
from neuclip.training.checkpoint import save_checkpoint
from neuclip.training.optimizer import TowerOptimizer
from neuclip.training.precision import choose_device, choose_precision


@dataclass
class Run:
    """Everything the loop works with."""

    settings: Settings
    folder: RunFolder
    device: torch.device
    precision: torch.dtype
    source: Source
    fingerprint: dict[str, Any]
    built: BuiltModel
    objective: Objective
    optimizer: TowerOptimizer
    total_steps: int
    step: int = 0
    seconds_before: float = 0.0  # of earlier sittings, for a resumed run
    started: float = field(default_factory=time.monotonic)

    @property
    def samples(self) -> int:
        return self.step * self.settings.train.batch_size

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    @property
    def temperature(self) -> float:
        return 1 / self.built.towers.logit_scale.item()

    def batches(self) -> Iterator[Batch]:
        """The rest of the run, from the step it has reached."""
        settings = self.settings
        batches = Batches(
            self.source,
            Order(len(self.source), settings.run.seed),
            batch_size=settings.train.batch_size,
            transform=self.built.train_transform,
            tokenize=self.built.tokenize,
            seed=settings.run.seed,
            workers=settings.data.workers,
            rank=rank(),
            ranks=world_size(),
        )
        return batches.steps(self.samples, self.total_steps - self.step)

    def fault_log(self) -> FaultLog:
        return FaultLog(self.folder.skipped, self.settings.data.max_bad_share)

    def save(self) -> None:
        state = {
            "step": self.step,
            "samples": self.samples,
            "seconds": self.seconds,
            "objective_name": self.settings.objective_name,
            "model_name": self.settings.model.name,
            "data": self.fingerprint,
            "model": self.built.towers.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        save_checkpoint(self.folder.checkpoints, state, samples=self.samples, keep=self.settings.checkpoint.keep)

    def load(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; refuse the state of another model, objective or data set."""
        mine = {"objective_name": self.settings.objective_name, "model_name": self.settings.model.name}
        for key, value in mine.items():
            if state[key] != value:
                what = key.removesuffix("_name")
                raise AskedWrongly(
                    f"{self.folder.path} was trained with {what} {state[key]}, not {value}; "
                    f"resume with --{what}.name {state[key]}, or start a new run"
                )
        if state["data"] != self.fingerprint:
            raise RunFailed(
                f"the data {self.settings.data.train} has changed since {self.folder.path} was started "
                f"({state['data']['count']} samples then, {self.fingerprint['count']} now, or other captions); "
                "bring back the old data, or start a new run"
            )
        self.built.towers.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.step, self.seconds_before = state["step"], state["seconds"]


def build_run(settings: Settings, folder: RunFolder) -> Run:
    """Fails here, in the first seconds, for whatever in the settings cannot work."""
    device = choose_device(settings.run.device)
    precision = choose_precision(settings.run.precision, device)
    if settings.run.threads:
        torch.set_num_threads(settings.run.threads)
    source = open_training_source(settings)
    torch.manual_seed(settings.run.seed)
    built = build_towers(settings, device)
    total_steps = settings.train.samples // settings.train.batch_size
    objective = build_objective(settings.objective_name, settings.objective, embed_dim=built.embed_dim).to(device)
    optimizer = TowerOptimizer(
        built.towers, settings.optimizer, settings.temperature, total_steps=total_steps, precision=precision
    )
    return Run(
        settings=settings,
        folder=folder,
        device=device,
        precision=precision,
        source=source,
        fingerprint=fingerprint(source),
        built=built,
        objective=objective,
        optimizer=optimizer,
        total_steps=total_steps,
    )


def open_training_source(settings: Settings) -> Source:
    data, batch_size = settings.data, settings.train.batch_size
    if not data.train:
        raise AskedWrongly("data.train is not set; give --data.train icons-30k, shards, or a CSV file")
    source = open_source(data.train, image_column=data.image_column, caption_column=data.caption_column)
    if len(source) < batch_size:
        raise AskedWrongly(
            f"train.batch_size {batch_size} is larger than the data set ({len(source)} samples in {data.train}); "
            f"give --train.batch_size {len(source)} or less"
        )
    return source


def build_towers(settings: Settings, device: torch.device) -> BuiltModel:
    model = settings.model
    built = build_model(
        model.name, pretrained=model.pretrained, image_size=model.image_size, crop_scale=settings.data.crop_scale
    )
    if not (model.pretrained or model.name.startswith("local-dir:")):
        built.towers.set_temperature(settings.temperature.initial)
    if model.gradient_checkpointing:
        built.towers.model.set_grad_checkpointing()
    built.towers.to(device)
    return built
