"""Small models of each kind of tower: open_clip's transformers, its ResNet, timm, and transformers' BERT."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from neuclip.models.towers import BuiltModel, build_model
from tests.processes.test_trainer_ranks import SMALL

TRANSFORMERS = {
    **SMALL,
    "vision_cfg": SMALL["vision_cfg"] | {"layers": 2, "patch_dropout": 0.5},
    "text_cfg": SMALL["text_cfg"] | {"layers": 2},
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "circle", "square"]


def build(folder: Path, config: dict = TRANSFORMERS, **arguments) -> BuiltModel:
    torch.manual_seed(0)
    (folder / "mine.json").write_text(json.dumps(config))
    return build_model(str(folder / "mine.json"), **arguments)


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
