"""From the order to batches: worker processes read, decode, transform and tokenize; the main process only receives."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from neuclip.data.decoding import decode
from neuclip.data.faults import ReadingFailed, replacements
from neuclip.data.order import Order, SourceOrder, augmentation_seeds
from neuclip.data.sample import BadSample, Batch, Fault, ImageBatch, Sample
from neuclip.data.source import Source
from neuclip.errors import RunFailed, UserError

Decode = Callable[[bytes], Any]
Transform = Callable[[Any], Tensor]  # takes what the decoder gives: a Pillow image, or an array
Tokenize = Callable[[list[str]], Tensor]
PREFETCH = 2  # batches that each worker has ready


class Batches:
    """The training batches of one rank, the same to the bit for any number of workers.

    `transform` and `tokenize` must be picklable: no lambdas, no local functions. Batches are consecutive windows of the
    endless order: the last one of an epoch is filled up from the next epoch, never short and never dropped.
    `start_method` is how workers start ("fork", "spawn", "forkserver"; None: Python's default on this system, and
    never a fork of this process for data that are downloaded). `decode` gives what `transform` takes.

    >>> batches = Batches(source, Order(len(source), seed=0), batch_size=1024, transform=transform, tokenize=tokenize,
    ...                   seed=0, workers=4)
    >>> for batch in batches.steps(first_sample=0, count=100): ...
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        *,
        batch_size: int,
        transform: Transform,
        tokenize: Tokenize,
        seed: int,
        workers: int,
        rank: int = 0,
        ranks: int = 1,
        start_method: str | None = None,
        decode: Decode = decode,
    ):
        if batch_size % ranks:
            below = batch_size // ranks * ranks
            choices = f"{below} or {below + ranks}" if below else f"{ranks}"
            raise UserError(
                f"train.batch_size {batch_size} does not divide over {ranks} processes; "
                f"give --train.batch_size {choices}"
            )
        self.batch_size = batch_size
        self.local_batch = batch_size // ranks
        self.rank = rank
        self.workers = workers
        self.start_method = start_method
        self.windows = TrainingWindows(source, self.local_batch, transform, order, tokenize, seed, decode)

    def steps(self, first_sample: int, count: int) -> Iterator[Batch]:
        """`count` consecutive windows of batch_size positions from `first_sample` on; of each, this rank's rows."""
        first = first_sample + self.rank * self.local_batch
        starts = range(first, first + count * self.batch_size, self.batch_size)
        return load_windows(self.windows, starts, min(self.workers, count), self.start_method)


def sequential(
    source: Source,
    *,
    transform: Transform,
    batch_size: int,
    workers: int,
    ids: range | None = None,
    start_method: str | None = None,
) -> Iterator[ImageBatch]:
    """Every id once, in order, with all its captions; `ids`: only these consecutive ones. The last batch is what is
    left."""
    ids = range(len(source)) if ids is None else ids
    starts = range(ids.start, ids.stop, batch_size)
    windows = ImageWindows(source, batch_size, transform, end=ids.stop)
    return load_windows(windows, starts, min(workers, len(starts)), start_method)


@dataclass(eq=False)
class Windows(Dataset):
    """Map-style: the start of a window of positions -> its batch. What worker processes receive."""

    source: Source
    size: int
    transform: Transform

    def pixels(self, id: int, sample: Sample, decode: Decode = decode) -> Tensor:
        try:
            image = decode(sample.image)
        except BadSample as bad:
            raise BadSample(bad.reason, self.source.where(id)) from bad
        try:
            return self.transform(image)
        except (ValueError, OSError, ZeroDivisionError) as error:  # an image one pixel wide, for example
            raise BadSample("image cannot be transformed", f"{self.source.where(id)} ({error})") from error


