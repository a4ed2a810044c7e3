"""Whether it fits: memory of one process and of all, and a folder with room for checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from neuclip.data.loader import PREFETCH
from neuclip.doctor.findings import Findings
from neuclip.doctor.model import facts_of
from neuclip.doctor.plan import smallest_chunk
from neuclip.formatting import byte_size
from neuclip.models.facts import ModelFacts
from neuclip.settings.sections import Settings

TRAINED = 4 + 4 + 8  # bytes per parameter: float32 weight, gradient, AdamW's two moments
STORED = 4 + 8  # in a checkpoint
# Python, torch and open_clip in a process that trains on the CPU: the most it held, less the other parts of the
# estimate, was 466 MB at batch 16 and 486 MB at batch 256. On a GPU they lie elsewhere.
LIBRARIES = 480_000_000
NEARLY_ALL = 0.9  # of what is free: more than this may be too much
FAR_TOO_MUCH = 1.5  # of all the memory there is: no estimate is so wrong
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Room(NamedTuple):
    """Bytes of memory."""

    free: int
    all: int


def note_memory(findings: Findings, settings: Settings, model: ModelFacts) -> None:
    """An estimate: what the data workers hold for themselves comes on top."""
    device, ranks = device_of(settings), findings["plan.ranks"]
    parts = memory_parts(findings, settings, model)
    total, room = sum(parts.values()), memory_of(device)
    together = total * ranks if device == "cpu" else None  # elsewhere each process has a device of its own
    findings.note("memory", device=device, **parts, total_bytes=total, together_bytes=together)
    findings.note("memory", available_bytes=room and room.free, machine_bytes=room and room.all)
    if room is None:
        return
    fits = int(NEARLY_ALL * room.free)
    there = f"{byte_size(room.free)} of {byte_size(room.all)} are free"
    if total > fits:
        what = f"about {byte_size(total)} per process, {there}"
        smaller = "not even the smallest forward pass fits: give a smaller --model.name, or a machine with more memory"
        remedy = less_memory(findings, settings, model, fits) or smaller
        if total > FAR_TOO_MUCH * room.all:
            findings.fail(what, "the run would end for want of memory", remedy)
        else:
            findings.warn(what, "the run may end for want of memory", remedy)
    elif together and together > fits:
        less = less_memory(findings, settings, model, fits // ranks)
        findings.warn(
            f"about {byte_size(together)} if all {ranks} processes are on this machine, {there}",
            "they may end for want of memory",
            f"use more machines, or {less or 'a smaller --model.name'}",
        )


def memory_parts(findings: Findings, settings: Settings, model: ModelFacts) -> dict[str, int]:
    """Of one process."""
    device, (height, width) = device_of(settings), model.image_size
    half = settings.run.precision in ("bf16", "fp16") or (settings.run.precision == "auto" and device == "cuda")
    ready = max(1, settings.data.workers * PREFETCH)
    return {
        "libraries_bytes": LIBRARIES if device == "cpu" else 0,
        "towers_bytes": TRAINED * model.parameters,
        "activation_bytes": model.activation_bytes * findings["plan.micro_batch"] // (2 if half else 1),
        "objective_bytes": findings["objective.state_bytes_per_rank"] + findings["objective.working_bytes_per_rank"],
        "loading_bytes": ready * findings["plan.batch_per_rank"] * 3 * height * width,
    }


def less_memory(findings: Findings, settings: Settings, model: ModelFacts, fits: int) -> str:
    """The flags that bring one process below `fits` bytes, as the estimate has it; "": none do."""
    local, micro = findings["plan.batch_per_rank"], findings["plan.micro_batch"]
    lean = facts_of(replace(settings.model, gradient_checkpointing=True))
    ways = []
    for towers in (model, lean):
        parts = memory_parts(findings, settings, towers)
        total, activations = sum(parts.values()), parts["activation_bytes"]
        recomputing = "--model.gradient_checkpointing true" if towers is lean and lean != model else ""
        if recomputing and total <= fits:
            ways.append(f"{recomputing} (then about {byte_size(total)})")
        elif pairs := fitting_chunk((fits - total + activations) * micro // max(1, activations), local, model):
            ways.append(f"{recomputing} --train.micro_batch_size {pairs}".strip())
    return f"give {', or '.join(dict.fromkeys(ways))}" if ways else ""


def fitting_chunk(most: int, local: int, model: ModelFacts) -> int:
    """The largest power of two up to `most` that training can cut its share into; 0: none."""
    sizes = [2**power for power in range(30) if 2**power <= min(most, local - 1)]
    least = 2 if model.batch_norm else 1
    return max((size for size in sizes if smallest_chunk(local, size) >= least), default=0)


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


def memory_of(device: str) -> Room | None:
    """Of the first GPU, or of this machine or container; None where it is not told."""
    if device == "cuda":
        return Room(*torch.cuda.mem_get_info(0)) if torch.cuda.is_available() else None
    try:
        free = everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError):  # not Linux
        return None
    limits = [Path(file).read_text().strip() for file in CGROUP_LIMITS if Path(file).is_file()]
    limit = min([everything, *(int(limit) for limit in limits if limit.isdigit())])
    return Room(min(free, limit), limit)


def note_folder(findings: Findings, settings: Settings) -> None:
    """Where the run will be written."""
    folder = Path(settings.run.folder) / settings.run.name
    if settings.run.name and folder.exists():
        findings.fail(f"{folder} exists", "a run never overwrites another", "give another --run.name")
        return
    nearest = nearest_folder(Path(settings.run.folder))
    try:
        Path(tempfile.mkdtemp(dir=nearest)).rmdir()
    except OSError as error:
        findings.fail(
            f"nothing can be written to run.folder {settings.run.folder}",
            f"{nearest}: {error.strerror}",
            "give another --run.folder",
        )


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
