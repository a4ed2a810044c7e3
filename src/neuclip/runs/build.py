"""From settings to the parts of a run: data, model, objective, batches. Training, `eval` and `error` all build here."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from glob import iglob
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from neuclip import objectives
from neuclip.data.by_name import is_name
from neuclip.data.decoding import FastDecode, decode, decode_rgb
from neuclip.data.faults import refuse_bad_source
from neuclip.data.held_out import held_out_addresses, named
from neuclip.data.loader import Batches, Decode, Transform
from neuclip.data.locations import expand_braces, is_remote, is_there, parts_of
from neuclip.data.mixture import order_of
from neuclip.data.open import open_training_data
from neuclip.data.source import Source
from neuclip.distributed.collectives import is_main, rank
from neuclip.errors import UserError
from neuclip.files import available_cores
from neuclip.models.export import write_text_files
from neuclip.models.lora import merge
from neuclip.models.pixels import fast_crop
from neuclip.models.tower_modes import apply_modes
from neuclip.models.towers import BuiltModel, build_model, require_same_architecture
from neuclip.objectives.objective import Objective
from neuclip.plan import Plan
from neuclip.records import write_json
from neuclip.runs.pretrained import OWN_CONFIG, load_pretrained
from neuclip.secrets import without_queries
from neuclip.settings.sections import ModelSettings, Settings

PATTERN = re.compile(r"[,{}*?\[]")


def resolve_held_out(settings: Settings) -> Settings:
    """With the held-out sets that `auto` stands for, as a run stores them."""
    retrieval, zero_shot = held_out_addresses(settings)
    return replace(settings, evaluation=replace(settings.evaluation, retrieval=retrieval, zero_shot=zero_shot))


def absolute_paths(settings: Settings) -> Settings:
    """With paths that mean the same from any working folder, as a run stores them; names and URLs stay."""
    model, evaluation = settings.model, settings.evaluation
    scheme, name = ("local-dir:", model.name[10:]) if model.name.startswith("local-dir:") else ("", model.name)
    if scheme or name.endswith(".json"):
        name = absolute_path(name)
    return replace(
        settings,
        data=replace(settings.data, train=absolute_address(settings.data.train)),
        model=replace(model, name=scheme + name, pretrained=absolute_pretrained(model.pretrained)),
        evaluation=replace(
            evaluation,
            retrieval=tuple(_absolute_named(one, absolute_address) for one in evaluation.retrieval),
            zero_shot=tuple(_absolute_named(one, _absolute_task) for one in evaluation.zero_shot),
        ),
    )


def _absolute_named(address: str, absolute: Callable[[str], str]) -> str:
    """Of a held-out set, which may have a name before its address."""
    name, path = named(address)
    return absolute(path) if path == address else f"{name}={absolute(path)}"


def _absolute_task(task: str) -> str:
    return task if is_name(task) else absolute_path(task)


def absolute_pretrained(pretrained: str) -> str:
    """A path may follow what kind of weights it has.

    >>> absolute_pretrained("image=/data/lite0.pth"), absolute_pretrained("openai")
    ('image=/data/lite0.pth', 'openai')
    """
    kind = next((kind for kind in ("local-dir:", "image=") if pretrained.startswith(kind)), "")
    return kind + absolute_path(pretrained.removeprefix(kind))


def absolute_path(path: str) -> str:
    """What is not there stays as it is, and is complained about in the user's own words."""
    return str(Path(path).absolute()) if path and is_there(Path(path)) else path


def absolute_address(address: str) -> str:
    """Each part between commas, with its weight.

    >>> absolute_address("icons-30k,/data/a.csv:2,s3://bucket/{00..19}.tar:3")
    'icons-30k,/data/a.csv:2,s3://bucket/{00..19}.tar:3'
    """
    parts = parts_of(address) if address else []
    return ",".join(f"{_absolute_part(name)}{f':{weight}' if weight > 1 else ''}" for name, weight in parts)


def _absolute_part(name: str) -> str:
    if is_name(name) or is_remote(name):
        return name
    if is_there(Path(name)):
        return absolute_path(name)
    folder, first = Path.cwd(), expand_braces(name)[0]
    found = next(iglob(first, recursive=True), None)  # noqa: PTH207
    # The folder's name must not become a part of the pattern.
    return name if found is None or Path(first).is_absolute() or PATTERN.search(str(folder)) else str(folder / name)


