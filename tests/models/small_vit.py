"""ViT models of open_clip's kind, small enough for a test, with weights that were not left as they are initialised."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from neuclip.models.towers import BuiltModel, build_model

CONFIG = {
    "embed_dim": 32,
    "vision_cfg": {"layers": 2, "width": 64, "head_width": 32, "image_size": 32, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 48, "heads": 3, "layers": 2},
}


def build_vit(folder: Path, *, vision: dict | None = None, text: dict | None = None, **top) -> BuiltModel:
    config = CONFIG | top
    config["vision_cfg"] = CONFIG["vision_cfg"] | (vision or {})
    config["text_cfg"] = CONFIG["text_cfg"] | (text or {})
    file = folder / "small-vit.json"
    file.write_text(json.dumps(config))
    built = build_model(str(file))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # biases begin at 0, norms at 1: a mistake with them would not show
        for parameter in built.towers.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return built
