"""What a run runs on: CPU threads, versions, device, data fingerprint; and how much memory it took."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from neuclip.distributed.collectives import world_size
from neuclip.files import available_cores

PACKAGES = ("neuclip", "torch", "torchvision", "open_clip_torch", "timm", "numpy", "pillow")


def set_threads(threads: int, device: torch.device) -> None:
    """0 leaves PyTorch's choice to a single process. torchrun gives each of several 1 thread, whatever the machine
    has; on a CPU they share its cores instead."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if world_size() > 1 else 1
    if threads:
        torch.set_num_threads(threads)
    elif local_ranks > 1 and device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, available_cores() // local_ranks))


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def environment(device: torch.device, precision: torch.dtype, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "started": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(precision).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "data": data,
        "processes": world_size(),
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
