"""The Hugging Face hub, where some models keep their tokenizer or text tower: used only when a user asks for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from neuclip.errors import RunFailed, UserError

VARIABLE = "HF_HUB_OFFLINE"  # 0 in the environment: download what is missing
ON_THE_HUB = ("hf_tokenizer_name", "hf_model_name")  # fields of a text tower


class NotHere(RunFailed):
    """Files of a model that would have to be downloaded."""


@contextlib.contextmanager
def downloading(name: str) -> Iterator[None]:
    """Inside, the user wants a download; it may fail in the ways of networks."""
    try:
        yield
    except Exception as error:  # of huggingface_hub, its HTTP library, or the system
        raise RunFailed(
            f"{name} could not be downloaded ({first_line(error)}); check the name and the network, or give "
            "--model.name local-dir:FOLDER with a copy of it"
        ) from error


@contextlib.contextmanager
def only_if_allowed(target: str) -> Iterator[None]:
    """Inside, models are made from files of this machine, and NotHere says how to download what is missing; with
    HF_HUB_OFFLINE=0 in the environment they are downloaded."""
    if os.environ.get(VARIABLE) == "0":
        yield
        return
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except NotHere:
        raise
    except Exception as error:
        if not any(isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled) for cause in _causes(error)):
            raise
        raise NotHere(
            f"{target} is not on this machine; to download it set {VARIABLE}=0 for this command, or give a file or "
            "folder that you have: MODEL:FILE or local-dir:FOLDER"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def offline_hub(name: str, config: dict[str, Any], *, download: bool = False) -> Iterator[None]:
    """Inside, code that comes with a tokenizer or a text tower is not run, and without `download` nothing is
    downloaded: files on this machine are used, and NotHere is raised for missing ones."""
    named = {field: config["text_cfg"][field] for field in ON_THE_HUB if config["text_cfg"].get(field)}
    if not named:  # everything comes with open_clip, or is a file
        yield
        return
    try:
        from huggingface_hub import constants
        from transformers import dynamic_module_utils
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise UserError(
            f"model.name {name} needs transformers for {_fields(named)}; pip install transformers"
        ) from error
    transformers_logging.disable_progress_bar()  # of weights that are on this machine: it takes less than a second
    before = constants.HF_HUB_OFFLINE, dynamic_module_utils.TIME_OUT_REMOTE_CODE
    constants.HF_HUB_OFFLINE = before[0] if download or VARIABLE in os.environ else True
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # otherwise it asks on the terminal whether to run the code
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # of the system, about a file of this machine
            raise
        where = "in that folder" if name.startswith("local-dir:") else "on this machine"
        raise NotHere(
            f"model.name {name} needs {_fields(named)} from the Hugging Face hub, and its files are not {where}; "
            f"download it once by setting {VARIABLE}=0 for this command, or give another --model.name"
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(
            f"model.name {name}: {_fields(named)} comes with its own code, which is never run; "
            "give another --model.name"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE, dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def _fields(named: dict[str, str]) -> str:
    return " or ".join(f"text_cfg.{field} {value}" for field, value in named.items())


def first_line(error: BaseException) -> str:
    """What an exception of another library says, short enough for one line of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch's complaint about a checkpoint has an empty phrase in the first line, and the tensors in the next ones.
    text = lines[1] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else lines[0] if lines else ""
    text = f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
