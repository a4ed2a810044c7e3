"""CLIP models. The only package that imports open_clip."""

from __future__ import annotations

from types import ModuleType

import torch

# open_clip imports torchvision. PyPI's torchvision is built for CUDA; beside a CPU-only torch its compiled operators
# cannot load, and its import fails because the two operators below do not exist. They are never called here, so it is
# enough to declare them. It must happen in this file: a new data worker unpickles our transforms, which contain
# open_clip's, and imports this package first.
try:
    import torchvision  # noqa: F401
except ImportError:
    pass  # not installed: the import of open_clip fails with a better message
except RuntimeError:
    _operators = torch.library.Library("torchvision", "DEF")  # kept: its operators disappear with it
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def open_clip_module() -> ModuleType:
    """The module open_clip, imported after the fix above: `open_clip_module().ClipLoss()`."""
    import open_clip

    return open_clip
