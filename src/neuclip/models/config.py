"""The configuration of a model: found by its name, and checked, because a file may come from a stranger."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.models.hub import ON_THE_HUB, downloading
from neuclip.models.tower_weights import PAIR, text_folder_of_pair

SHIPPED = Path(__file__).parent / "configs"
OPEN_CLIP = "model_configs/*.json"  # in its package
LOCAL, HUB = "local-dir:", "hf-hub:"
WEIGHTS = ("*.safetensors", "*.bin", "*.pth")  # what open_clip looks for in a folder

# open_clip hands these on to torch, timm and transformers, where some fields mean "run this code": nothing passes that
# is not listed here or a field of open_clip's own dataclasses.
TOP = {"embed_dim", "vision_cfg", "text_cfg", "multimodal_cfg", "custom_text", "quick_gelu"}
TOP |= {"init_logit_scale", "init_logit_bias", "nonscalar_logit_scale"}
ARGUMENTS = {"tokenizer_kwargs": {"clean", "strip_sep_token"}, "norm_kwargs": {"eps"}, "act_kwargs": {"approximate"}}
PLAIN_NAME = re.compile(r"[\w.\-]+")  # in timm's registry; with a colon or slash it would be a folder or a download


def find_config(name: str) -> tuple[str, dict[str, Any]]:
    """The name under which open_clip knows the model, and its configuration."""
    open_clip = open_clip_module()
    if name.startswith(LOCAL):
        return name, _folder_config(name)
    if name.startswith(HUB):
        with downloading(name):
            config = open_clip.get_model_config(name)
        return name, _check(config, name)
    shipped = SHIPPED / f"{name}.json"
    file = shipped if shipped.is_file() else Path(name)
    if file.suffix == ".json":
        if not file.is_file():
            raise UserError(f"model.name {name}: no such file; give the path of an open_clip model config")
        config = _check(_read(file), str(file))
        if "siglip" in file.stem.lower() and not config["text_cfg"].get("hf_tokenizer_name"):
            raise UserError(
                f"{file}: open_clip would download a tokenizer because of this file's name; set "
                "text_cfg.hf_tokenizer_name, or rename the file"
            )
        if name == PAIR:
            _add_with_files_of(config, text_folder_of_pair())
        else:
            open_clip.add_model_config(file)
        return file.stem, config
    config = open_clip.get_model_config(name)
    if config is None:
        raise UserError(f"model.name {name} is not known; {_nearest_model(name, open_clip.list_models())}")
    return name, config


def _add_with_files_of(config: dict[str, Any], folder: Path) -> None:
    """open_clip gets the model with a text tower and a tokenizer that are on this machine."""
    local = {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder)}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / f"{PAIR}.json"
        file.write_text(json.dumps(config | {"text_cfg": config["text_cfg"] | local}), encoding="utf-8")
        open_clip_module().add_model_config(file)  # which reads it now


def text_tower_of_folder(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What open_clip needs to build the text tower of transformers from the files in a saved model's folder; it would
    ask the hub for them."""
    folder = Path(name.removeprefix(LOCAL))
    if not (name.startswith(LOCAL) and config["text_cfg"].get("hf_model_name") and (folder / "config.json").is_file()):
        return {}
    return {"text_cfg": config["text_cfg"] | {"hf_model_name": str(folder), "hf_model_pretrained": False}}


