"""Features of locked towers, computed once: before the first step they are stored, and the loop reads them instead of
images and captions."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from neuclip.data.feature_store import Block, FeatureStore
from neuclip.data.fingerprint import fingerprint
from neuclip.data.loader import TrainingWindows, load_windows
from neuclip.data.source import Source
from neuclip.data.stored_windows import StoredSide, StoredWindows, TrunkInputWindows, origins
from neuclip.distributed.collectives import is_main
from neuclip.distributed.error_sync import sync_errors
from neuclip.distributed.stopping import stop_requests
from neuclip.errors import RunFailed
from neuclip.formatting import byte_size
from neuclip.plan import stored_sides
from neuclip.progress import track
from neuclip.training.run import Run, StoringTime

# Samples that are stored together: what a kill costs at most, a few seconds. Of texts, enough to have many of a length.
BLOCK = {"image": 64, "text": 512}


def store_features(run: Run) -> None:
    """Collective. Compute what is not stored yet, and let the run read it. Nothing happens where no tower is locked, or
    where a run sees no sample twice."""
    sides = [side for side in stored_sides(run.settings, run.epoch_samples) if side in run.built.towers.locked]
    if not sides:
        return
    start, stored, per_sample = time.monotonic(), {}, 0.0
    with stop_requests() as stop:
        stop.message = (
            f"stopped while features were stored; what is stored stays; continue with: "
            f"neuclip train --resume {run.folder.path}"
        )
        for side in sides:
            parts = [(_store_part(run, side, source), ids) for source, ids in origins(run.source)]
            stored[side] = StoredSide([store for store, _ in parts], [ids for _, ids in parts])
            per_sample += max(store.seconds_per_sample for store, _ in parts)
    windows = run.batches.windows
    run.batches.windows = StoredWindows(**vars(windows), images=stored.get("image"), texts=stored.get("text"))
    if not run.batches.windows.reads_source:
        run.batches.workers = 0  # reading rows is faster than passing them between processes
    run.started += time.monotonic() - start
    run.storing = StoringTime(sides=sides, seconds=time.monotonic() - start, seconds_per_sample=per_sample)


def _store_part(run: Run, side: str, source: Source) -> FeatureStore:
    """Collective. The rows of one source, all of them."""
    key = storing_key(run, side, source)
    store = FeatureStore.under_key(key, len(source))
    with sync_errors(), remedy_for_disk(store):
        if is_main():
            store.describe(key)
        missing = np.flatnonzero(store.counts == 0) // BLOCK[side] * BLOCK[side]
    # The ranks of one machine share its cache folder, and none has begun to write yet.
    own = np.unique(missing)[int(os.environ.get("LOCAL_RANK", "0")) :: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
    with sync_errors(), remedy_for_disk(store):
        _write_blocks(run, side, source, store, own.tolist())
    return store


def _write_blocks(run: Run, side: str, source: Source, store: FeatureStore, starts: list[int]) -> None:
    windows: TrainingWindows = run.batches.windows
    inputs = TrunkInputWindows(source, BLOCK[side], windows.transform, windows.tokenize, windows.decode, side)
    workers = min(run.settings.data.workers, len(starts))
    blocks = load_windows(inputs, starts, workers, None)
    if is_main():
        samples = min(len(starts) * BLOCK[side], len(source))
        kind = "images" if side == "image" else "captions"
        blocks = track(blocks, f"storing features of {kind}", samples, "samples", step=BLOCK[side])
    before = time.monotonic()
    for number, block in enumerate(blocks):
        tokens = block.inputs.numpy() if side == "text" and len(block.inputs) else None
        rows = _trunk_features(run, side, block.inputs).numpy()
        if number == 0:
            _check_disk(store, rows.nbytes * len(starts))
        store.write(Block(block.first, block.counts, rows, tokens, block.faults))
        store.note_time(len(block.counts), time.monotonic() - before)
        before = time.monotonic()


def _trunk_features(run: Run, side: str, inputs: Tensor) -> Tensor:  # -> (r, width) float32
    """As `Accumulation` runs the towers. Rows of lower precision are exact in float32."""
    if not len(inputs):
        return torch.empty(0, 1)
    towers = run.built.towers.train()  # a locked tower stays in eval mode
    with torch.autocast(run.device.type, dtype=run.precision, enabled=run.precision != torch.float32):
        return towers.trunk_features(side, inputs.to(run.device)).float().cpu()


def storing_key(run: Run, side: str, source: Source) -> dict[str, object]:
    """All that the rows depend on."""
    built = run.built
    versions = hashlib.sha256("\n".join(source.file_versions()).encode(errors="surrogateescape")).hexdigest()
    transform = re.sub(r" at 0x[0-9a-f]+", "", repr(built.float_transform))
    return {
        "side": side,
        "weights": built.towers.trunk_sha256(side),
        "model": built.config,
        "transform": transform if side == "image" else "",
        "data": run.fingerprint if source is run.source else fingerprint(source),
        "files": versions,
        "precision": str(run.precision),
        "device": run.device.type,
        "torch": torch.__version__,  # whose kernels may round otherwise
    }


def _check_disk(store: FeatureStore, needed: int) -> None:
    free = shutil.disk_usage(store.folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{byte_size(needed)} are needed and {byte_size(free)} free")


@contextmanager
def remedy_for_disk(store: FeatureStore) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = " free some space," if error.errno == errno.ENOSPC else ""
        raise RunFailed(
            f"{store.folder}: features cannot be stored ({error.strerror});{full} point NEUCLIP_CACHE to another disk, "
            "or give --data.stored_features off, which computes them in every epoch"
        ) from error
