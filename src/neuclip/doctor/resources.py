"""Whether the run fits: device, memory of one rank and of all, and disk space for checkpoints."""

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
from neuclip.doctor.model import cached_facts
from neuclip.errors import UserError
from neuclip.files import is_taken
from neuclip.formatting import byte_size
from neuclip.machine import choose_device, choose_precision
from neuclip.models.facts import ModelFacts
from neuclip.plan import Plan
from neuclip.records import RunFolder
from neuclip.settings.sections import Settings

# Python, torch and open_clip in a process that trains on the CPU: its peak memory minus the other parts of the estimate
# was 466 MB at batch 16 and 486 MB at batch 256. On a GPU they are not in the GPU's memory.
LIBRARIES = 480_000_000
NEARLY_ALL = 0.9  # of the free memory: above this the run may not fit
FAR_TOO_MUCH = 1.5  # of all memory: the estimate is not that wrong
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def trained_bytes(parameters: int, locked: int = 0) -> int:
    """Memory of the towers in training: weights, and of those that are not locked gradients and AdamW's moments."""
    return (4 + 4 + 8) * (parameters - locked) + 4 * locked


def checkpoint_bytes(parameters: int, model_state_bytes: int, objective_state_bytes: int) -> int:
    """A checkpoint on disk: the model's state, AdamW's moments, the objective's state."""
    return model_state_bytes + 8 * parameters + objective_state_bytes


class Memory(NamedTuple):
    """In bytes."""

    free: int
    total: int


def note_device(findings: Findings, settings: Settings) -> None:
    """Device and precision as training chooses them. What it refuses is a problem, and still used for the estimate."""
    run = settings.run
    try:
        device = choose_device(run.device, findings["plan.ranks"])
    except UserError as error:
        findings.fail_with(error, "training would not start")
        device = torch.device(run.device)
    try:
        precision = choose_precision(run.precision, device)
    except UserError as error:
        findings.fail_with(error, "training would not start")
        precision = torch.float16
    findings.note("memory", device=device.type, precision=str(precision).removeprefix("torch."))


