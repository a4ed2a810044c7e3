"""What a result depends on, in hashes: the weights, and the data in whatever files they lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from neuclip.data.held_out import TaskData, source_of
from neuclip.data.source import fingerprint
from neuclip.data.tar.index import INDEX_SUFFIX
from neuclip.data.task_sets import Puzzles, ZeroShotTask
from neuclip.models.build import BuiltModel


def weights_sha256(model: torch.nn.Module) -> str:
    """Of the names, types, shapes and values of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_sha256(built: BuiltModel) -> str:
    """Of the architecture and of how images are prepared: the same weights score otherwise with another activation
    (ViT-B-32 and ViT-B-32-quickgelu), or other means and interpolation."""
    preprocess = getattr(built.towers.model.visual, "preprocess_cfg", {})
    return json_sha256([built.config, preprocess])


def data_sha256(folder: Path, opened: TaskData) -> str:
    """Of the names and sizes of all files, of the images (in shards of their checksums, else of size and time), and of
    class names, templates, labels, groups, captions or puzzles."""
    files = [
        [path.relative_to(folder).as_posix(), path.stat().st_size]
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(INDEX_SUFFIX) and not path.name.startswith(".")
    ]
    return json_sha256([files, source_of(opened).images_version(), _content(opened)])


def _content(opened: TaskData) -> Any:
    if isinstance(opened, ZeroShotTask):
        metadata = None if opened.metadata is None else opened.metadata.tolist()
        return [opened.classnames, opened.templates, opened.labels, metadata]
    if isinstance(opened, Puzzles):
        return [[puzzle.cue, puzzle.candidates, puzzle.associations] for puzzle in opened.puzzles]
    return fingerprint(opened)[0]


def json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
