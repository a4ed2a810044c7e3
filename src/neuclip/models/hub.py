"""The Hugging Face hub, where some models keep their tokenizer or text tower: it is asked only when a user asks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from neuclip.errors import RunFailed

ASKED_FOR = "HF_HUB_OFFLINE"  # 0 in the environment: fetch what is missing
ON_THE_HUB = ("hf_tokenizer_name", "hf_model_name")  # fields of a text tower


class NotHere(RunFailed):
    """Files of a model that would have to be fetched."""


@contextlib.contextmanager
def without_hub(name: str, config: dict[str, Any]) -> Iterator[None]:
    """Inside, what is on this machine is used and nothing fetched; raises NotHere, in one line, for what is missing."""
    named = [config["text_cfg"][field] for field in ON_THE_HUB if config["text_cfg"].get(field)]
    if not named:  # all comes with open_clip, or is a file
        yield
        return
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before if ASKED_FOR in os.environ else True
    try:
        yield
    except OSError as error:
        raise NotHere(
            f"model.name {name} takes {named[0]} from the Hugging Face hub, and it is not on this machine; "
            f"fetch it once, online, by setting {ASKED_FOR}=0 for this command, or give another --model.name"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before
