"""Downloads from the Hugging Face hub, where some models keep weights, tokenizers or text towers.

Only a tag of open_clip and `hf-hub:NAME` are a request to download. All else needs HF_HUB_OFFLINE=0 in the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuclip.errors import RunFailed, UserError, extras_for

HUB = "hf-hub:"
VARIABLE = "HF_HUB_OFFLINE"  # 0 in the environment: download missing files
ON_THE_HUB = ("hf_tokenizer_name", "hf_model_name")  # fields of a text tower
CONFIG = "open_clip_config.json"  # of a saved model
# Files of weights in the order in which open_clip looks for them. If a folder has none of these, the first other file
# of weights by name is used.
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
    """Files of a model are not on this machine, and the user did not ask to download them."""


@contextlib.contextmanager
def downloading(what: str) -> Iterator[None]:
    """Turns a failed download inside into an error with a remedy. For downloads that the user asked for."""
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
    """Download the model `hf-hub:NAME`: its config, one file of weights and the tokenizer's files. Returns a folder."""
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
    """Inside, code that comes with a tokenizer or text tower never runs. Nothing is downloaded unless `download`."""
    parts = [f"text_cfg.{field} {config['text_cfg'][field]}" for field in ON_THE_HUB if config["text_cfg"].get(field)]
    if not parts:  # everything comes with open_clip, or is a file
        yield
        return
    with extras_for(" and ".join(parts)):
        from huggingface_hub import constants
        from transformers import dynamic_module_utils
        from transformers.utils import logging as transformers_logging
    transformers_logging.disable_progress_bar()  # for weights on this machine, which load in less than a second
    before = constants.HF_HUB_OFFLINE, dynamic_module_utils.TIME_OUT_REMOTE_CODE
    constants.HF_HUB_OFFLINE = before[0] if download or VARIABLE in os.environ else True
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # otherwise transformers asks on the terminal whether to run code
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def explain_transformers(error: Exception, name: str, field: str, location: str) -> UserError | RunFailed | None:
    """Our error for one of transformers that means: it wants to download files, or to run a stranger's code. None for
    other errors. `location`: the folder, or the name on the hub, that `field` of the text tower's config names."""
    setting = f"text_cfg.{field} {location}"
    if location and isinstance(error, ValueError) and "trust_remote_code" in str(error):
        return UserError(f"model {name}: {setting} comes with its own code, which is never run; give another model")
    # An OSError with an errno comes from the system and is about a file on this machine.
    if location and isinstance(error, OSError) and error.errno is None and not Path(location).is_dir():
        return NotDownloaded(
            f"model {name} needs {setting} from the Hugging Face hub, and its files are not on this machine; download "
            f"them once by setting {VARIABLE}=0 for this command, or give another model"
        )
    return None


def first_line(error: BaseException) -> str:
    """The message of another library's exception, short enough for a part of one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch's error about a checkpoint names the tensors from the second line on; its first line says nothing.
    text = lines[1] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else lines[0] if lines else ""
    text = f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
