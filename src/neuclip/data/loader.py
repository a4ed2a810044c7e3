"""Makes batches in worker processes, which read, decode, transform and tokenize; the main process only receives them.

order.ids -> source[id] -> decode -> transform, and a caption -> tokenize -> Batch: one window of the order is one
batch. Stored features of locked towers replace images and captions.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from neuclip.data.decoding import decode, decode_rgb
from neuclip.data.features import StoredSide, stored_rows
from neuclip.data.order import Order, augmentation_seeds
from neuclip.data.source import BadSample, Fault, Sample, Source
from neuclip.errors import RunFailed, UserError

Decode = Callable[[bytes], Any]
Transform = Callable[[Any], Tensor]  # takes what the decoder gives: a Pillow image, or an array
Tokenize = Callable[[list[str]], Tensor]
PREFETCH = 2  # batches that each worker prepares ahead
TRIES = 100  # bad samples in a row after which the run stops


class Batch(NamedTuple):
    """The pairs of one step on one rank."""

    images: Tensor  # (b, 3, H, W); or the features (b, width) of a locked trunk, if they are stored
    tokens: Tensor  # (b, L)
    ids: Tensor  # (b,) int64
    faults: tuple[Fault, ...]
    text_features: Tensor | None = None  # (b, width) of a locked trunk, if they are stored


class ImageBatch(NamedTuple):
    """Images to embed, with all their captions; those that could not be read are left out and named in `faults`."""

    images: Tensor  # (b, 3, H, W); (0,) if none could be read, or without a transform
    ids: Tensor  # (b,) int64
    captions: tuple[tuple[str, ...], ...]
    digests: tuple[bytes, ...]  # 16 bytes each, equal for images of equal bytes
    faults: tuple[Fault, ...]


class Batches:
    """The training batches of one rank. They are equal to the bit for any number of workers.

    `decode` returns what `transform` takes. `transform` and `tokenize` must be picklable: no lambdas, no local
    functions. Batches are consecutive windows of the endless order: the last one of an epoch is filled up from the next
    epoch, never short and never dropped. `start_method` is how workers start: "fork", "spawn" or "forkserver"; None
    means Python's default on this system, except that remote data never fork this process.

    >>> batches = Batches(source, Order(len(source), seed=0), batch_size=1024, transform=transform, tokenize=tokenize,
    ...                   seed=0, workers=4)                                                        # doctest: +SKIP
    >>> for batch in batches.steps(first_sample=0, count=100): ...                                  # doctest: +SKIP
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
                f"train.batch_size {batch_size} does not divide over {ranks} ranks; give --train.batch_size {choices}"
            )
        self.batch_size, self.rank, self.workers, self.start_method = batch_size, rank, workers, start_method
        self.windows = TrainingWindows(source, order, batch_size // ranks, decode, transform, tokenize, seed)

    def steps(self, first_sample: int, count: int) -> Iterator[Batch]:
        """This rank's rows of `count` consecutive windows of batch_size positions, from `first_sample` on."""
        first = first_sample + self.rank * self.windows.size
        starts = range(first, first + count * self.batch_size, self.batch_size)
        return load(self.windows, starts, self.workers, self.start_method)

    def read_stored(self, stored: Mapping[str, StoredSide]) -> None:
        """Use the stored features of the towers "image" or "text" instead of images or captions."""
        self.windows.image_store, self.windows.text_store = stored.get("image"), stored.get("text")
        if len(stored) == 2:
            self.workers = 0  # reading rows is faster than passing them between processes


@dataclass(eq=False)
class TrainingWindows(Dataset):
    """The data set that worker processes receive: maps the first position of a window to its batch. Augmentation and
    choice of caption depend on (seed, epoch, id)."""

    source: Source
    order: Order
    size: int
    decode: Decode
    transform: Transform
    tokenize: Tokenize
    seed: int
    image_store: StoredSide | None = None
    text_store: StoredSide | None = None

    def __getitem__(self, start: int) -> Batch | RunFailed:
        ids = self.order.ids(start, self.size)
        if (stored := self._stored_batch(ids)) is not None:
            return stored
        seeds = augmentation_seeds(self.seed, self.order.epochs(start, self.size), ids)
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        faults: list[Fault] = []
        try:
            if ahead := self.order.shards_ahead(start) if self._reads_source else []:
                self.source.prefetch(ahead)
            pairs = [
                self._pair_or_next(id, seed, faults) for id, seed in zip(ids.tolist(), seeds.tolist(), strict=True)
            ]
            images, captions = zip(*pairs, strict=True)
            return self._collate(images, captions, torch.from_numpy(ids), tuple(faults))
        except RunFailed as failure:
            return failure  # raised in a worker, it would reach the user as a traceback in a traceback
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)

    @property
    def _reads_source(self) -> bool:
        return self.image_store is None or self.text_store is None

    def _stored_batch(self, ids: np.ndarray) -> Batch | None:
        """The batch, if both towers' features are stored and no sample needs a draw or a replacement; else None.
        Building it sample by sample would take most of a step."""
        if self.image_store is None or self.text_store is None:
            return None
        images, texts = self.image_store.only_rows(ids), self.text_store.only_rows(ids)
        if images is None or texts is None:
            return None
        return Batch(images["features"], texts["tokens"].long(), torch.from_numpy(ids), (), texts["features"])

    def _pair_or_next(self, id: int, seed: int, faults: list[Fault]) -> tuple[Any, Any]:
        """The pair of a sample or, if it is bad, of the first usable sample after it in the source. In the batch, the
        bad sample keeps its id and its position."""
        size, bad = len(self.source), None
        for step in range(min(TRIES + 1, size)):
            try:
                return self._pair((id + step) % size, seed)
            except BadSample as error:
                if bad is None:
                    bad = error
                    faults.append(Fault(id, bad.reason, bad.where))
        assert bad is not None
        raise RunFailed(
            f"sample {id} is bad ({bad.reason}, {bad.where}) and so are the {min(TRIES, size - 1)} after it; no "
            "replacement found; repair or remove that part of the data"
        )

    def _pair(self, id: int, seed: int) -> tuple[Any, Any]:
        """The image and the caption, or for stored features the places of their rows. Every random choice depends only
        on (seed, epoch, id)."""
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        sample = self.source[id] if self._reads_source else None
        caption = self.text_store.draw(id) if self.text_store else draw_caption(self.source, id, sample)
        image = self.image_store.draw(id) if self.image_store else self._pixels(id, sample)
        if caption is None or image is None:
            self._raise_why_bad(id)
        return image, caption

    def _pixels(self, id: int, sample: Sample | None) -> Tensor:
        assert sample is not None
        return pixels(self.source, id, sample, self.decode, self.transform)

    def _raise_why_bad(self, id: int) -> None:
        """Raise BadSample for a sample that could not be used when features were stored. Reading it again finds the
        reason."""
        self._pixels(id, self.source[id])
        raise BadSample("sample could not be used when its features were stored", self.source.where(id))

    def _collate(self, images: Sequence[Any], captions: Sequence[Any], ids: Tensor, faults: tuple[Fault, ...]) -> Batch:
        stacked = stored_rows("features", images) if self.image_store else default_collate(list(images))
        if self.text_store:
            tokens, text_features = (stored_rows(name, captions) for name in ("tokens", "features"))
            return Batch(stacked, tokens.long(), ids, faults, text_features)
        return Batch(stacked, self.tokenize(list(captions)), ids, faults)


