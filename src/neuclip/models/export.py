"""Write a model as files: the folder for open_clip, and the formats of other libraries. Each export is read back by the
library that it is for, and its features are compared."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from neuclip.errors import RunFailed, require
from neuclip.files import UNFINISHED, new_file, write_json
from neuclip.models import open_clip_module
from neuclip.models.build import BuiltModel, image_shape, quiet_open_clip
from neuclip.models.hub import CONFIG, WEIGHTS, first_line, offline
from neuclip.models.modes import merge_lora
from neuclip.models.parts import Encoder
from neuclip.models.to_transformers import encode_with_transformers, hugging_face_tokenizer, write_transformers

LARGEST_DIFFERENCE = 1e-5  # 1 - cosine; two programs that compute the same in float32 differ by 1e-11 or less
IMAGE, TEXT, PREPROCESSING, TOKENIZER = "image.onnx", "text.onnx", "preprocessing.json", "tokenizer.json"
ONE_FILE = 1 << 30  # bytes; larger weights go into a second file, because protobuf files end at two gigabytes


def export_model(built: BuiltModel, folder: Path) -> None:
    """Write the folder that `open_clip.create_model_and_transforms("local-dir:FOLDER")` loads, with LoRA merged.

    The config is written last, and each file appears in one move: a folder that has a config is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)  # of an older model, whose weights are about to be replaced
    write_weights(merge_lora(built.towers.model.state_dict()), folder / WEIGHTS[0])
    write_text_files(built, folder)
    write_json(folder / CONFIG, built.saved_config)


def write_text_files(built: BuiltModel, folder: Path) -> None:
    """Write the tokenizer and the text tower's config if they are from transformers: a checkpoint needs these files to
    become a model again. Writes nothing if both are open_clip's own."""
    parts: tuple[Any, ...] = built.tokenize, getattr(getattr(built.towers.model, "text", None), "config", None)
    savable = [part for part in parts if hasattr(part, "save_pretrained")]
    if not savable:
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Into a new folder first, because save_pretrained would follow links in the old one.
    with TemporaryDirectory(dir=folder, prefix=".", suffix=UNFINISHED) as new:
        for part in savable:
            part.save_pretrained(new)
        for file in Path(new).iterdir():
            file.replace(folder / file.name)


def write_weights(tensors: dict[str, Tensor], file: Path) -> None:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        with new_file(file) as unfinished:
            save_file(tensors, unfinished.name)
            written = Path(unfinished.name)  # safetensors has replaced the file by one with the mode 0600
            written.chmod(os.fstat(unfinished.fileno()).st_mode)
            with written.open("rb") as content:
                os.fsync(content.fileno())
    except (SafetensorError, OSError) as error:
        raise RunFailed(f"{file}: could not be written ({error}); make room and try again") from error


@dataclass(frozen=True)
class Format:
    """A format: how to write a model into a folder, and how its library encodes with the written files."""

    write: Callable[[BuiltModel, Path], None]
    encode: Callable[[Path, Tensor, list[str]], tuple[Tensor, Tensor]]
    needs: tuple[str, ...] = ()  # packages of the extra `export`


