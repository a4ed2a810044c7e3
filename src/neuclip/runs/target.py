"""What `neuclip eval` and `neuclip.load` can open: a run, a checkpoint or a model, with trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuclip.errors import UserError
from neuclip.machine import choose_device
from neuclip.models.config import HUB, LOCAL, find_config
from neuclip.models.hub import only_if_allowed
from neuclip.models.lora import remove_lora
from neuclip.models.towers import BuiltModel, build_model
from neuclip.records import RunFolder
from neuclip.runs.build import build_towers, resolve_held_out
from neuclip.runs.folder import load_checkpoint, load_newest
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings


def open_target(target: str) -> tuple[BuiltModel, Settings]:
    """A run's folder, a checkpoint inside one, `local-dir:FOLDER`, `hf-hub:NAME`, or `MODEL:WEIGHTS` with a tag of
    open_clip or the path of a file. What is not on this machine is downloaded only if the user allows it."""
    path = Path(target)
    is_checkpoint = path.suffix == ".pt" and path.is_file()
    folder = RunFolder(path.parent.parent if is_checkpoint else path)
    if folder.settings.is_file():
        return load_run(folder, path if is_checkpoint else None)[:2]
    if path.is_file() and path.suffix != ".json":
        raise UserError(f"{target} is not a checkpoint of a run; give MODEL:{target} with the model its weights are of")
    built = _build(target)
    built.towers.to(choose_device("auto"))
    return built, resolve_held_out(Settings())


def _build(target: str) -> BuiltModel:
    if target.startswith((LOCAL, HUB)):
        with only_if_allowed(target):
            return build_model(target)
    model, _, weights = target.partition(":")
    if weights and not Path(target).exists():
        with only_if_allowed(target):
            return build_model(model, pretrained=weights)
    try:
        find_config(target)
    except UserError as error:
        _, _, hint = str(error).partition("; ")
        raise UserError(f"no run, checkpoint or model {target}; {hint.replace('--model.name ', '')}") from error
    raise UserError(
        f"{target} names a model without weights; give {target}:TAG or {target}:FILE, a run, a checkpoint or "
        "local-dir:FOLDER"
    )


def load_run(folder: RunFolder, checkpoint: Path | None = None) -> tuple[BuiltModel, Settings, dict[str, Any]]:
    """The model as it was at a checkpoint, by default the newest, LoRA merged, the run's settings, and the checkpoint's
    state."""
    settings = read_settings(folder.settings, [])
    state = load_checkpoint(checkpoint) if checkpoint else load_newest(folder)
    if state is None:
        raise UserError(f"{folder.path} has no checkpoint; train it first: neuclip train --resume {folder.path}")
    built = build_towers(settings, choose_device(settings.run.device), state)
    built.towers.model.load_state_dict(state["model"])
    remove_lora(built.towers.model)
    return built, settings, state
