"""`model.pretrained` as a run or a checkpoint of one: the model that it holds, to be trained further."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from neuclip.errors import UserError
from neuclip.models.config import LOCAL
from neuclip.models.towers import folder_as_name
from neuclip.records import RunFolder
from neuclip.runs.folder import OWN_CONFIG, load_checkpoint, load_newest
from neuclip.settings.sections import Settings


def _is_checkpoint(path: Path) -> bool:
    try:  # mapped: only the names of what is inside are read
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch raises many kinds for other files, which open_clip may know
        return False
    return isinstance(state, dict) and OWN_CONFIG in state


def load_pretrained(pretrained: str) -> dict[str, Any] | None:
    """The state of the checkpoint, or of the newest of the run, that `pretrained` names; None if it names none."""
    path = Path(pretrained)
    if not pretrained or not path.exists():
        return None
    if RunFolder(path).settings.is_file():
        return load_newest(RunFolder(path))
    return load_checkpoint(path) if path.is_file() and _is_checkpoint(path) else None


def resolve_model(settings: Settings) -> Settings:
    """With the model's name: where it is empty, that of the run or folder in `model.pretrained`."""
    model = settings.model
    if model.name:
        return settings
    name, pretrained = folder_as_name("", model.pretrained)
    if not name and (state := load_pretrained(pretrained)):
        name = state["model_name"]
    if not name and not pretrained:
        raise UserError(
            "no model to start from; give a run or the folder of a model: --model.pretrained runs/NAME, or a model of "
            "open_clip: --model.name ViT-B-32 --model.pretrained laion2b_s34b_b79k"
        )
    if not name:
        raise UserError(
            f"model.name is empty, and {pretrained} is no run, checkpoint or folder of a model to take it from; "
            "give --model.name too, or another --model.pretrained"
        )
    name = LOCAL + str(Path(name.removeprefix(LOCAL)).absolute()) if name.startswith(LOCAL) else name
    return replace(settings, model=replace(model, name=name, pretrained=pretrained))