def draw_caption(source: Source, id: int, sample: Sample | None) -> str:
    if sample is None or not sample.captions:
        raise BadSample("caption is missing", source.where(id))
    return random.choice(sample.captions) if len(sample.captions) > 1 else sample.captions[0]


def pixels(source: Source, id: int, sample: Sample, decode: Decode, transform: Transform) -> Tensor:  # (3, H, W)
    try:
        image = decode(sample.image)
    except BadSample as bad:
        raise BadSample(bad.reason, source.where(id)) from bad
    try:
        return transform(image)
    except (ValueError, OSError, ZeroDivisionError) as error:  # an image one pixel wide, for example
        raise BadSample("image cannot be transformed", f"{source.where(id)} ({error})") from error


@dataclass(eq=False)
class ImageWindows(Dataset):
    """Maps the first id of a block to its images in order, with all their captions. Bad samples are left out, not
    replaced. Without a `transform`, images are not decoded."""

    source: Source
    size: int
    transform: Transform | None
    end: int  # the id after the last

    def __getitem__(self, start: int) -> ImageBatch | RunFailed:
        images, ids, captions, digests = [], [], [], []
        faults: list[Fault] = []
        try:
            for id in range(start, min(start + self.size, self.end)):
                try:
                    sample = self.source[id]
                    if self.transform is not None:
                        images.append(pixels(self.source, id, sample, decode_rgb, self.transform))
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


