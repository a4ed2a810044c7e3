"""What goes wrong inside open_clip, timm and transformers when they build a model, as one line with a remedy."""

from __future__ import annotations

import contextlib
import difflib
import traceback
from collections.abc import Iterator
from pathlib import Path

from neuclip.errors import RunFailed, RunInterrupted, UserError
from neuclip.models import open_clip_module
from neuclip.models.config import LOCAL
from neuclip.models.hub import first_line
from neuclip.models.tower_weights import IMAGE

# How open_clip says that weights are not there: of a tag, of a model of the hub, of its config.
NO_WEIGHTS = ("Failed to download weights", "Required pretrained weights", "load from HF Hub")


@contextlib.contextmanager
def explain_failures(name: str, *, pretrained: str = "", image_size: int = 0) -> Iterator[None]:
    """Every exception of a builder means that a name, a config or a file cannot be used: it is no bug of ours."""
    if pretrained:
        _check_pretrained(name, pretrained)
    try:
        yield
    except (UserError, RunFailed, RunInterrupted):
        raise
    except Exception as error:
        frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        if "load_checkpoint" in frames:  # open_clip's; the model itself is built by then
            weights = pretrained or name
            raise UserError(
                f"{weights}: these weights cannot be loaded into {name} ({first_line(error)}); give weights of this "
                f"architecture as a safetensors file or a PyTorch checkpoint, or another --model.name"
            ) from error
        if any(phrase in str(error) for phrase in NO_WEIGHTS):
            raise RunFailed(
                f"{pretrained or name}: no weights could be downloaded ({first_line(error)}); check the name and the "
                "network, or give the path of a file or local-dir:FOLDER"
            ) from error
        file = f"{name.removeprefix(LOCAL)}/open_clip_config.json" if name.startswith(LOCAL) else name
        remedy = f"correct {file}" if file.endswith(".json") else "give another --model.name"
        remedy = f"give another --model.image_size than {image_size}" if image_size else remedy
        message = f"model.name {name}: the model cannot be built or used ({first_line(error)}); {remedy}"
        raise UserError(message) from error


def pretrained_is_known(name: str, pretrained: str) -> bool:
    """Whether `pretrained` is on this machine, or a tag that open_clip has for this model."""
    return pretrained_is_here(pretrained) or bool(open_clip_module().get_pretrained_cfg(name, pretrained))


def pretrained_is_here(pretrained: str) -> bool:
    """Whether `pretrained` is a file, a saved model or a run."""
    path = Path(pretrained.removeprefix(LOCAL).removeprefix(IMAGE))
    return any(file.is_file() for file in (path, path / "open_clip_config.json", path / "settings.yaml"))


def _check_pretrained(name: str, pretrained: str) -> None:
    if Path(pretrained).is_dir():
        raise UserError(
            f"model.pretrained {pretrained} is a folder, and neither a run nor a saved open_clip model; give the path "
            "of a file of weights in it"
        )
    if not pretrained_is_known(name, pretrained):
        tags = open_clip_module().list_pretrained_tags_by_model(name)
        near = difflib.get_close_matches(pretrained, tags, n=3, cutoff=0)
        known = f", or a tag such as {' or '.join(near)}" if near else ""
        raise UserError(
            f"model.pretrained {pretrained} is neither a file nor a tag of {name}; give the path of a checkpoint{known}"
        )
    if not pretrained_is_here(pretrained):
        _refuse_other_activation(name, pretrained)


def _refuse_other_activation(name: str, tag: str) -> None:
    """Weights trained with QuickGELU load into a model with GELU without complaint, and score points lower."""
    open_clip, fast = open_clip_module(), f"{name}-quickgelu"
    needs_it = open_clip.get_pretrained_cfg(name, tag).get("quick_gelu")
    if needs_it and not open_clip.get_model_config(name).get("quick_gelu") and open_clip.get_model_config(fast):
        raise UserError(
            f"model.pretrained {tag}: these weights of {name} were trained with QuickGELU and score lower without it; "
            f"give {fast} as the model"
        )
