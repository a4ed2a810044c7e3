"""The model folder for open_clip: `open_clip.create_model_and_transforms("local-dir:FOLDER")` loads it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from neuclip.errors import RunFailed
from neuclip.models.towers import BuiltModel
from neuclip.records import write_json


def export_model(built: BuiltModel, folder: Path) -> None:
    """Write open_clip_config.json and open_clip_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    model = built.towers.model
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    preprocess = getattr(model.visual, "preprocess_cfg", {})
    kept = {key: preprocess[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in preprocess}
    write_json(folder / "open_clip_config.json", {"model_cfg": built.config, "preprocess_cfg": kept})
    partial = folder / "open_clip_model.safetensors.partial"
    try:
        save_file(tensors, partial)
        partial.replace(folder / "open_clip_model.safetensors")
    except SafetensorError as error:
        raise RunFailed(
            f"{partial}: could not be written ({error}); the last checkpoint is kept: make room, then continue with "
            "--resume"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