def open_training_source(settings: Settings) -> Source:
    data, batch_size = settings.data, settings.train.batch_size
    if not data.train:
        raise UserError("data.train is not set; give --data.train icons-30k, shards, or a CSV file")
    source = open_training_data(settings)
    refuse_bad_source(source, data.max_bad_share)
    if len(source) == 1:
        raise UserError(
            f"{without_queries(data.train)} holds one sample, and a contrastive loss compares samples; give two or more"
        )
    if len(source) < batch_size:
        kept = f" without the {data.hold_out} that are held out" if data.hold_out else ""
        fewer = ", or a smaller --data.hold_out" if data.hold_out else ""
        raise UserError(
            f"train.batch_size {batch_size} is larger than the data set ({len(source)} samples in "
            f"{without_queries(data.train)}{kept}); give --train.batch_size {len(source)} or less{fewer}"
        )
    return source


def build_towers(settings: Settings, device: torch.device, state: dict[str, Any] | None = None) -> BuiltModel:
    """`state`: of a checkpoint whose model will be loaded. The files that the model was made from may be gone then."""
    model, objective = settings.model, settings.objective
    # The tokenizer of another library is looked for beside the model's files.
    own = state if state and is_from_files(model) and not has_foreign_tokenizer(state) else None
    parent = None if own else load_pretrained(model.pretrained)
    if parent and parent["model_name"] != model.name:
        require_same_architecture(model.name, parent[OWN_CONFIG]["model_cfg"], model.pretrained)
    with contextlib.ExitStack() as stack:
        if saved := own or parent:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_own_model(folder, saved["model"], saved[OWN_CONFIG])
            if has_foreign_tokenizer(saved):
                write_text_files(saved["model_name"], folder)
            model = replace(model, name=f"local-dir:{folder}", pretrained="")
        built = build_model(
            model.name,
            pretrained=model.pretrained,
            image_size=model.image_size,
            crop_scale=settings.data.crop_scale,
            initial_bias=model.bias_initial if objective.uses_bias else None,
        )
    if built.towers.logit_bias is not None:
        # A model may bring a bias that the objective does not use: it would be a parameter without a gradient.
        built.towers.logit_bias.requires_grad_(objective.uses_bias)
    if not built.has_trained_weights:
        built.towers.set_temperature(settings.temperature.initial)
    if model.gradient_checkpointing:
        built.towers.model.set_grad_checkpointing()
    apply_modes(built.towers, settings.model)
    built.towers.to(device)
    return built


def is_from_files(model: ModelSettings) -> bool:
    pretrained = model.pretrained.partition("=")[2] or model.pretrained
    return model.name.startswith("local-dir:") or model.name.endswith(".json") or Path(pretrained).is_absolute()


def has_foreign_tokenizer(state: dict[str, Any]) -> bool:
    return bool(state[OWN_CONFIG]["model_cfg"]["text_cfg"].get("hf_tokenizer_name"))


def open_clip_config(built: BuiltModel) -> dict[str, Any]:
    """What a checkpoint needs beside its weights to become a model without the files that the model was made from."""
    return {"model_cfg": built.config, "preprocess_cfg": dict(getattr(built.towers.model.visual, "preprocess_cfg", {}))}


def write_own_model(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """The model of a checkpoint as a folder for open_clip."""
    contiguous = {name: tensor.contiguous().clone() for name, tensor in merge(weights).items()}
    save_file(contiguous, folder / "open_clip_model.safetensors")
    write_json(folder / "open_clip_config.json", config)


def build_objective(settings: Settings, built: BuiltModel, dataset_size: int, epoch_samples: int = 0) -> Objective:
    """`epoch_samples`: samples per epoch of weighted data; 0: the data set's size."""
    return objectives.build_objective(
        settings.objective_name,
        settings.objective,
        embed_dim=built.embed_dim,
        dataset_size=dataset_size,
        epoch_samples=epoch_samples,
        total_samples=Plan.of(settings).samples,
    )


def image_preparation(settings: Settings, built: BuiltModel) -> tuple[Decode, Transform]:
    """From bytes to what the image tower takes, in training."""
    if not settings.data.augments:
        return decode_rgb, built.transform  # as in evaluation
    if settings.data.pixels == "fast":
        return FastDecode(built.image_size, settings.data.crop_scale[0]), fast_crop(built.train_transform)
    return decode, built.train_transform


def build_batches(settings: Settings, source: Source, built: BuiltModel, plan: Plan) -> Batches:
    workers, cores = settings.data.workers, available_cores()
    if is_main() and workers > cores:
        print(
            f"data.workers is {workers} and there are {cores} cores: workers will compete with training for CPU; "
            f"give --data.workers {max(1, cores - 1)}",
            file=sys.stderr,
        )
    decoder, transform = image_preparation(settings, built)
    return Batches(
        source,
        order_of(source, settings.run.seed),
        batch_size=plan.batch_size,
        decode=decoder,
        transform=transform,
        tokenize=built.tokenize,
        seed=settings.run.seed,
        workers=workers,
        rank=rank(),
        ranks=plan.ranks,
    )
