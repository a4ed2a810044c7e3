"""Whether it fits: memory of one process, and disk for its checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from neuclip.data.loader import PREFETCH
from neuclip.doctor.findings import Findings
from neuclip.doctor.wording import byte_size
from neuclip.models.facts import ModelFacts
from neuclip.settings.sections import Settings

TRAINED = 4 + 4 + 8  # bytes per parameter: float32 weight, gradient, AdamW's two moments
STORED = 4 + 8  # in a checkpoint
NEARLY_ALL = 0.9
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def note_memory(findings: Findings, settings: Settings, model: ModelFacts) -> None:
    """An estimate: what the libraries themselves take, and the data workers' own pages, come on top."""
    device = device_of(settings)
    half = settings.run.precision in ("bf16", "fp16") or (settings.run.precision == "auto" and device == "cuda")
    activations = model.activation_bytes * findings["plan.micro_batch"] // (2 if half else 1)
    height, width = model.image_size
    ready = max(1, settings.data.workers * PREFETCH)
    parts = {
        "towers_bytes": TRAINED * model.parameters,
        "activation_bytes": activations,
        "objective_bytes": findings["objective.state_bytes_per_rank"] + findings["objective.working_bytes_per_rank"],
        "loading_bytes": ready * findings["plan.batch_per_rank"] * 3 * height * width,
    }
    total, available = sum(parts.values()), memory_available(device)
    findings.note("memory", device=device, **parts, total_bytes=total, available_bytes=available)
    if available and total > NEARLY_ALL * available:
        micro = max(1, findings["plan.micro_batch"] // 2)
        findings.warn(
            f"about {byte_size(total)} per process, {byte_size(available)} are there",
            "the run may end for want of memory",
            f"give --train.micro_batch_size {micro}, or --model.gradient_checkpointing true"
            if parts["activation_bytes"] > total / 3
            else "give a smaller --model.name, or more processes",
        )


def device_of(settings: Settings) -> str:
    """As training chooses: cuda, then mps, then cpu."""
    if settings.run.device != "auto":
        return settings.run.device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def note_device(findings: Findings, settings: Settings) -> None:
    device = device_of(settings)
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present[device]:
        findings.fail(f"run.device {device} is not here", "the towers have nowhere to run", "give --run.device auto")
    elif settings.run.precision == "fp16" and device == "cpu":
        findings.fail("run.precision fp16 needs a GPU", "this run is on the CPU", "give --run.precision fp32")


def memory_available(device: str) -> int | None:
    """Of the first GPU, or of this machine or container."""
    if device == "cuda":
        return torch.cuda.mem_get_info(0)[0] if torch.cuda.is_available() else None
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    except (OSError, ValueError):  # not Linux: what there is in all, if even that is told
        return None
    limits = [Path(file).read_text().strip() for file in CGROUP_LIMITS if Path(file).is_file()]
    return min([found, *(int(limit) for limit in limits if limit.isdigit())])


def note_disk(findings: Findings, settings: Settings, model: ModelFacts) -> None:
    checkpoint = model.state_bytes + (STORED - 4) * model.parameters + findings["objective.state_bytes"]
    # The next is written before the oldest goes; the exported model comes last.
    needed = (settings.checkpoint.keep + 1) * checkpoint + model.state_bytes
    free = shutil.disk_usage(nearest_folder(Path(settings.run.folder))).free
    findings.note("disk", checkpoint_bytes=checkpoint, needed_bytes=needed, free_bytes=free)
    what = f"checkpoints and model take {byte_size(needed)}, {byte_size(free)} are free in {settings.run.folder}"
    remedy = "make room, or give --run.folder a larger disk" + (
        ", or --checkpoint.keep 1" if settings.checkpoint.keep > 1 else ""
    )
    if free < checkpoint:
        findings.fail(what, "not even the first checkpoint fits", remedy)
    elif free < needed:
        findings.warn(what, "the run would stop when the disk is full", remedy)


def nearest_folder(folder: Path) -> Path:
    """Itself, or the first of its parents that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())
