"""On which device, and in which precision the towers run. Objectives always compute in float32."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch

from neuclip.errors import UserError


def choose_device(asked: str) -> torch.device:
    """`auto`: cuda, then mps, then cpu. Several processes cannot share one mps, which has no exchange between them."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available() and not several,
        "cpu": True,
    }
    if asked == "auto":
        return torch.device(next(name for name, present in available.items() if present))
    if not available[asked]:
        present = ", ".join(name for name, here in available.items() if here)
        raise UserError(f"run.device {asked} is not available here; give --run.device {present}, or auto")
    return torch.device(asked)


def choose_precision(asked: str, device: torch.device) -> torch.dtype:
    """`auto`: bf16 on a GPU that has it, float32 elsewhere (on a CPU autocast to bf16 is seldom faster)."""
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if asked == "fp16" and device.type == "cpu":
        raise UserError("run.precision fp16 needs a GPU; on a CPU give --run.precision fp32 or bf16")
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[asked]


def autocast(device: torch.device, precision: torch.dtype) -> AbstractContextManager:
    return torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32)
