"""Lets open_clip import beside a CPU-only torch.

open_clip imports torchvision. The torchvision of the ordinary package index is built for CUDA; beside a CPU-only torch
its compiled operators cannot load, and its import then fails with "operator torchvision::nms does not exist". The two
operators it names are never called here, so declaring their schemas is enough. Where torchvision is whole, or absent,
nothing is done.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))
_declared: list[torch.library.Library] = []  # a Library object takes its schemas with it when it is collected


def guard_torchvision() -> bool:
    """Declare what is missing; True if something was. Must run before torchvision is first imported."""
    if _declared or _operators_load():
        return bool(_declared)
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)
    return True


def _operators_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # absent: the import error that follows says it best
    compiled = sorted(Path(spec.origin).parent.glob("_C*.so")) + sorted(Path(spec.origin).parent.glob("_C*.pyd"))
    try:
        for file in compiled:
            torch.ops.load_library(str(file))
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
