"""Features of locked towers: computed once and stored before the first step. The loop reads them instead of images and
captions."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.data.features import BAD, Block, FeatureStore, Place, StoredSide, stored_rows
from neuclip.data.loader import ImageBatch, read_images
from neuclip.data.mixture import Mixture
from neuclip.data.source import Source, fingerprint
from neuclip.distributed.collectives import is_main
from neuclip.distributed.ranks import StopRequest, sync_errors
from neuclip.errors import RunFailed
from neuclip.formatting import byte_size
from neuclip.models.build import BuiltModel
from neuclip.objectives.drrho import DRRho
from neuclip.plan import stored_sides
from neuclip.progress import track
from neuclip.training.run import Run

# Samples that are stored together. A kill loses at most one block, a few seconds of work. Texts come in larger blocks,
# which have many texts of each length.
BLOCK = {"image": 64, "text": 512}


def store_features(run: Run, stop: StopRequest) -> None:
    """Compute the features that are missing or damaged in the store, and make the run read them. Collective.

    Features of the run's own towers are stored only if a tower is locked and the run sees samples more than once.
    """
    run.stored = [side for side in stored_sides(run.settings, run.epoch_samples) if side in run.built.towers.locked]
    if not run.stored and run.reference is None:
        return
    start, message = time.monotonic(), stop.message
    stop.message = (
        f"stopped while storing features; those stored so far are kept; continue with: "
        f"neuclip train --resume {run.folder.path}"
    )
    if run.stored:
        sides_of = cache(partial(stored_sides_of, run))
        run.batches.read_stored(sides_of(run.source))
        if run.precision == torch.float32:  # evaluation computes in float32
            run.stored_sides = sides_of
    if run.reference is not None:
        assert isinstance(run.objective, DRRho)
        run.objective.look_up = StoredReference(run, run.reference)
    run.started += time.monotonic() - start
    stop.message = message


class StoredReference:
    """Unit features (2, b, d) of the run's reference model by sample ids (b,): of the image, without augmentation, and
    of its first caption. The trunks' features are stored, as for locked towers; a call applies the heads to them."""

    def __init__(self, run: Run, reference: BuiltModel):
        """Compute the features that are missing in the store. Collective."""
        self.towers, self.samples = reference.towers, len(run.source)
        self.sides = stored_sides_of(replace(run, built=reference, stored=["image", "text"]), run.source)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        blocks = [side.only_rows(ids.cpu().numpy()) for side in self.sides.values()]
        if all(blocks):
            rows = [block["features"] for block in blocks if block]
        else:
            rows = [stored_rows("features", places) for places in zip(*map(self._places, ids.tolist()), strict=True)]
        heads = [self.towers.locked[side].head for side in self.sides]
        of_sides = zip(heads, rows, strict=True)
        return torch.stack([F.normalize(head(x.to(self.towers.device)), dim=1) for head, x in of_sides])

    def _places(self, id: int) -> tuple[Place, ...]:
        """Where the rows of a sample are stored, per side. A sample that cannot be used is replaced by the next usable
        one, as in training."""
        for number in range(id, id + self.samples):
            places_of_sides = [side.places(number % self.samples) for side in self.sides.values()]
            if all(places_of_sides):
                return tuple(places[0] for places in places_of_sides)
        raise RunFailed("the reference model cannot use any sample of the data; repair the data")


def stored_sides_of(run: Run, source: Source) -> dict[str, StoredSide]:
    """The stored features of a source, for each tower that the run stores; missing ones are computed. Collective.

    They do not depend on the training: a held-out set is embedded once for all evaluations of all runs.
    """
    parts = source.parts if isinstance(source, Mixture) else (source,)
    return {side: StoredSide(source, [_store_part(run, side, part) for part in parts]) for side in run.stored}


