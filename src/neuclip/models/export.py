"""The model folder for open_clip: `open_clip.create_model_and_transforms("local-dir:FOLDER")` loads it."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from neuclip.errors import RunFailed
from neuclip.files import new_file
from neuclip.models import open_clip_module
from neuclip.models.config import find_config, text_tower_of_folder
from neuclip.models.failures import explain_failures
from neuclip.models.hub import offline_hub
from neuclip.models.lora import adapter_state, merge
from neuclip.models.tokenizer import load_tokenizer
from neuclip.models.towers import BuiltModel, silence_open_clip
from neuclip.records import write_json

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
ADAPTER = "lora.safetensors"


def export_model(built: BuiltModel, folder: Path) -> None:
    """Write the weights, then the config, each in one move: a folder that has a config is complete. LoRA is merged into
    the weights, and lies beside them by itself, small, for those who have the model that it adapts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)  # of an older model, whose weights are replaced now
    model = built.towers.model
    _write_weights(merge(model.state_dict()), folder / WEIGHTS)
    (folder / ADAPTER).unlink(missing_ok=True)
    if adapter := adapter_state(model):
        _write_weights(adapter, folder / ADAPTER)
    if hasattr(built.tokenize, "save_pretrained"):  # one of transformers, which open_clip looks for in this folder
        built.tokenize.save_pretrained(folder)
    if config := getattr(getattr(model, "text", None), "config", None):  # of a text tower of transformers
        config.save_pretrained(folder)
    preprocess = getattr(model.visual, "preprocess_cfg", {})
    kept = {key: preprocess[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in preprocess}
    write_json(folder / CONFIG, {"model_cfg": built.config, "preprocess_cfg": kept})


def write_text_files(name: str, folder: Path) -> None:
    """Beside the weights of the model `name`: its tokenizer of transformers, and the config of such a text tower."""
    known_name, config = find_config(name)
    with silence_open_clip(), explain_failures(name), offline_hub(name, config):
        load_tokenizer(known_name).save_pretrained(folder)
        model = open_clip_module().create_model(
            known_name, load_weights=False, pretrained_text=False, device="meta", **text_tower_of_folder(name, config)
        )
    if text_config := getattr(getattr(model, "text", None), "config", None):
        text_config.save_pretrained(folder)


def _write_weights(tensors: dict[str, Tensor], file: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        with new_file(file) as unfinished:
            save_file(tensors, unfinished.name)
            written = Path(unfinished.name)  # safetensors makes a file of its own, with the mode 0600
            written.chmod(os.fstat(unfinished.fileno()).st_mode)
            with written.open("rb") as content:
                os.fsync(content.fileno())
    except (SafetensorError, OSError) as error:
        raise RunFailed(
            f"{file}: could not be written ({error}); the last checkpoint is kept: make room, then continue with "
            "--resume"
        ) from error
