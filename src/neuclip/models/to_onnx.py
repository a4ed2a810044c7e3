"""A model as two ONNX graphs, one for images and one for texts, with what must happen before them in plain JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuclip.errors import RunFailed
from neuclip.models.hub import first_line
from neuclip.models.to_transformers import hugging_face_tokenizer, preprocessing_of
from neuclip.models.towers import BuiltModel
from neuclip.records import write_json

IMAGE, TEXT, ABOUT, TOKENIZER = "image.onnx", "text.onnx", "preprocessing.json", "tokenizer.json"
ONE_FILE = 1 << 30  # bytes: a protobuf file ends at two gigabytes, larger weights go beside the graph


class ImageGraph(nn.Module):
    """Normalized images (b, 3, H, W) -> unit features (b, d)."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.encode_image(images, normalize=True)


class TextGraph(nn.Module):
    """Tokens (b, L) -> unit features (b, d)."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.encode_text(tokens, normalize=True)


def write_onnx(built: BuiltModel, folder: Path) -> None:
    """image.onnx, text.onnx, preprocessing.json and tokenizer.json."""
    model = built.towers.model
    preprocessing = preprocessing_of(built)
    tokens = built.tokenize(["a", "b"])
    _write_graph(ImageGraph(model), "images", torch.zeros(2, 3, *preprocessing["size"]), folder / IMAGE)
    _write_graph(TextGraph(model), "tokens", tokens, folder / TEXT)
    pad = 0 if hasattr(built.tokenize, "bpe_ranks") else hugging_face_tokenizer(built).pad_token_id
    _write_tokenizer(built, tokens.shape[1], pad, folder / TOKENIZER)
    bias = built.towers.logit_bias
    write_json(
        folder / ABOUT,
        {
            "images": {
                "graph": IMAGE,
                "input": "images: float32 (batch, 3, height, width), RGB",
                "output": "features: float32 (batch, features), rows of length 1",
                "steps": "resize, crop the centre, divide by 255, subtract mean, divide by std",
                **{key: preprocessing[key] for key in ("size", "resize_mode", "interpolation", "mean", "std")},
            },
            "texts": {
                "graph": TEXT,
                "input": "tokens: int64 (batch, context)",
                "output": "features: float32 (batch, features), rows of length 1",
                "tokenizer": TOKENIZER,
                "context": tokens.shape[1],
                "pad": pad,
            },
            "logit_scale": float(built.towers.logit_scale.detach()),
            "logit_bias": None if bias is None else float(bias.detach()),
        },
    )


def _write_graph(graph: nn.Module, name: str, example: Tensor, file: Path) -> None:
    weights = sum(tensor.nbytes for tensor in graph.state_dict().values())
    try:
        with _quiet():
            torch.onnx.export(
                graph.eval(),
                (example,),
                file,
                input_names=[name],
                output_names=["features"],
                dynamic_shapes={name: {0: torch.export.Dim("batch", min=1)}},
                dynamo=True,
                external_data=weights > ONE_FILE,
            )
    except OSError:
        raise
    except Exception as error:  # torch raises many kinds for what has no counterpart in ONNX
        raise RunFailed(
            f"{file.name} could not be made: torch cannot express this tower in ONNX ({first_line(error)}); "
            "give --to open_clip"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch tells every step of an export on stdout, and onnxscript its doubts as warnings."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _write_tokenizer(built: BuiltModel, context: int, pad: int, file: Path) -> None:
    """With truncation and padding inside: it gives what the graph takes, in any program that reads the format."""
    from tokenizers import Tokenizer

    tokenizer = hugging_face_tokenizer(built)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy: the model goes on with its own
    backend.enable_truncation(context)
    backend.enable_padding(length=context, pad_id=pad, pad_token=tokenizer.convert_ids_to_tokens(pad))
    backend.save(str(file))


def encode_with_onnx(folder: Path, images: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Unit features (b, d) of normalized images (b, 3, H, W) and of texts, by the folder's graphs and tokenizer."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    encoded = Tokenizer.from_file(str(folder / about["texts"]["tokenizer"])).encode_batch(texts)
    tokens = np.array([one.ids for one in encoded], dtype=np.int64)
    features = []
    for file, name, values in ((IMAGE, "images", images.numpy()), (TEXT, "tokens", tokens)):
        session = onnxruntime.InferenceSession(str(folder / file), providers=["CPUExecutionProvider"])
        features.append(torch.from_numpy(session.run(["features"], {name: values})[0]))
    return features[0], features[1]