def _store_part(run: Run, side: str, source: Source) -> FeatureStore:
    """The store with all rows of one source. Collective. The ranks of one machine share a cache folder; each checks and
    computes its share of the blocks."""
    store = FeatureStore(storing_key(run, side, source), len(source), BLOCK[side])
    share = slice(int(os.environ.get("LOCAL_RANK", "0")), None, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with sync_errors(), remedy_for_disk(store, optional=run.built is not run.reference):
        if is_main():
            store.describe()
        missing = store.missing(range(store.blocks)[share])  # no rank writes before all have checked
    with sync_errors(), remedy_for_disk(store, optional=run.built is not run.reference):
        _write_blocks(run, side, source, store, missing)
    return store


def _write_blocks(run: Run, side: str, source: Source, store: FeatureStore, blocks: list[int]) -> None:
    transform = run.built.transform if side == "image" else None  # without augmentation
    workers, starts = run.settings.data.workers, [number * store.block for number in blocks]
    batches = read_images(source, transform=transform, batch_size=store.block, workers=workers, starts=starts)
    if is_main():
        samples = min(len(starts) * store.block, len(source))
        kind = "images" if side == "image" else "captions"
        batches = track(batches, f"storing features of {kind}", samples, "samples", step=store.block)
    for number, (start, batch) in enumerate(zip(starts, batches, strict=True)):
        block = _compute(run, side, start, min(store.block, len(source) - start), batch)
        if number == 0:
            _check_disk(store, block.rows["features"].nbytes * len(starts))
        store.write(block)


def _compute(run: Run, side: str, start: int, samples: int, batch: ImageBatch) -> Block:
    """The rows of a block, computed as the training loop does. float32 holds rows of lower precision exactly."""
    counts = np.full(samples, BAD, "<i4")
    captions = [text for texts in batch.captions for text in texts]
    usable = [row for row, texts in enumerate(batch.captions) if side == "image" or texts]
    counts[batch.ids.numpy()[usable] - start] = [1 if side == "image" else len(batch.captions[row]) for row in usable]
    inputs = batch.images if side == "image" else run.built.tokenize(captions) if captions else torch.empty(0)
    rows = {"features": _trunk_features(run, side, inputs).numpy()}
    if side == "text":
        rows["tokens"] = inputs.numpy()
    return Block(start, counts, rows)


def _trunk_features(run: Run, side: str, inputs: Tensor) -> Tensor:  # -> (r, width) float32
    if not len(inputs):
        return torch.empty(0, 1)
    towers = run.built.towers.train()  # a locked tower stays in eval mode
    with torch.autocast(run.device.type, dtype=run.precision, enabled=run.precision != torch.float32):
        return towers.trunk_features(side, inputs.to(run.device)).float().cpu()


def storing_key(run: Run, side: str, source: Source) -> dict[str, object]:
    """Everything that the stored rows depend on, and nothing else: methods with and without a logit bias share them."""
    built = run.built
    model = {name: value for name, value in built.config.items() if not name.startswith("init_logit")}
    transform = re.sub(r" at 0x[0-9a-f]+", "", repr(built.float_transform))
    return {
        "side": side,
        "weights": built.towers.trunk_sha256(side),
        "model": model,
        "transform": transform if side == "image" else "",
        "data": run.fingerprint if source is run.source else fingerprint(source)[0],
        "images": source.images_version(),
        "precision": str(run.precision),
        "device": run.device.type,
        "torch": torch.__version__,  # another version may round differently
    }


def _check_disk(store: FeatureStore, needed: int) -> None:
    free = shutil.disk_usage(store.folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{byte_size(needed)} are needed and {byte_size(free)} are free")


@contextmanager
def remedy_for_disk(store: FeatureStore, *, optional: bool) -> Iterator[None]:
    """Turns a failed read or write of the store into RunFailed. `optional`: the run can do without stored features."""
    try:
        yield
    except OSError as error:
        full = " free some space," if error.errno == errno.ENOSPC else ""
        off = ", or give --data.stored_features off to compute them in every epoch" if optional else ""
        why = f"features cannot be stored ({error.strerror})"
        raise RunFailed(f"{store.folder}: {why};{full} point NEUCLIP_CACHE to another disk{off}") from error
