"""Find the configuration, the weights and the tokenizer's files that a model's name stands for. Configurations are
checked before they are used, because a file may come from a stranger."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from neuclip.errors import UserError
from neuclip.files import read_json
from neuclip.models import open_clip_module
from neuclip.models.hub import CONFIG, HUB, ON_THE_HUB, WEIGHTS, download_folder

SHIPPED = Path(__file__).parent / "configs"
LOCAL = "local-dir:"
REMEDY = "give an open_clip model config"

# The fields that a config may have, besides those of open_clip's own dataclasses. open_clip passes fields on to torch,
# timm and transformers, where some of them mean "run this code".
TOP = {"embed_dim", "vision_cfg", "text_cfg", "multimodal_cfg", "custom_text", "quick_gelu"}
TOP |= {"init_logit_scale", "init_logit_bias", "nonscalar_logit_scale"}
ARGUMENTS = {"tokenizer_kwargs": {"clean", "strip_sep_token"}, "norm_kwargs": {"eps"}, "act_kwargs": {"approximate"}}
PLAIN_NAME = re.compile(r"[\w.\-]+")  # a name in timm's registry; with a colon or slash: a folder or a download
# Fields in which two models may differ although their weights fit both, after a resize of the position embeddings.
SIZES = {"image_size", "context_length", "timm_model_pretrained", "hf_model_pretrained", *ON_THE_HUB}


@dataclass(frozen=True)
class ModelSource:
    """Everything that a model is built from. It comes from a name, a tag, a folder, the hub, a run or a checkpoint."""

    name: str  # as the user gave it
    config: dict[str, Any]  # open_clip's model_cfg
    preprocess: dict[str, Any] = field(default_factory=dict)  # open_clip's preprocess_cfg, if there is one
    weights: Path | Mapping[str, Tensor] | None = None  # of the whole model
    image_weights: Path | None = None  # of a timm image tower alone
    folder: Path | None = None  # with the files of a transformers tokenizer or text tower
    file: Path | None = None  # with the config
    download: bool = False  # whether the user wants missing files downloaded

    @property
    def remedy(self) -> str:
        return f"correct {self.file}" if self.file else "give another model"


def find_model(name: str) -> ModelSource:
    """The model of a name: `tiny`, any open_clip name, the path of a model config, `local-dir:FOLDER`, `hf-hub:NAME`.

    >>> find_model("tiny").config["embed_dim"]
    128
    """
    if name.startswith(HUB):
        return dataclasses.replace(read_folder(name, download_folder(name)), download=True)
    if name.startswith(LOCAL):
        return read_folder(name, Path(name.removeprefix(LOCAL)))
    if name in shipped_models():
        return ModelSource(name, read_json(SHIPPED / f"{name}.json", REMEDY))
    if name.endswith(".json"):
        file = Path(name)
        if not file.is_file():
            raise UserError(f"model.name {name}: no such file; give the path of an open_clip model config")
        return ModelSource(name, check(read_json(file, REMEDY), file), file=file)
    config = open_clip_module().get_model_config(name)
    if config is None:
        raise UserError(f"model.name {name} is not known; {nearest_model(name)}")
    return ModelSource(name, config)


def read_folder(name: str, folder: Path) -> ModelSource:
    """The saved open_clip model in `folder`."""
    file = folder / CONFIG
    if name == LOCAL or not file.is_file():
        raise UserError(f"model.name {name}: there is no {file}; give the folder of a saved open_clip model")
    saved = read_json(file, REMEDY)
    if not isinstance(saved, dict) or "model_cfg" not in saved:
        raise UserError(f"{file} has no model_cfg; give --model.name {file} if it is a model config by itself")
    config, preprocess = check(saved["model_cfg"], file), check_preprocess(saved.get("preprocess_cfg") or {}, file)
    return ModelSource(name, config, preprocess, weights_in(folder), folder=folder, file=file)


def weights_in(folder: Path) -> Path:
    """The file of weights that open_clip would load from this folder."""
    others = [path for pattern in ("*.safetensors", "*.bin", "*.pth") for path in sorted(folder.glob(pattern))]
    found = [path for path in (*(folder / name for name in WEIGHTS), *others) if path.is_file()]
    if not found:
        raise UserError(
            f"{folder} has no weights ({WEIGHTS[0]}), perhaps because saving was interrupted; save the model again, or "
            "give --model.name of its architecture to start from random weights"
        )
    return found[0]


def check(config: Any, where: Path) -> dict[str, Any]:
    """The configuration, if open_clip may read it; otherwise UserError. `where`: the file that it comes from."""
    if not isinstance(config, dict):
        raise UserError(f"{where} holds no JSON object; {REMEDY}")
    needed = {"embed_dim": int, "vision_cfg": dict, "text_cfg": dict}
    if missing := [key for key in needed if key not in config]:
        remedy = "local-dir: and its folder" if "model_cfg" in config else "an open_clip model config"
        raise UserError(f"{where} has no {', '.join(missing)}; give {remedy}")
    for key, kind in needed.items():
        if not isinstance(config[key], kind):
            raise UserError(f"{where}: {key} is {config[key]!r}; give {'a number' if kind is int else 'an object'}")
    for problem in _problems(config):
        raise UserError(f"{where}: {problem}; remove or correct it")
    return config


def check_preprocess(preprocess: Any, where: Path) -> dict[str, Any]:
    if not isinstance(preprocess, dict):
        raise UserError(f"{where}: preprocess_cfg is {preprocess!r}; give an object")
    for key in ("mean", "std"):
        values = preprocess.get(key) or (0.5, 0.5, 0.5)
        if not (isinstance(values, list | tuple) and [type(x) in (int, float) for x in values] == [True] * 3):
            raise UserError(f"{where}: preprocess_cfg.{key} is {values!r}; give three numbers")
    return preprocess


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
        name = f"{section}.{key}"
        if key not in known:
            yield f"{name} is not a field of a model config"
        elif key in ARGUMENTS:
            if not isinstance(value, dict | None):
                yield f"{name} must be an object"
            else:
                yield from (f"{name}.{field} is not allowed" for field in value or {} if field not in ARGUMENTS[key])
        elif isinstance(value, dict) or (isinstance(value, list) and any(isinstance(x, dict | list) for x in value)):
            yield f"{name} must be a single value or a list of numbers"
        elif key == "timm_model_name" and value is not None and not PLAIN_NAME.fullmatch(str(value)):
            yield f"{name} is {value!r}, which is not the plain name of a timm model"


def different_fields(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The fields in which two configurations differ, so that the weights of one do not fit the other.

    >>> different_fields({"embed_dim": 8}, {"embed_dim": 9})
    ['embed_dim']
    """

    def flat(config: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in config.items():
            if isinstance(value, dict):
                fields |= {f"{key}.{name}": x for name, x in value.items() if name not in SIZES}
            elif not key.startswith("init_"):  # initial temperature and bias
                fields[key] = value
        # A missing field equals a false one, and a tuple (open_clip) equals a list (JSON).
        return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items() if value}

    left, right = flat(one), flat(other)
    return sorted(key for key in left | right if left.get(key) != right.get(key))


def shipped_models() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def nearest_model(name: str) -> str:
    if (Path(name) / CONFIG).is_file():
        return f"give --model.name {LOCAL}{name}"
    choices = {*shipped_models(), *open_clip_module().list_models()}
    near = difflib.get_close_matches(name, sorted(choices), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else "give tiny, small, or one of open_clip.list_models()"
