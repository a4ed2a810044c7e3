"""The Hugging Face hub, where some models keep their tokenizer or text tower: used only when a user asks for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from neuclip.errors import RunFailed

VARIABLE = "HF_HUB_OFFLINE"  # 0 in the environment: download what is missing
ON_THE_HUB = ("hf_tokenizer_name", "hf_model_name")  # fields of a text tower


class NotHere(RunFailed):
    """Files of a model that would have to be downloaded."""


@contextlib.contextmanager
def offline_hub(name: str, config: dict[str, Any]) -> Iterator[None]:
    """Inside, nothing is downloaded: files on this machine are used, and NotHere is raised for missing ones."""
    named = [config["text_cfg"][field] for field in ON_THE_HUB if config["text_cfg"].get(field)]
    if not named:  # everything comes with open_clip, or is a file
        yield
        return
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before if VARIABLE in os.environ else True
    try:
        yield
    except OSError as error:
        raise NotHere(
            f"model.name {name} takes {named[0]} from the Hugging Face hub, and it is not on this machine; "
            f"download it once by setting {VARIABLE}=0 for this command, or give another --model.name"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before
