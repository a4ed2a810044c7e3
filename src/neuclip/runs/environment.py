"""What a run ran on: versions, device, threads, data fingerprint; and how much memory it took."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = ("neuclip", "torch", "torchvision", "open_clip_torch", "timm", "numpy", "pillow")


def environment(device: torch.device, precision: torch.dtype, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "started": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(precision).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "data": data,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Of the GPU where there is one; else of this process and the largest of its children (the data workers)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
