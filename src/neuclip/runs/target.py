"""What `neuclip eval` and `neuclip.load` can open: a run, a checkpoint or a model, with trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuclip.errors import UserError
from neuclip.models.towers import BuiltModel, build_model
from neuclip.plan import choose_device
from neuclip.records import RunFolder
from neuclip.runs.build import build_towers, resolve_held_out
from neuclip.runs.checkpoint import find_checkpoint, load_checkpoint
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings


def open_target(target: str) -> tuple[BuiltModel, Settings]:
    """A run's folder, a checkpoint inside one, or the folder of a saved open_clip model."""
    path = Path(target)
    is_checkpoint = path.suffix == ".pt" and path.is_file()
    folder = RunFolder(path.parent.parent if is_checkpoint else path)
    if not folder.settings.is_file():
        built = build_model(target)
        if not target.startswith("local-dir:"):
            raise UserError(f"{target} names a model without weights; give a run, a checkpoint or local-dir:FOLDER")
        return built, resolve_held_out(Settings())
    return load_run(folder, path if is_checkpoint else find_checkpoint(folder))[:2]


def load_run(folder: RunFolder, checkpoint: Path) -> tuple[BuiltModel, Settings, dict[str, Any]]:
    """The model as it was at a checkpoint, the run's settings, and the checkpoint's state."""
    settings = read_settings(folder.settings, [])
    state = load_checkpoint(checkpoint)
    built = build_towers(settings, choose_device(settings.run.device), state)
    built.towers.model.load_state_dict(state["model"])
    return built, settings, state
