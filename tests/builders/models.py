"""Small models of each kind of tower: open_clip's transformers, its ResNet, timm, and transformers' BERT.

Models of a moment are files beside this one: SMALL_FILE has transformers without BatchNorm or dropout, NORMS_FILE a
ResNet with BatchNorm for images.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from neuclip.models.build import BuiltModel, build_model
from neuclip.models.config import SHIPPED

SMALL_FILE, NORMS_FILE = (Path(__file__).with_name(f"{name}.json") for name in ("small", "norms"))
SMALL = json.loads(SMALL_FILE.read_text())
TRANSFORMERS = {
    **SMALL,
    "vision_cfg": SMALL["vision_cfg"] | {"layers": 2, "patch_dropout": 0.5},
    "text_cfg": SMALL["text_cfg"] | {"layers": 2},
}
CUSTOM_TEXT = TRANSFORMERS | {"custom_text": True}
KINDS = ("open_clip", "custom text", "ResNet", "timm and transformers")
VIT = {
    "embed_dim": 32,
    "vision_cfg": {"layers": 2, "width": 64, "head_width": 32, "image_size": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 48, "heads": 3, "layers": 2},
}
TINY = json.loads((SHIPPED / "tiny.json").read_text())  # a ResNet and a transformer, shipped with the package
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "circle", "square"]


def build(folder: Path, config: dict = TRANSFORMERS, **arguments) -> BuiltModel:
    torch.manual_seed(0)
    (folder / "mine.json").write_text(json.dumps(config))
    return build_model(str(folder / "mine.json"), **arguments)


def tiny_with(**sections: dict) -> dict:
    """The config of `tiny` with other fields in these sections."""
    return TINY | {key: TINY[key] | value for key, value in sections.items()}


def build_kind(kind: str, folder: Path) -> BuiltModel:
    """A small model with towers of that kind: one of KINDS."""
    if kind == "timm and transformers":
        bert = folder / "bert"
        return build(folder, timm_and_bert(bert if bert.exists() else write_bert(bert)))
    return build(folder, {"open_clip": TRANSFORMERS, "custom text": CUSTOM_TEXT, "ResNet": TINY}[kind])


def build_vit(folder: Path, *, vision: dict | None = None, text: dict | None = None, **top) -> BuiltModel:
    """A ViT whose weights were not left as they are initialised."""
    config = VIT | top
    config["vision_cfg"] = VIT["vision_cfg"] | (vision or {})
    config["text_cfg"] = VIT["text_cfg"] | (text or {})
    file = folder / "small-vit.json"
    file.write_text(json.dumps(config))
    built = build_model(str(file))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # biases begin at 0, norms at 1: a mistake with them would not show
        for parameter in built.towers.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return built


def write_bert(folder: Path) -> Path:
    """A text encoder as transformers saves one: config, weights and tokenizer."""
    import transformers

    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def timm_and_bert(bert: Path, **vision) -> dict:
    text = {"hf_model_name": str(bert), "hf_tokenizer_name": str(bert), "hf_pooler_type": "mean_pooler"}
    return {
        "embed_dim": 12,
        "vision_cfg": {"timm_model_name": "test_vit", "timm_pool": "token", "image_size": 160} | vision,
        "text_cfg": text | {"hf_proj_type": "linear", "context_length": 8},
    }


def inputs(built: BuiltModel, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    size = built.image_size
    captions = ["a red circle", "a blue square", "a"] * count
    return torch.randn(count, 3, size, size), built.tokenize(captions[:count])