def same_architecture(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether weights of one configuration fit into the other: sizes of images and contexts may differ."""
    free = {"image_size", "context_length", "timm_model_pretrained", "hf_model_pretrained", *ON_THE_HUB}

    def fixed(config: dict[str, Any]) -> dict[str, Any]:
        sections = {key: value for key, value in config.items() if not key.startswith("init_")}
        return {
            key: {field: x for field, x in value.items() if field not in free} if isinstance(value, dict) else value
            for key, value in sections.items()
        }

    return fixed(one) == fixed(other)


def longer_context(name: str, tokens: int) -> str:
    """What to do about a context that is too short for `tokens`: another model of the family, or another config."""
    size = -(-tokens // 8) * 8
    if name.startswith(LOCAL) or name.endswith(".json"):
        file = Path(name.removeprefix(LOCAL)) / "open_clip_config.json" if name.startswith(LOCAL) else Path(name)
        return f"set text_cfg.context_length to {size} in {file}"
    shipped = {file.stem: file for file in SHIPPED.glob("*.json") if file.stem != PAIR}
    package = importlib.util.find_spec("open_clip")  # read from disk: importing it takes seconds
    assert package is not None and package.origin is not None
    files = shipped if name in shipped else {file.stem: file for file in Path(package.origin).parent.glob(OPEN_CLIP)}
    contexts = {one: json.loads(file.read_text())["text_cfg"].get("context_length", 0) for one, file in files.items()}
    enough = sorted(one for one, context in contexts.items() if context >= tokens)
    if near := difflib.get_close_matches(name, enough, n=1, cutoff=0 if name in shipped else 0.6):
        return f"give --model.name {near[0]}, whose context has {contexts[near[0]]} tokens"
    source = f"a copy of {files[name]}" if name in files else "its config as a file"
    return f"give --model.name mine.json: {source}, with text_cfg.context_length {size}"


def _folder_config(name: str) -> dict[str, Any]:
    folder = Path(name.removeprefix(LOCAL))
    file = folder / "open_clip_config.json"
    if name == LOCAL or not file.is_file():
        raise UserError(f"model.name {name}: there is no {file}; give the folder of a saved open_clip model")
    config = _read(file).get("model_cfg")
    if config is None:
        raise UserError(f"{file} has no model_cfg; give --model.name {file} if it is a model config by itself")
    if not any(path.is_file() for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise UserError(
            f"model.name {name}: the folder has no weights ({', '.join(WEIGHTS)}), perhaps because saving was "
            f"interrupted; save the model again, or give --model.name of its architecture to start from random weights"
        )
    return _check(config, str(file))


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}); give an open_clip model config") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds no JSON object; give an open_clip model config")
    return config


def _check(config: Any, where: str) -> dict[str, Any]:
    """The configuration, if open_clip may see it; `where` it came from."""
    needed = {"embed_dim": int, "vision_cfg": dict, "text_cfg": dict}
    if not isinstance(config, dict):
        raise UserError(f"{where} holds no JSON object; give an open_clip model config")
    if missing := [key for key in needed if key not in config]:
        wrapped = "; give local-dir: and its folder" if "model_cfg" in config else "; give an open_clip model config"
        raise UserError(f"{where} has no {', '.join(missing)}{wrapped}")
    for key, kind in needed.items():
        if not isinstance(config[key], kind):
            raise UserError(f"{where}: {key} is {config[key]!r}; give {'a number' if kind is int else 'an object'}")
    for problem in _problems(config):
        raise UserError(f"{where}: {problem}; remove or correct it")
    return config


def _problems(config: dict[str, Any]) -> Iterator[str]:
    open_clip = open_clip_module()
    sections = {"vision_cfg": open_clip.CLIPVisionCfg, "text_cfg": open_clip.CLIPTextCfg}
    sections["multimodal_cfg"] = open_clip.coca_model.MultimodalCfg
    for key, value in config.items():
        if key not in TOP:
            yield f"{key} is not a field of a model config"
        elif key in sections:
            yield from _section_problems(key, value or {}, {field.name for field in dataclasses.fields(sections[key])})
        elif isinstance(value, dict | list):
            yield f"{key} must be a single value"


def _section_problems(section: str, values: Any, known: set[str]) -> Iterator[str]:
    if not isinstance(values, dict):
        yield f"{section} must be an object"
        return
    for key, value in values.items():
        field = f"{section}.{key}"
        if key not in known:
            yield f"{field} is not a field of a model config"
        elif key in ARGUMENTS:
            if not isinstance(value, dict | None):
                yield f"{field} must be an object"
            else:
                yield from (f"{field}.{name} is not allowed" for name in value or {} if name not in ARGUMENTS[key])
        elif isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, dict | list) for x in value)):
            yield f"{field} must be a single value or a list of numbers"
        elif key == "timm_model_name" and value is not None and not PLAIN_NAME.fullmatch(str(value)):
            yield f"{field} is {value!r}, which is not the plain name of a timm model"


def _nearest_model(name: str, known: list[str]) -> str:
    if (Path(name) / "open_clip_config.json").is_file():
        return f"give --model.name local-dir:{name}"
    choices = sorted(path.stem for path in SHIPPED.glob("*.json")) + list(known)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else "open_clip.list_models() lists them, beside tiny and small"
