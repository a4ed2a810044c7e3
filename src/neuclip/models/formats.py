"""The formats a model is exported to. Each is written, read back by the library it is for, and compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from neuclip.errors import RunFailed, UserError
from neuclip.models import open_clip_module
from neuclip.models.config import find_config, text_tower_of_folder
from neuclip.models.export import export_model
from neuclip.models.hub import offline_hub
from neuclip.models.to_onnx import encode_with_onnx, write_onnx
from neuclip.models.to_transformers import encode_with_transformers, write_transformers
from neuclip.models.towers import BuiltModel, silence_open_clip

LOADING = {
    "open_clip": """import open_clip
model, _, transform = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")""",
    "transformers": """from transformers import CLIPModel, CLIPProcessor
model, processor = CLIPModel.from_pretrained("FOLDER"), CLIPProcessor.from_pretrained("FOLDER")
inputs = processor(text=["a photo of a dog"], images=image, return_tensors="pt", padding="max_length", truncation=True)
outputs = model(**inputs)  # outputs.image_embeds, outputs.text_embeds: rows of length 1
# Its centre crop may lie one pixel beside open_clip's where the margin is odd; HTML entities in texts stay.""",
    "onnx": """import onnxruntime
from tokenizers import Tokenizer
tokens = [one.ids for one in Tokenizer.from_file("FOLDER/tokenizer.json").encode_batch(["a photo of a dog"])]
text = onnxruntime.InferenceSession("FOLDER/text.onnx").run(None, {"tokens": tokens})[0]  # rows of length 1
image = onnxruntime.InferenceSession("FOLDER/image.onnx").run(None, {"images": pixels})[0]  # see preprocessing.json""",
}
# open_clip would ask the hub for the config of a text tower of transformers; it lies in the folder.
LOADING_TEXT_TOWER = """import json, open_clip
text = json.load(open("FOLDER/open_clip_config.json"))["model_cfg"]["text_cfg"]
text |= {"hf_model_name": "FOLDER", "hf_model_pretrained": False}  # from this folder, not from the hub
model, _, transform = open_clip.create_model_and_transforms("local-dir:FOLDER", text_cfg=text)
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")"""
LARGEST_DIFFERENCE = 1e-5  # 1 - cosine: between two programs that compute the same in float32 it is 1e-11 or less


def loading_code(form: str, built: BuiltModel) -> str:
    """What a model card shows: how that library loads the folder."""
    from_folder = form == "open_clip" and built.config["text_cfg"].get("hf_model_name")
    return LOADING_TEXT_TOWER if from_folder else LOADING[form]


@dataclass(frozen=True)
class Format:
    """How a model is written into a folder, and how its library encodes with what was written."""

    write: Callable[[BuiltModel, Path], None]
    encode: Callable[[Path, Tensor, list[str]], tuple[Tensor, Tensor]]
    needs: tuple[str, ...] = ()  # packages of the extra `export`


@torch.no_grad()
def encode_with_open_clip(folder: Path, images: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
    """By open_clip alone, as the model card says, and from the files of the folder alone."""
    open_clip, name = open_clip_module(), f"local-dir:{folder}"
    _, config = find_config(name)
    with silence_open_clip(), offline_hub(name, config):
        model, _, _ = open_clip.create_model_and_transforms(name, **text_tower_of_folder(name, config))
        tokens = open_clip.get_tokenizer(name)(texts)
    model.eval()
    return model.encode_image(images, normalize=True), model.encode_text(tokens, normalize=True)


FORMATS = {
    "open_clip": Format(export_model, encode_with_open_clip),
    "transformers": Format(write_transformers, encode_with_transformers, ("transformers",)),
    "onnx": Format(write_onnx, encode_with_onnx, ("transformers", "onnx", "onnxscript", "onnxruntime")),
}


def write_format(name: str, built: BuiltModel, folder: Path, images: Sequence[Image.Image], texts: list[str]) -> float:
    """Write `built` into `folder` and encode the images and texts with what was written. The largest 1 - cosine.

    Raises RunFailed where the two differ: a folder that gives other features is of no use to anybody.
    """
    form = FORMATS[name]
    if missing := [package for package in form.needs if importlib.util.find_spec(package) is None]:
        raise UserError(f"--to {name} needs {', '.join(missing)}; pip install 'neuclip[export]'")
    built.towers.eval().cpu()
    form.write(built, folder)
    pixels = torch.stack([built.float_transform(image) for image in images])
    with torch.no_grad():
        ours = built.towers.encode_image(pixels), built.towers.encode_text(built.tokenize(texts))
    theirs = form.encode(folder, pixels, texts)
    difference = max(largest_difference(own, other) for own, other in zip(ours, theirs, strict=True))
    if not difference <= LARGEST_DIFFERENCE:  # also if it is not a number
        raise RunFailed(
            f"the exported model gives other features than this one (1 - cosine up to {difference:.1e}, allowed "
            f"{LARGEST_DIFFERENCE:.0e}); nothing was kept; give another --to, and report it with the model's name"
        )
    return difference


def largest_difference(ours: Tensor, theirs: Tensor) -> float:  # (n, d), (n, d)
    """1 - cosine of the pair of rows that differs most; in float64, or rounding would be all that is measured."""
    return float((1 - torch.cosine_similarity(ours.double(), theirs.double(), dim=1)).max().clamp(min=0))
