"""The Hugging Face hub, where some models keep weights, tokenizers or text towers: asked only when a user wants it.

A tag of open_clip and `hf-hub:NAME` are a request to download. Nothing else is fetched, unless HF_HUB_OFFLINE=0 is set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuclip.errors import RunFailed, UserError, extras_for

HUB = "hf-hub:"
VARIABLE = "HF_HUB_OFFLINE"  # 0 in the environment: download what is missing
ON_THE_HUB = ("hf_tokenizer_name", "hf_model_name")  # fields of a text tower
CONFIG = "open_clip_config.json"  # of a saved model
# In the order in which open_clip looks for them. Others are taken from a folder too, the first by name.
WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pth",
    "model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.pth",
    "model.pth",
)
TEXT_FILES = ("*.json", "*.txt", "*.model")  # of tokenizers and configs


class NotDownloaded(RunFailed):
    """Files of a model that are not on this machine, and that nobody asked to download."""


@contextlib.contextmanager
def downloading(what: str) -> Iterator[None]:
    """Around a download that the user wants."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:  # of huggingface_hub, its HTTP library, or the system
        if constants.HF_HUB_OFFLINE:
            raise NotDownloaded(
                f"{what} is not on this machine; to download it set {VARIABLE}=0 for this command, or give a file or "
                "folder that you have: MODEL:FILE or local-dir:FOLDER"
            ) from error
        raise RunFailed(
            f"{what} could not be downloaded ({first_line(error)}); check the name and the network, or give a file or "
            "folder that you have: MODEL:FILE or local-dir:FOLDER"
        ) from error


def download_folder(name: str) -> Path:
    """The folder of the model `hf-hub:NAME`: its config, one file of weights, and the files of a tokenizer."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    repository = name.removeprefix(HUB)
    with downloading(name):
        hf_hub_download(repository, CONFIG)
        for file in WEIGHTS[:3]:
            with contextlib.suppress(EntryNotFoundError):
                hf_hub_download(repository, file)
                break
        else:
            raise FileNotFoundError(f"it has no weights of open_clip: {', '.join(WEIGHTS[:3])}")
        return Path(snapshot_download(repository, allow_patterns=list(TEXT_FILES)))


@contextlib.contextmanager
def offline(config: dict[str, Any], *, download: bool = False) -> Iterator[None]:
    """Inside, code that comes with a tokenizer or text tower never runs, and without `download` nothing is fetched."""
    named = [f"text_cfg.{field} {config['text_cfg'][field]}" for field in ON_THE_HUB if config["text_cfg"].get(field)]
    if not named:  # everything comes with open_clip, or is a file
        yield
        return
    with extras_for(" and ".join(named)):
        from huggingface_hub import constants
        from transformers import dynamic_module_utils
        from transformers.utils import logging as transformers_logging
    transformers_logging.disable_progress_bar()  # of weights that are on this machine: it takes less than a second
    before = constants.HF_HUB_OFFLINE, dynamic_module_utils.TIME_OUT_REMOTE_CODE
    constants.HF_HUB_OFFLINE = before[0] if download or VARIABLE in os.environ else True
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # otherwise it asks on the terminal whether to run the code
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def explain_transformers(error: Exception, name: str, field: str, place: str) -> UserError | RunFailed | None:
    """What transformers means where it wants to download, or to run the code of a stranger; None for other errors.
    `place`: the folder, or the name on the hub, that the field of a text tower's config names."""
    named = f"text_cfg.{field} {place}"
    if place and isinstance(error, ValueError) and "trust_remote_code" in str(error):
        return UserError(f"model {name}: {named} comes with its own code, which is never run; give another model")
    # Without a number it is not the system's, about a file of this machine.
    if place and isinstance(error, OSError) and error.errno is None and not Path(place).is_dir():
        return NotDownloaded(
            f"model {name} needs {named} from the Hugging Face hub, and its files are not on this machine; download "
            f"them once by setting {VARIABLE}=0 for this command, or give another model"
        )
    return None


def first_line(error: BaseException) -> str:
    """What an exception of another library says, short enough for one line of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch's complaint about a checkpoint has an empty phrase in the first line, and the tensors in the next ones.
    text = lines[1] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else lines[0] if lines else ""
    text = f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
