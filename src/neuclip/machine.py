"""The hardware and software of this machine that a run uses: device, precision, threads, memory, versions."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from neuclip.errors import UserError

PACKAGES = ("neuclip", "torch", "torchvision", "open_clip_torch", "timm", "numpy", "pillow")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def available_cores() -> int:
    """The number of cores this process may use; in a container or a job they may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str, ranks: int | None = None) -> torch.device:
    """The torch device of this name; `auto` is cuda, mps or cpu, in this order. Several ranks cannot use mps, which has
    no collectives. `ranks` is the number of ranks of the run; None: the number that torchrun started."""
    several = (int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks) > 1
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available() and not several,
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(device for device, present in available.items() if present))
    if not available[name]:
        present = ", ".join(device for device, here in available.items() if here)
        raise UserError(f"run.device {name} is not available here; give --run.device {present}, or auto")
    return torch.device(name)


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of this name; `auto` is bf16 on a GPU that supports it, else float32 (on a CPU, autocast to bf16
    is seldom faster)."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if name == "fp16" and device.type == "cpu":
        raise UserError("run.precision fp16 needs a GPU; on a CPU give --run.precision fp32 or bf16")
    return PRECISIONS[name]


def set_threads(threads: int, device: torch.device) -> None:
    """Set the number of PyTorch's CPU threads. With 0, a single process keeps PyTorch's choice; several ranks on a CPU
    get an equal share of its cores, because torchrun would give each of them only 1 thread."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads:
        torch.set_num_threads(threads)
    elif local_ranks > 1 and device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, available_cores() // local_ranks))


def environment(device: torch.device, precision: torch.dtype, ranks: int, data: dict[str, Any]) -> dict[str, Any]:
    """The content of a run's environment.json; `data` is the fingerprint of its samples."""
    return {
        "started": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": str(precision).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "data": data,
        "processes": ranks,
    }


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of the GPU; on a CPU, of this process plus the largest of its children (the data workers)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
