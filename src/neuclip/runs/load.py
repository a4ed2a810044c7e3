"""Load the model that a user names, to measure or to train it: a run, a checkpoint, a folder, a tag, or the hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from neuclip.data.held_out import held_out_addresses
from neuclip.errors import UserError
from neuclip.files import reading
from neuclip.machine import choose_device
from neuclip.models.build import BuiltModel, build_model
from neuclip.models.config import LOCAL, ModelSource, check, check_preprocess, find_model
from neuclip.models.hub import CONFIG, HUB
from neuclip.models.modes import apply_modes, merge_lora
from neuclip.models.weights import require_same_architecture, with_weights
from neuclip.records import RunFolder
from neuclip.runs.folder import OWN_CONFIG, load_checkpoint, load_newest, stored_settings
from neuclip.settings.sections import ModelSettings, Settings


def open_target(target: str) -> tuple[BuiltModel, Settings]:
    """The model of `target` and its settings. `target` is a run's folder, a checkpoint inside one, `local-dir:FOLDER`,
    `hf-hub:NAME`, or `MODEL:WEIGHTS` with a tag of open_clip or the path of a file. Only `hf-hub:NAME` and a tag allow
    a download."""
    path = Path(target)
    is_checkpoint = path.suffix == ".pt" and path.is_file()
    folder = RunFolder(path.parent.parent if is_checkpoint else path)
    if folder.settings.is_file():
        return load_run(folder, path if is_checkpoint else None)[:2]
    if path.is_file() and path.suffix != ".json":
        raise UserError(f"{target} is not a checkpoint of a run; give MODEL:{target}, where MODEL is its architecture")
    built = _build(target)
    built.towers.to(choose_device("auto"))
    return built, resolve_held_out(Settings())


def _build(target: str) -> BuiltModel:
    model, _, weights = target.partition(":")
    if target.startswith((LOCAL, HUB)):
        return build_model(target)
    if weights and not Path(target).exists():
        return build_model(model, pretrained=weights)
    try:
        find_model(target)
    except UserError as error:
        _, _, hint = str(error).partition("; ")
        raise UserError(f"no run, checkpoint or model {target}; {hint.replace('--model.name ', '')}") from error
    raise UserError(
        f"{target} names a model without weights; give {target}:TAG or {target}:FILE, a run, a checkpoint or "
        "local-dir:FOLDER"
    )


def load_run(folder: RunFolder, checkpoint: Path | None = None) -> tuple[BuiltModel, Settings, dict[str, Any]]:
    """The model at a checkpoint (default: the newest) with LoRA merged, the run's settings, and the checkpoint's state.
    Only the settings of image preparation and device are used: a stranger's run cannot make this machine load other
    files."""
    settings = stored_settings(folder)
    newest = (checkpoint, load_checkpoint(checkpoint)) if checkpoint else load_newest(folder)
    if newest is None:
        raise UserError(f"{folder.path} has no checkpoint; train it first: neuclip train --resume {folder.path}")
    path, state = newest
    built = build_model(checkpoint_source(state, path), crop_scale=settings.data.crop_scale)
    built.towers.to(choose_device(settings.run.device))
    return built, settings, state


def checkpoint_source(state: dict[str, Any], checkpoint: Path) -> ModelSource:
    """The model of a checkpoint: its state, with a tokenizer or text tower of transformers from the run's folder."""
    with reading(checkpoint, "give another checkpoint, or the folder of a model: local-dir:FOLDER"):
        saved, model_files = state[OWN_CONFIG], RunFolder(checkpoint.parent.parent).model
        return ModelSource(
            str(checkpoint),
            check(saved["model_cfg"], checkpoint),
            check_preprocess(saved["preprocess_cfg"], checkpoint),
            merge_lora(state["model"]),
            folder=model_files if model_files.is_dir() else None,
        )


def build_towers(settings: Settings, device: torch.device, saved: ModelSource | None = None) -> BuiltModel:
    """The model to train, each tower in its mode. `saved`: the model of the checkpoint from which the run resumes; the
    files that it was built from at first may no longer exist."""
    model, objective = settings.model, settings.objective
    built = build_model(
        saved or model_source(model),
        image_size=model.image_size,
        context_length=model.context_length,
        crop_scale=settings.data.crop_scale,
        initial_bias=model.bias_initial if objective.uses_bias else None,
    )
    if built.towers.logit_bias is not None:
        # A model may have a bias that the objective does not use: it would be a parameter without a gradient.
        built.towers.logit_bias.requires_grad_(objective.uses_bias)
    if not built.has_trained_weights:
        built.towers.set_temperature(settings.temperature.initial)
    if model.gradient_checkpointing:
        built.towers.model.set_grad_checkpointing()
    apply_modes(built.towers, model)
    built.towers.to(device)
    return built


def model_source(model: ModelSettings) -> ModelSource:
    """The model that `model.name` and `model.pretrained` together describe."""
    pretrained = load_pretrained(model.pretrained)
    if pretrained is None:
        return with_weights(find_model(model.name), model.pretrained)
    checkpoint, state = pretrained
    saved = checkpoint_source(state, checkpoint)
    if state["model_name"] != model.name:
        require_same_architecture(find_model(model.name), saved, model.pretrained)
    return saved


def load_pretrained(pretrained: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `pretrained` names, or the newest of a run, and its state; None if it names neither."""
    path = Path(pretrained)
    if not pretrained or not path.exists():
        return None
    if RunFolder(path).settings.is_file():
        return load_newest(RunFolder(path))
    return (path, load_checkpoint(path)) if path.is_file() and _is_checkpoint(path) else None


def _is_checkpoint(path: Path) -> bool:
    try:  # mapped into memory, so that only the keys are read
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch raises many kinds for other files, which open_clip may be able to read
        return False
    return isinstance(state, dict) and OWN_CONFIG in state


def resolve_held_out(settings: Settings) -> Settings:
    """The settings with the held-out sets that `auto` stands for."""
    retrieval, zero_shot = held_out_addresses(settings)
    return replace(settings, evaluation=replace(settings.evaluation, retrieval=retrieval, zero_shot=zero_shot))


def resolve_model(settings: Settings) -> Settings:
    """The settings with a model name: if it is empty, that of the run or folder in `model.pretrained`."""
    model = settings.model
    if model.name:
        return settings
    pretrained, folder = model.pretrained, Path(model.pretrained.removeprefix(LOCAL))
    if pretrained and (folder / CONFIG).is_file():
        return replace(settings, model=replace(model, name=f"{LOCAL}{folder.absolute()}", pretrained=""))
    if parent := load_pretrained(pretrained):
        return replace(settings, model=replace(model, name=parent[1]["model_name"]))
    if not pretrained:
        raise UserError(
            "no model to start from; give a run or the folder of a model: --model.pretrained runs/NAME, or a model of "
            "open_clip: --model.name ViT-B-32 --model.pretrained laion2b_s34b_b79k"
        )
    raise UserError(
        f"model.name is empty, but {pretrained} is not a run, a checkpoint or the folder of a model to take it from; "
        "give --model.name too, or another --model.pretrained"
    )
