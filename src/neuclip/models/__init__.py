"""The one place that touches open_clip."""

from __future__ import annotations

from types import ModuleType

import torch

# open_clip imports torchvision. The torchvision of the ordinary package index is built for CUDA; beside a CPU-only
# torch its compiled operators cannot load, and its import fails because these two do not exist. They are never called
# here, so declaring them is enough. It happens here because a data worker that starts afresh is sent our transforms,
# with open_clip's inside, and imports this first.
try:
    import torchvision  # noqa: F401
except ImportError:
    pass  # absent: the error that open_clip's import raises says it best
except RuntimeError:
    _operators = torch.library.Library("torchvision", "DEF")  # its schemas go when it is collected
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def open_clip_module() -> ModuleType:
    """open_clip, imported behind the guard: `open_clip_module().ClipLoss()`."""
    import open_clip

    return open_clip