def read_images(
    source: Source,
    *,
    transform: Transform | None,
    batch_size: int,
    workers: int,
    ids: range | None = None,
    starts: Sequence[int] | None = None,
    start_method: str | None = None,
) -> Iterator[ImageBatch]:
    """Batches of every sample once, in order, with all its captions. `ids`: only these consecutive samples; `starts`:
    only the batches that begin at these ids. The last batch may be smaller."""
    ids = range(len(source)) if ids is None else ids
    starts = range(ids.start, ids.stop, batch_size) if starts is None else starts
    return load(ImageWindows(source, batch_size, transform, ids.stop), starts, workers, start_method)


def load(
    windows: TrainingWindows | ImageWindows, starts: Sequence[int], workers: int, start_method: str | None = None
) -> Iterator[Any]:
    """The batch of each start, in order. A killed worker is a one-line RunFailed; a worker that hangs does not delay
    the end of this process."""
    workers = min(workers, len(starts))
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
            f"a data worker was killed ({reason}), usually because memory ran out; "
            f"give fewer than --data.workers {workers}, or more memory (/dev/shm in a container)"
        ) from error
    finally:
        if workers and not finished:  # otherwise torch or, at exit, Python would wait for a worker that hangs
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()


def _is_lost_worker(error: Exception) -> bool:
    """Whether torch raised this error because a worker died, and not because of an error inside the worker."""
    if "Original Traceback" in str(error) or isinstance(error, RunFailed):
        return False
    return not isinstance(error, RuntimeError) or "DataLoader worker" in str(error)


def _start(
    windows: TrainingWindows | ImageWindows, starts: Sequence[int], workers: int, start_method: str | None
) -> Iterator[Any]:
    """Start the workers. Returns torch's iterator over their batches."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if main else None
    try:
        with warnings.catch_warnings():
            # torch warns in three lines of more workers than cores; runs/build.py does it in one.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader = DataLoader(
                windows,
                batch_size=None,  # a window already is a batch
                sampler=starts,
                num_workers=workers,
                collate_fn=_identity,
                generator=torch.Generator(),  # otherwise the loader would draw from the main process's generator
                prefetch_factor=PREFETCH if workers else None,
                worker_init_fn=_start_worker,
                multiprocessing_context=(start_method or _start_method_for(windows)) if workers else None,
            )
            return iter(loader)
    finally:
        # torch's signal handler raises when a worker dies, wherever the main process is at that moment. Without the
        # handler, the loader notices within five seconds and raises where the error is expected.
        if main:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def _start_method_for(windows: TrainingWindows | ImageWindows) -> str | None:
    """The start method of workers; None for Python's default. Downloads run in threads, and a fork copies the locks
    they hold but not the threads that would release them. So workers that download are forked from a server process
    without such threads, which has already imported what they need."""
    if windows.source.shard_ends is None:
        return None
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    needed = [getattr(part, "__module__", "") for part in (windows, *vars(windows).values())]
    multiprocessing.set_forkserver_preload([name for name in needed if name])
    return "forkserver"


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(number: int) -> None:
    """Ignore the signals that reach every process of a terminal, such as Ctrl-C: the main process handles them and ends
    its workers."""
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker would have inherited the trainer's handler
    torch.set_num_threads(1)
