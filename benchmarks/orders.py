"""Order and resume of four loaders and ours: which samples are repeated or lost, also with other workers and ranks.

Ranks are real processes (fork). Prints a Markdown table: python -W ignore benchmarks/orders.py
What is not installed is left out: pip install torchdata webdataset==0.2.111 mosaicml-streaming (0.2.111 has wids)
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import distributed as dist
from torch import multiprocessing
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from neuclip.data.loader import Batches
from neuclip.data.order import Order
from neuclip.data.source import FACTS, Sample, Source, caption_facts

SIZE, BATCH, EPOCHS, STOP = 1003, 32, 2, 10
DATA: Any = range(SIZE)
HEAD = """|loader|repeated / lost per epoch|steps that differ with 0-4 workers|with 1 or 2 ranks|\
resume|with 3 workers|with 2 ranks|at the end of the epoch|bytes of state|"""


class Place(NamedTuple):
    rank: int
    ranks: int
    workers: int


class Read(NamedTuple):
    ids: list[int]  # one batch of one process
    epochs: list[int]  # of each
    state: Callable[[], Any]  # after it


def read(loader: Any, epoch: int, state: Callable[[], Any] = lambda: None) -> Iterator[Read]:
    for batch in loader:
        yield Read([int(id) for id in batch], [epoch] * len(batch), state)


def plain_torch(place: Place, saved: Any, folder: Path) -> Iterator[Read]:
    return without_state(DistributedSampler(DATA, place.ranks, place.rank), place)


def wids(place: Place, saved: Any, folder: Path) -> Iterator[Read]:
    return without_state(import_module("wids").DistributedChunkedSampler(DATA, chunksize=100), place)


def without_state(sampler: Any, place: Place) -> Iterator[Read]:
    loader = DataLoader(DATA, BATCH // place.ranks, sampler=sampler, num_workers=place.workers, collate_fn=list)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from read(loader, epoch)


def stateful(place: Place, saved: Any, folder: Path) -> Iterator[Read]:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(DATA, place.ranks, place.rank, seed=0)
    loader = StatefulDataLoader(DATA, BATCH // place.ranks, sampler=sampler, num_workers=place.workers, collate_fn=list)
    if saved:
        loader.load_state_dict(saved["loader"])
    for epoch in range(saved["epoch"] if saved else 0, EPOCHS):
        sampler.set_epoch(epoch)
        yield from read(loader, epoch, lambda: {"epoch": sampler.epoch, "loader": loader.state_dict()})


def mosaic(place: Place, saved: Any, folder: Path) -> Iterator[Read]:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    if place.rank == 0:
        with MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=2000) as writer:
            for id in DATA:
                writer.write({"id": id})
    dist.barrier()
    share = BATCH // place.ranks
    data = StreamingDataset(local=str(folder), batch_size=share, shuffle=True, num_canonical_nodes=1)
    loader = StreamingDataLoader(data, batch_size=share, num_workers=place.workers)
    if saved:
        loader.load_state_dict(saved)
    for epoch in range(saved["epoch"] if saved else 0, EPOCHS):
        yield from read((batch["id"] for batch in loader), epoch, loader.state_dict)


class Dots(Source):
    """SIZE times the same image of one pixel."""

    name = kind = "dots"

    def __init__(self) -> None:
        dot = io.BytesIO()
        Image.new("RGB", (1, 1)).save(dot, "PNG")
        self.sample = Sample(dot.getvalue(), ("a dot",))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, id: int) -> Sample:
        return self.sample

    def where(self, id: int) -> str:
        return f"dot {id}"

    def caption_facts(self) -> Iterator[np.ndarray]:
        yield np.array([caption_facts(["a dot"])] * SIZE, dtype=FACTS)


def neuclip(place: Place, saved: Any, folder: Path) -> Iterator[Read]:
    order, share, first = Order(SIZE, seed=0), BATCH // place.ranks, saved or 0
    how: dict[str, Any] = {"transform": lambda image: torch.zeros(1), "tokenize": lambda texts: torch.zeros(1)}
    batches = Batches(Dots(), order, batch_size=BATCH, seed=0, **place._asdict(), **how)
    for step, batch in enumerate(batches.steps(first, -(-(EPOCHS * SIZE - first) // BATCH))):
        start = first + step * BATCH
        epochs = order.epochs(start + place.rank * share, share).tolist()
        yield Read(batch.ids.tolist(), epochs, partial(int, start + BATCH))


LOADERS: dict[str, tuple[str, Callable[[Place, Any, Path], Iterator[Read]]]] = {
    "torch DistributedSampler": ("torch", plain_torch),
    "torchdata StatefulDataLoader": ("torchdata", stateful),
    "wids DistributedChunkedSampler": ("wids", wids),
    "mosaicml-streaming": ("streaming", mosaic),
    "neuclip": ("neuclip", neuclip),
}


def one_rank(rank: int, name: str, ranks: int, workers: int, saved: Any, stop: int | None, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mine = saved and saved[rank]  # to fewer ranks, each its own state
    reads = list(islice(LOADERS[name][1](Place(rank, ranks, workers), mine, folder / "mds"), stop))
    result = [(read.ids, read.epochs) for read in reads], reads[-1].state() if stop else None
    (folder / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()


class Run(NamedTuple):
    steps: list[list[int]]  # the ids of each step, of all ranks, sorted: who holds which row may differ
    first_epoch: Counter[int]  # how often each id came in it
    states: list[Any]


def run(name: str, ranks: int, workers: int, saved: Any = None, stop: int | None = None) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, ranks, workers, saved, stop, Path(folder))
        multiprocessing.start_processes(one_rank, arguments, nprocs=ranks, start_method="fork")
        results = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]
    batches, states = zip(*results, strict=True)
    steps = [sorted(id for ids, _ in step for id in ids) for step in zip_longest(*batches, fillvalue=([], []))]
    pairs = [pair for reads in batches for read in reads for pair in zip(*read, strict=True)]
    return Run(steps, Counter(id for id, epoch in pairs if epoch == 0), list(states))


def compare_resume(name: str, whole: Run, before: Run, ranks: int, workers: int) -> str:  # from its state on
    if before.states[0] is None:
        return "no state"
    try:
        joined = before.steps + run(name, ranks, workers, saved=before.states).steps
    except multiprocessing.ProcessRaisedException as error:
        return f"refused: {last_line(error)}"
    if joined == whole.steps:
        return "exact"
    once, seen = Counter(dict.fromkeys(DATA, EPOCHS)), Counter(id for step in joined for id in step)
    return f"{(seen - once).total()} repeated, {(once - seen).total()} lost"


def row(name: str) -> list[str]:
    def differing(ranks: int, workers: int) -> int:
        return sum(one != other for one, other in zip_longest(whole.steps, run(name, ranks, workers).steps))

    whole, before = run(name, 4, 2), run(name, 4, 2, stop=STOP)
    return [
        f"{whole.first_epoch.total() - len(whole.first_epoch)} / {SIZE - len(whole.first_epoch)}",
        str(max(differing(4, workers) for workers in (0, 1, 3, 4))),
        str(max(differing(ranks, 2) for ranks in (1, 2))),
        *(compare_resume(name, whole, before, ranks, workers) for ranks, workers in ((4, 2), (4, 3), (2, 2))),
        compare_resume(name, whole, run(name, 4, 2, stop=-(-SIZE // BATCH)), 4, 2),
        str(len(pickle.dumps(before.states[0]))) if before.states[0] else "-",
    ]


def last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def main() -> None:
    print(f"{SIZE} samples, batches of {BATCH}, {EPOCHS} epochs, 4 ranks with 2 workers; stopped after step {STOP}\n")
    print(HEAD + "\n|" + "---|" * (HEAD.count("|") - 1))
    import_module("neuclip.models")  # lets a torchvision for CUDA import beside a CPU-only torch
    for name, (package, _) in LOADERS.items():
        if find_spec(package):
            import_module(package)  # before the fork, else every rank imports it
            try:
                cells = row(name)
            except multiprocessing.ProcessRaisedException as error:
                cells = [f"failed: {last_line(error)}"]
            print("|".join(["", name, *cells, ""]), flush=True)


if __name__ == "__main__":
    main()