@dataclass(eq=False)
class TrainingWindows(Windows):
    """Pairs in the order of training; augmentation and one of several captions are drawn by (seed, epoch, id)."""

    order: Order
    tokenize: Tokenize
    seed: int
    decode: Decode = decode

    def __getitem__(self, start: int) -> Batch | RunFailed:
        ids = self.order.ids(start, self.size)
        seeds = augmentation_seeds(self.seed, self.order.epochs(start, self.size), ids)
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        try:
            self._prefetch(start)
            return self._batch(ids, seeds)
        except RunFailed as failure:
            return failure  # raised in a worker, it would reach the user as a traceback in a traceback
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)

    def _prefetch(self, start: int) -> None:
        self.source.prefetch(self.order, start, self.size)

    def _batch(self, ids: np.ndarray, seeds: np.ndarray) -> Batch:
        images, captions = [], []
        faults: list[Fault] = []
        for id, seed in zip(ids.tolist(), seeds.tolist(), strict=True):
            try:
                image, caption = self._pair_or_replacement(id, seed, faults)
            except RunFailed as failure:
                raise ReadingFailed(str(failure), tuple(faults)) from failure
            images.append(image)
            captions.append(caption)
        stacked, tokens, features = self._collate(images, captions)
        return Batch(stacked, tokens, torch.from_numpy(ids), tuple(faults), features)

    def _collate(self, images: list[Any], captions: list[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        return default_collate(images), self.tokenize(captions), None

    def _pair_or_replacement(self, id: int, seed: int, faults: list[Fault]) -> tuple[Any, Any]:
        """`faults` grows by one if the sample is bad; if it has no replacement, by all that were tried."""
        try:
            return self._pair(id, seed)
        except BadSample as bad:
            faults.append(Fault(id, bad.reason, bad.where))
            first = bad
        tried = []
        for other in replacements(id, len(self.source)):
            try:
                return self._pair(other, seed)
            except BadSample as bad:
                tried.append(Fault(other, bad.reason, bad.where))
        faults += tried
        raise RunFailed(
            f"sample {id} is bad ({first.reason}, {first.where}) and so are the {len(tried)} after it; "
            "no replacement found; repair or leave out that part of the data"
        )

    def _pair(self, id: int, seed: int) -> tuple[Any, Any]:
        """Image and caption; every draw in it depends on (seed, epoch, id) alone."""
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        sample = self.source[id]
        caption = self._caption(id, sample)
        return self.pixels(id, sample, self.decode), caption

    def _caption(self, id: int, sample: Sample) -> str:
        if not sample.captions:
            raise BadSample("caption is missing", self.source.where(id))
        return random.choice(sample.captions) if len(sample.captions) > 1 else sample.captions[0]


def decode_rgb(content: bytes) -> Image.Image:
    """As the field's evaluations do it, before any resizing: a palette cannot be interpolated, and colours under full
    transparency count."""
    return decode(content).convert("RGB")


@dataclass(eq=False)
class ImageWindows(Windows):
    """Images as they lie, with all their captions; nothing is drawn, and a bad sample is left out, not replaced."""

    end: int  # the id after the last

    def __getitem__(self, start: int) -> ImageBatch | RunFailed:
        images, ids, captions, digests = [], [], [], []
        faults: list[Fault] = []
        try:
            self.source.prefetch(SourceOrder(len(self.source)), start, self.size)
            for id in range(start, min(start + self.size, self.end)):
                try:
                    sample = self.source[id]
                    images.append(self.pixels(id, sample, decode_rgb))
                except BadSample as bad:
                    faults.append(Fault(id, bad.reason, bad.where))
                    continue
                ids.append(id)
                captions.append(sample.captions)
                digests.append(hashlib.blake2b(sample.image, digest_size=16).digest())
        except RunFailed as failure:
            return failure
        stacked = default_collate(images) if images else torch.empty(0)
        return ImageBatch(stacked, torch.tensor(ids, dtype=torch.int64), tuple(captions), tuple(digests), tuple(faults))


def load_windows(windows: Windows, starts: Sequence[int], workers: int, start_method: str | None) -> Iterator[Any]:
    others, finished = multiprocessing.active_children(), False
    try:
        # No name for the iterator: a failure's traceback would hold it, and workers that the garbage collector ends
        # take ten seconds.
        for batch in _start(windows, starts, workers, start_method):
            if isinstance(batch, RunFailed):
                raise batch
            yield batch
        finished = True
    except (RuntimeError, EOFError, OSError) as error:
        if not workers or not _is_lost_worker(error):
            raise  # a bug of ours keeps its traceback
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunFailed(
            f"a data worker was ended from outside ({reason}), most often because memory ran out; "
            f"give fewer than --data.workers {workers}, or more memory (/dev/shm in a container)"
        ) from error
    finally:
        if workers and not finished:  # torch and Python would wait for a worker that hangs, at the latest on exit
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()


def _is_lost_worker(error: Exception) -> bool:
    """Whether torch could not go on without a worker, rather than passes on an error from inside it."""
    if "Original Traceback" in str(error) or isinstance(error, RunFailed):
        return False
    return not isinstance(error, RuntimeError) or "DataLoader worker" in str(error)


def _start(windows: Windows, starts: Sequence[int], workers: int, start_method: str | None) -> Iterator[Any]:
    """torch's iterator, with its workers started."""
    with warnings.catch_warnings():
        # More workers than cores: three lines in torch's words; training/run.py says it in one.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            windows,
            batch_size=None,  # a window already is a batch
            sampler=starts,
            num_workers=workers,
            collate_fn=_identity,
            generator=torch.Generator(),  # else the loader draws from the main process's generator
            prefetch_factor=PREFETCH if workers else None,
            worker_init_fn=_start_worker,
            multiprocessing_context=(start_method or _start_method_for(windows)) if workers else None,
        )
        with _own_child_signals():
            return iter(loader)


@contextmanager
def _own_child_signals() -> Iterator[None]:
    """torch listens for the death of a worker and raises its error wherever the main process is then. Without that, the
    loader finds out within five seconds, where its error is expected."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def _start_method_for(windows: Windows) -> str | None:
    """None: Python's default. Downloads run in threads, and a fork copies the locks they hold, but not the threads that
    would release them: workers that download are forked from a server process that has none. It has already imported
    what they need."""
    if not windows.source.fetches:
        return None
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    needed = [getattr(part, "__module__", "") for part in (windows, *vars(windows).values())]
    multiprocessing.set_forkserver_preload([name for name in needed if name])
    return "forkserver"


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(number: int) -> None:
    """Ctrl-C reaches every process of the terminal; only the main one decides what it means and ends its workers."""
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker would have inherited the trainer's handler
    torch.set_num_threads(1)
