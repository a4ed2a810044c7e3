"""A run: settings turned into towers, objective, optimizer and data, with the state that a checkpoint keeps."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.data.cores import available_cores
from neuclip.data.fast_decoding import FastDecode
from neuclip.data.faults import too_many_unindexed
from neuclip.data.fingerprint import fingerprint
from neuclip.data.loader import Batches
from neuclip.data.mixture_order import order_of
from neuclip.data.open import open_training_data
from neuclip.data.sample import Batch
from neuclip.data.source import Source
from neuclip.data.transforms import decode
from neuclip.distributed.collectives import is_main, rank, world_size
from neuclip.distributed.error_sync import all_gather_str, main_first, on_main, raise_together, sync_errors
from neuclip.errors import RunFailed, UserError
from neuclip.models.pixels import fast_crop
from neuclip.models.towers import BuiltModel, build_model
from neuclip.objectives.objective import Objective
from neuclip.objectives.registry import build_objective
from neuclip.records import RunFolder
from neuclip.runs.checkpoint import save_checkpoint
from neuclip.settings.secrets import without_queries
from neuclip.settings.sections import Settings
from neuclip.training.optimizer import TowerOptimizer
from neuclip.training.precision import choose_device, choose_precision
from neuclip.training.randomness import all_gather_random_states, continue_random_state
from neuclip.training.truncated_captions import TruncatedCaptions


@dataclass
class Run:
    """Everything the loop works with."""

    settings: Settings
    folder: RunFolder
    device: torch.device
    precision: torch.dtype
    source: Source
    fingerprint: dict[str, Any]
    data: Batches
    built: BuiltModel
    objective: Objective
    optimizer: TowerOptimizer
    truncated_captions: TruncatedCaptions
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

    @property
    def epoch_samples(self) -> int:
        """Samples that an epoch draws: the data set's size, or with weights what they make of it."""
        return self.data.windows.order.size

    @property
    def order(self) -> str:
        """How ids follow each other, beside the seed: equal data may lie here or elsewhere."""
        return self.data.windows.order.about

    def batches(self) -> Iterator[Batch]:
        """This process's rows of the rest of the run, from the step it has reached."""
        return self.data.steps(self.samples, self.total_steps - self.step)

    def save(self) -> None:
        """Collective: each process gives its part of the objective's state and its generators', the main one writes.
        Towers and AdamW's moments are equal in all."""
        state = {
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
            "random": all_gather_random_states(self.device),
            "truncated_captions": self.truncated_captions.all_gather_counts(self.device),
        }
        keep = self.settings.checkpoint.keep
        on_main(lambda: save_checkpoint(self.folder.checkpoints, state, samples=self.samples, keep=keep))

    def load(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, on any number of processes; refuse the state of another model, objective or
        data set."""
        mine = {"objective_name": self.settings.objective_name, "model_name": self.settings.model.name}
        for key, value in mine.items():
            if state[key] != value:
                what = key.removesuffix("_name")
                raise UserError(
                    f"{self.folder.path} was trained with {what} {state[key]}, not {value}; "
                    f"resume with --{what}.name {state[key]}, or start a new run"
                )
        self._refuse_other_data(state)
        self.built.towers.model.load_state_dict(state["model"])
        self.objective.load_state_dict(state["objective"])
        self.optimizer.load_state_dict(state["optimizer"])
        continue_random_state(state["random"], self.device)
        self.step, self.seconds_before = state["step"], state["seconds"]
        self.truncated_captions.before = state["truncated_captions"]

    def _refuse_other_data(self, state: dict[str, Any]) -> None:
        """Wherever they lie: the pairs, and how they follow each other, must be what they were."""
        data = without_queries(self.settings.data.train)
        if state["data"] != self.fingerprint:
            raise RunFailed(
                f"the data {data} are not those that {self.folder.path} was started with "
                f"({state['data']['count']} samples then, {self.fingerprint['count']} now, or other captions); "
                "bring back the old data, or start a new run"
            )
        if state["order"] != self.order:
            raise RunFailed(
                f"{self.folder.path} was trained in another order of samples ({state['order']}) than {data} gives now "
                f"({self.order}), so that some would come twice and some never; continue on the data where they lay "
                "then, local or remote, or start a new run"
            )


def build_run(settings: Settings, folder: RunFolder) -> Run:
    """Collective. Fails here, in the first seconds, for whatever in the settings cannot work."""
    source = main_first(lambda: open_training_source(settings))
    with sync_errors():
        run = assembled(settings, folder, source)
    check_common_data(run)
    return run


def assembled(settings: Settings, folder: RunFolder, source: Source) -> Run:
    device = choose_device(settings.run.device)
    precision = choose_precision(settings.run.precision, device)
    set_threads(settings.run.threads, device)
    torch.manual_seed(settings.run.seed)
    built = build_towers(settings, device)
    refuse_single_images(settings, built)
    total_steps = settings.train.samples // settings.train.batch_size
    data = batches_of(source, settings, built)
    objective = objective_for(settings, built, len(source), data.windows.order.size).to(device)
    if rank():  # weights begin alike in all processes, dropout does not
        torch.manual_seed(settings.run.seed + rank())
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
        data=data,
        built=built,
        objective=objective,
        optimizer=optimizer,
        truncated_captions=TruncatedCaptions(built.tokenize),
        total_steps=total_steps,
    )


def refuse_single_images(settings: Settings, built: BuiltModel) -> None:
    """BatchNorm divides by the deviation over the images of a forward pass; one alone has none."""
    share = settings.train.batch_size // world_size()
    smallest = share // math.ceil(share / (settings.train.micro_batch_size or share))  # chunk, as accumulation.py cuts
    if smallest == 1 and any(isinstance(module, _BatchNorm) for module in built.towers.modules()):
        field, least = ("batch_size", 2 * world_size()) if share == 1 else ("micro_batch_size", 2 + share % 2)
        raise UserError(
            f"{settings.model.name} has BatchNorm, which cannot train on one image at a time; "
            f"give --train.{field} {least} or more"
        )


def objective_for(settings: Settings, built: BuiltModel, dataset_size: int, epoch_samples: int = 0) -> Objective:
    """`epoch_samples` as in `build_objective`: what counts epochs only does so in training."""
    batch_size = settings.train.batch_size
    return build_objective(
        settings.objective_name,
        settings.objective,
        embed_dim=built.embed_dim,
        dataset_size=dataset_size,
        epoch_samples=epoch_samples,
        total_samples=settings.train.samples // batch_size * batch_size,
    )


def batches_of(source: Source, settings: Settings, built: BuiltModel) -> Batches:
    if is_main() and settings.data.workers > available_cores():
        print(
            f"data.workers is {settings.data.workers} and there are {available_cores()} cores: workers take "
            f"turns, and take them from the towers; give --data.workers {max(1, available_cores() - 1)}",
            file=sys.stderr,
        )
    fast = settings.data.pixels == "fast"
    return Batches(
        source,
        order_of(source, settings.run.seed),
        batch_size=settings.train.batch_size,
        decode=FastDecode(built.image_size, settings.data.crop_scale[0]) if fast else decode,
        transform=fast_crop(built.train_transform) if fast else built.train_transform,
        tokenize=built.tokenize,
        seed=settings.run.seed,
        workers=settings.data.workers,
        rank=rank(),
        ranks=world_size(),
    )


def set_threads(asked: int, device: torch.device) -> None:
    """0 leaves PyTorch's choice to a process that is alone. torchrun sets 1 for each of several, whatever the machine
    has; on a CPU they share its cores instead."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world_size() > 1 else 1
    if asked:
        torch.set_num_threads(asked)
    elif beside > 1 and device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, available_cores() // beside))


def check_common_data(run: Run) -> None:
    """Collective. Processes on several machines must see the same data: an id means one sample everywhere."""
    seen = all_gather_str(f"{run.fingerprint['count']:,} samples ({run.fingerprint['sha256'][:8]})", run.device)
    if len(set(seen)) > 1:
        raise_together(UserError(f"processes see different data: {', '.join(seen)}; give all the same files"))


def open_training_source(settings: Settings) -> Source:
    data, batch_size = settings.data, settings.train.batch_size
    if not data.train:
        raise UserError("data.train is not set; give --data.train icons-30k, shards, or a CSV file")
    source = open_training_data(data)
    if message := too_many_unindexed(source, data.max_bad_share):
        raise RunFailed(message)
    if len(source) < batch_size:
        raise UserError(
            f"train.batch_size {batch_size} is larger than the data set ({len(source)} samples in "
            f"{without_queries(data.train)}); "
            f"give --train.batch_size {len(source)} or less"
        )
    return source


def build_towers(settings: Settings, device: torch.device) -> BuiltModel:
    model = settings.model
    built = build_model(
        model.name,
        pretrained=model.pretrained,
        image_size=model.image_size,
        crop_scale=settings.data.crop_scale,
        initial_bias=settings.objective.initial_bias(settings.train.batch_size),
    )
    if built.towers.logit_bias is not None:
        # In a model that brings a bias, for the softmax objectives it would be a parameter without a gradient.
        built.towers.logit_bias.requires_grad_(settings.objective.uses_bias)
    if not (model.pretrained or model.name.startswith("local-dir:")):
        built.towers.set_temperature(settings.temperature.initial)
    if model.gradient_checkpointing:
        built.towers.model.set_grad_checkpointing()
    built.towers.to(device)
    return built
