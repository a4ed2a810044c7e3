"""From settings to the parts of a run: data, model, objective, batches. Training, `eval` and `error` all build here."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from neuclip.data.decoding import FastDecode, decode
from neuclip.data.faults import too_many_unindexed
from neuclip.data.held_out import held_out_addresses
from neuclip.data.loader import Batches
from neuclip.data.machine import available_cores
from neuclip.data.open import open_training_data
from neuclip.data.source import Source
from neuclip.distributed.collectives import is_main, rank
from neuclip.errors import RunFailed, UserError
from neuclip.models.pixels import fast_crop
from neuclip.models.towers import BuiltModel, build_model
from neuclip.objectives import registry
from neuclip.objectives.objective import Objective
from neuclip.plan import Plan
from neuclip.settings.secrets import without_queries
from neuclip.settings.sections import Settings


def resolve_held_out(settings: Settings) -> Settings:
    """With the held-out sets that `auto` stands for, as a run stores them."""
    retrieval, zero_shot = held_out_addresses(settings)
    return replace(settings, evaluation=replace(settings.evaluation, retrieval=retrieval, zero_shot=zero_shot))


def open_training_source(settings: Settings) -> Source:
    data, batch_size = settings.data, settings.train.batch_size
    if not data.train:
        raise UserError("data.train is not set; give --data.train icons-30k, shards, or a CSV file")
    source = open_training_data(settings)
    if message := too_many_unindexed(source, data.max_bad_share):
        raise RunFailed(message)
    if len(source) < batch_size:
        raise UserError(
            f"train.batch_size {batch_size} is larger than the data set ({len(source)} samples in "
            f"{without_queries(data.train)}); give --train.batch_size {len(source)} or less"
        )
    return source


def build_towers(settings: Settings, device: torch.device) -> BuiltModel:
    model, objective = settings.model, settings.objective
    built = build_model(
        model.name,
        pretrained=model.pretrained,
        image_size=model.image_size,
        crop_scale=settings.data.crop_scale,
        initial_bias=objective.initial_bias(settings.train.batch_size),
    )
    if built.towers.logit_bias is not None:
        # A model may bring a bias that the objective does not use: it would be a parameter without a gradient.
        built.towers.logit_bias.requires_grad_(objective.uses_bias)
    if not (model.pretrained or model.name.startswith("local-dir:")):
        built.towers.set_temperature(settings.temperature.initial)
    if model.gradient_checkpointing:
        built.towers.model.set_grad_checkpointing()
    built.towers.to(device)
    return built


def build_objective(settings: Settings, built: BuiltModel, dataset_size: int, epoch_samples: int = 0) -> Objective:
    """`epoch_samples`: samples per epoch of weighted data; 0: the data set's size."""
    return registry.build_objective(
        settings.objective_name,
        settings.objective,
        embed_dim=built.embed_dim,
        dataset_size=dataset_size,
        epoch_samples=epoch_samples,
        total_samples=Plan.of(settings).samples,
    )


def build_batches(settings: Settings, source: Source, built: BuiltModel, plan: Plan) -> Batches:
    workers, cores = settings.data.workers, available_cores()
    if is_main() and workers > cores:
        print(
            f"data.workers is {workers} and there are {cores} cores: workers will compete with training for CPU; "
            f"give --data.workers {max(1, cores - 1)}",
            file=sys.stderr,
        )
    fast = settings.data.pixels == "fast"
    return Batches(
        source,
        source.order(settings.run.seed),
        batch_size=plan.batch_size,
        decode=FastDecode(built.image_size, settings.data.crop_scale[0]) if fast else decode,
        transform=fast_crop(built.train_transform) if fast else built.train_transform,
        tokenize=built.tokenize,
        seed=settings.run.seed,
        workers=workers,
        rank=rank(),
        ranks=plan.ranks,
    )