def note_memory(findings: Findings, settings: Settings, model: ModelFacts) -> None:
    """An estimate, without what the data workers hold for themselves."""
    device, ranks = findings["memory.device"], findings["plan.ranks"]
    parts = memory_parts(findings, settings, model)
    total, memory = sum(parts.values()), available_memory(device)
    together = total * ranks if device == "cpu" else None  # elsewhere each rank has its own device
    findings.note("memory", **parts, total_bytes=total, together_bytes=together)
    findings.note("memory", available_bytes=memory and memory.free, machine_bytes=memory and memory.total)
    if memory is None:
        return
    limit = int(NEARLY_ALL * memory.free)
    free = f"{byte_size(memory.free)} of {byte_size(memory.total)} are free"
    if total > limit:
        what = f"about {byte_size(total)} per rank, {free}"
        smaller = "not even the smallest forward pass fits: give a smaller --model.name, or a machine with more memory"
        remedy = less_memory(findings, settings, model, limit) or smaller
        if total > FAR_TOO_MUCH * memory.total:
            findings.fail(what, "training would run out of memory", remedy)
        else:
            findings.warn(what, "training may run out of memory", remedy)
    elif together and together > limit:
        less = less_memory(findings, settings, model, limit // ranks) or "give a smaller --model.name"
        findings.warn(
            f"about {byte_size(together)} if all {ranks} ranks are on this machine, {free}",
            "together they may run out of memory",
            f"use more machines, or {less}",
        )


def memory_parts(findings: Findings, settings: Settings, model: ModelFacts) -> dict[str, int]:
    """Of one rank."""
    height, width = model.image_size
    itemsize = getattr(torch, findings["memory.precision"]).itemsize
    batches = max(1, settings.data.workers * PREFETCH)
    return {
        "libraries_bytes": LIBRARIES if findings["memory.device"] == "cpu" else 0,
        "towers_bytes": trained_bytes(model.parameters, model.locked),
        "activation_bytes": model.activation_bytes * findings["plan.micro_batch"] * itemsize // 4,  # given for float32
        "objective_bytes": findings["objective.state_bytes_per_rank"] + findings["objective.working_bytes_per_rank"],
        "loading_bytes": batches * findings["plan.batch_per_rank"] * 3 * height * width,
    }


def less_memory(findings: Findings, settings: Settings, model: ModelFacts, limit: int) -> str:
    """The flags that bring one rank below `limit` bytes by this estimate; "" if none do."""
    plan = Plan.of(settings, findings["plan.ranks"])
    lean = cached_facts(replace(settings.model, gradient_checkpointing=True))
    ways = []
    for facts in (model, lean):
        parts = memory_parts(findings, settings, facts)
        total, activations = sum(parts.values()), parts["activation_bytes"]
        recompute = "--model.gradient_checkpointing true" if facts is lean and lean != model else ""
        if recompute and total <= limit:
            ways.append(f"{recompute} (then about {byte_size(total)})")
            continue
        most = (limit - total + activations) * plan.micro_batch // max(1, activations)
        if size := fitting_chunk(most, plan, model):
            ways.append(f"{recompute} --train.micro_batch_size {size}".strip())
    return f"give {', or '.join(dict.fromkeys(ways))}" if ways else ""


def fitting_chunk(most: int, plan: Plan, model: ModelFacts) -> int:
    """The largest power of two up to `most` that training can use as micro batch; 0 if there is none."""
    sizes = [2**power for power in range(30) if 2**power <= min(most, plan.local_batch - 1)]
    least = 2 if model.batch_norm else 1
    return max((size for size in sizes if replace(plan, micro_batch=size).smallest_chunk >= least), default=0)


def available_memory(device: str) -> Memory | None:
    """Of the first GPU, or of this machine or container; None if it is not known."""
    if device == "cuda":
        return Memory(*torch.cuda.mem_get_info(0)) if torch.cuda.is_available() else None
    try:
        free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError):  # not Linux
        return None
    limits = [Path(file).read_text().strip() for file in CGROUP_LIMITS if Path(file).is_file()]
    total = min([total, *(int(limit) for limit in limits if limit.isdigit())])
    return Memory(min(free, total), total)


def note_folder(findings: Findings, settings: Settings) -> None:
    """Whether the run's folder can be created."""
    folder = RunFolder(Path(settings.run.folder) / settings.run.name)
    if settings.run.name and is_taken(folder.path):
        findings.fail(f"{folder.path} exists", "a run never overwrites another", "give another --run.name")
        return
    parent = existing_folder(Path(settings.run.folder))
    try:
        Path(tempfile.mkdtemp(dir=parent)).rmdir()
    except OSError as error:
        findings.fail(
            f"run.folder {settings.run.folder} cannot be written",
            f"{parent}: {error.strerror}",
            "give another --run.folder",
        )


def note_disk(findings: Findings, settings: Settings, model: ModelFacts) -> None:
    checkpoint = checkpoint_bytes(model.parameters - model.locked, model.state_bytes, findings["objective.state_bytes"])
    needed = settings.checkpoint.most * checkpoint + model.state_bytes  # with the exported model
    free = shutil.disk_usage(existing_folder(Path(settings.run.folder))).free
    findings.note("disk", checkpoint_bytes=checkpoint, needed_bytes=needed, free_bytes=free)
    what = f"checkpoints and model take {byte_size(needed)}, {byte_size(free)} are free in {settings.run.folder}"
    fewer = ", or keep fewer (--checkpoint.keep, --checkpoint.milestones)" if settings.checkpoint.most > 2 else ""
    remedy = f"free some space, or give --run.folder on a larger disk{fewer}"
    if free < needed:
        findings.fail(what, "training does not start without room for all of them", remedy)


def existing_folder(folder: Path) -> Path:
    """The folder itself, or the first of its parents that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())