@torch.no_grad()
def encode_with_open_clip(folder: Path, images: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Unit features by open_clip alone, as the model card says, and only from the files of the folder."""
    open_clip, name = open_clip_module(), f"local-dir:{folder}"
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["model_cfg"]
    text = config["text_cfg"]
    if text.get("hf_model_name"):  # otherwise open_clip would ask the hub for the text tower's config
        text |= {"hf_model_name": str(folder), "hf_model_pretrained": False}
    with quiet_open_clip(), offline(config):
        model, _, _ = open_clip.create_model_and_transforms(name, text_cfg=text)
        tokens = open_clip.get_tokenizer(name)(texts)
    model.eval()
    return model.encode_image(images, normalize=True), model.encode_text(tokens, normalize=True)


def write_format(name: str, built: BuiltModel, folder: Path, images: Sequence[Image.Image], texts: list[str]) -> float:
    """Write `built` into `folder`, and encode the images and texts with the written files. Returns the largest
    1 - cosine between these features and the model's own; raises RunFailed if it is above LARGEST_DIFFERENCE.
    """
    form = FORMATS[name]
    require(f"--to {name}", *form.needs, extra="export")
    built.towers.eval().cpu()
    form.write(built, folder)
    pixels = torch.stack([built.float_transform(image) for image in images])
    with torch.no_grad():
        ours = built.towers.encode_image(pixels), built.towers.encode_text(built.tokenize(texts))
    theirs = form.encode(folder, pixels, texts)
    difference = max(largest_difference(*features) for features in zip(ours, theirs, strict=True))
    if not difference <= LARGEST_DIFFERENCE:  # true for NaN, too
        raise RunFailed(
            f"the exported model gives other features than this one (1 - cosine up to {difference:.1e}, allowed "
            f"{LARGEST_DIFFERENCE:.0e}); nothing was kept; give another --to, and report it with the model's name"
        )
    return difference


def largest_difference(ours: Tensor, theirs: Tensor) -> float:  # (n, d), (n, d)
    """The largest 1 - cosine of two corresponding rows. In float64: in float32 it would measure only rounding."""
    return float((1 - torch.cosine_similarity(ours.double(), theirs.double(), dim=1)).max().clamp(min=0))


def write_onnx(built: BuiltModel, folder: Path) -> None:
    """Write image.onnx, text.onnx, and the preprocessing for them: preprocessing.json and tokenizer.json."""
    model, tokens, height_width = built.towers.model, built.tokenize(["a", "b"]), image_shape(built.towers.model)
    _write_graph(Encoder(model, "image", normalize=True), "images", torch.zeros(2, 3, *height_width), folder / IMAGE)
    _write_graph(Encoder(model, "text", normalize=True), "tokens", tokens, folder / TEXT)
    pad = 0 if hasattr(built.tokenize, "bpe_ranks") else hugging_face_tokenizer(built.tokenize).pad_token_id
    _write_tokenizer(built, tokens.shape[1], pad, folder / TOKENIZER)
    bias, output = built.towers.logit_bias, "features: float32 (batch, features), rows of length 1"
    images = {
        "graph": IMAGE,
        "input": "images: float32 (batch, 3, height, width), RGB",
        "output": output,
        "steps": "resize, crop the centre, divide by 255, subtract mean, divide by std",
        "size": list(height_width),
        **{key: model.visual.preprocess_cfg[key] for key in ("resize_mode", "interpolation", "mean", "std")},
    }
    texts = {
        "graph": TEXT,
        "input": "tokens: int64 (batch, context)",
        "output": output,
        "tokenizer": TOKENIZER,
        "context": tokens.shape[1],
        "pad": pad,
    }
    scale = float(built.towers.logit_scale.detach())
    logits = {"logit_scale": scale, "logit_bias": None if bias is None else float(bias.detach())}
    write_json(folder / PREPROCESSING, {"images": images, "texts": texts, **logits})


def _write_graph(graph: nn.Module, name: str, example: Tensor, file: Path) -> None:
    weights = sum(tensor.nbytes for tensor in graph.state_dict().values())
    try:
        # torch prints every step of an export on stdout, and onnxscript warns without need.
        with quiet_open_clip(), warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(StringIO()):
            torch.onnx.export(
                graph.eval(),
                (example,),
                file,
                input_names=[name],
                output_names=["features"],
                dynamic_shapes={"inputs": {0: torch.export.Dim("batch", min=1)}},
                dynamo=True,
                external_data=weights > ONE_FILE,
            )
    except OSError:
        raise
    except Exception as error:  # torch raises many kinds for operations that ONNX does not have
        raise RunFailed(
            f"{file.name} could not be made: torch cannot express this tower in ONNX ({first_line(error)}); "
            "give --to open_clip"
        ) from error


def _write_tokenizer(built: BuiltModel, context: int, pad: int, file: Path) -> None:
    """Write a tokenizer that also truncates and pads: in any program, its output is the input of the graph."""
    from tokenizers import Tokenizer

    tokenizer = hugging_face_tokenizer(built.tokenize)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy: the model's own stays as it is
    backend.enable_truncation(context)
    backend.enable_padding(length=context, pad_id=pad, pad_token=tokenizer.convert_ids_to_tokens(pad))
    backend.save(str(file))


def encode_with_onnx(folder: Path, images: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Unit features (b, d) of normalized images (b, 3, H, W) and of texts, by the folder's graphs and tokenizer."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(folder / TOKENIZER)).encode_batch(texts)
    tokens = np.array([encoding.ids for encoding in encoded], dtype=np.int64)
    features = []
    for file, name, values in ((IMAGE, "images", images.numpy()), (TEXT, "tokens", tokens)):
        session = onnxruntime.InferenceSession(str(folder / file), providers=["CPUExecutionProvider"])
        features.append(torch.from_numpy(session.run(["features"], {name: values})[0]))
    return features[0], features[1]


FORMATS = {
    "open_clip": Format(export_model, encode_with_open_clip),
    "transformers": Format(write_transformers, encode_with_transformers, ("transformers",)),
    "onnx": Format(write_onnx, encode_with_onnx, ("transformers", "onnx", "onnxscript", "onnxruntime")),
}
LOADING = {
    "open_clip": """import open_clip
model, _, transform = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")""",
    "transformers": """from transformers import CLIPModel, CLIPProcessor
model, processor = CLIPModel.from_pretrained("FOLDER"), CLIPProcessor.from_pretrained("FOLDER")
inputs = processor(text=["a photo of a dog"], images=image, return_tensors="pt", padding="max_length", truncation=True)
outputs = model(**inputs)  # outputs.image_embeds, outputs.text_embeds: rows of length 1
# Its centre crop may be one pixel off open_clip's if the margin is odd, and it does not decode HTML entities.""",
    "onnx": """import onnxruntime
from tokenizers import Tokenizer
tokens = [one.ids for one in Tokenizer.from_file("FOLDER/tokenizer.json").encode_batch(["a photo of a dog"])]
text = onnxruntime.InferenceSession("FOLDER/text.onnx").run(None, {"tokens": tokens})[0]  # rows of length 1
image = onnxruntime.InferenceSession("FOLDER/image.onnx").run(None, {"images": pixels})[0]  # see preprocessing.json""",
}
# The config of a text tower of transformers is in the folder; by default open_clip would ask the hub for it.
LOADING_TEXT_TOWER = """import json, open_clip
text = json.load(open("FOLDER/open_clip_config.json"))["model_cfg"]["text_cfg"]
text |= {"hf_model_name": "FOLDER", "hf_model_pretrained": False}  # from this folder, not from the hub
model, _, transform = open_clip.create_model_and_transforms("local-dir:FOLDER", text_cfg=text)
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")"""


def loading_code(form: str, built: BuiltModel) -> str:
    """The code for the model card that loads the folder with the library of this format."""
    from_folder = form == "open_clip" and built.config["text_cfg"].get("hf_model_name")
    return LOADING_TEXT_TOWER if from_folder else LOADING[form]
