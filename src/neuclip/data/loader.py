"""From the order to batches: worker processes read, decode, transform and tokenize; the main process only receives.

order.ids -> source[id] -> decode -> transform, and a caption -> tokenize -> Batch: one window of the order is one
batch. Features of locked towers that are stored take the place of images and captions.
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
PREFETCH = 2  # batches that each worker has ready
TRIES = 100  # after so many bad samples in a row the run stops


class Batch(NamedTuple):
    """The pairs of one step, or of one rank's share of it."""

    images: Tensor  # (b, 3, H, W); or the features (b, width) of a locked trunk, where they are stored
    tokens: Tensor  # (b, L)
    ids: Tensor  # (b,) int64
    faults: tuple[Fault, ...]
    text_features: Tensor | None = None  # (b, width) of a locked trunk, where they are stored


class ImageBatch(NamedTuple):
    """Images to embed, with all their captions; those that could not be read are left out and named in `faults`."""

    images: Tensor  # (b, 3, H, W); (0,) where none could be read, or none was asked for
    ids: Tensor  # (b,) int64
    captions: tuple[tuple[str, ...], ...]
    digests: tuple[bytes, ...]  # 16 bytes each, equal for images of equal bytes
    faults: tuple[Fault, ...]


class Batches:
    """The training batches of one rank, the same to the bit for any number of workers.

    `transform` and `tokenize` must be picklable: no lambdas, no local functions. Batches are consecutive windows of the
    endless order: the last one of an epoch is filled up from the next epoch, never short and never dropped.
    `start_method` is how workers start ("fork", "spawn", "forkserver"; None: Python's default on this system, and
    never a fork of this process for data that are downloaded). `decode` gives what `transform` takes.

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
        """`count` consecutive windows of batch_size positions from `first_sample` on; of each, this rank's rows."""
        first = first_sample + self.rank * self.windows.size
        starts = range(first, first + count * self.batch_size, self.batch_size)
        return load(self.windows, starts, self.workers, self.start_method)

    def read_stored(self, stored: Mapping[str, StoredSide]) -> None:
        """Take features of the towers "image" or "text" from where they are stored."""
        self.windows.image_store, self.windows.text_store = stored.get("image"), stored.get("text")
        if len(stored) == 2:
            self.workers = 0  # reading rows is faster than passing them between processes


@dataclass(eq=False)
class TrainingWindows(Dataset):
    """The start of a window of positions -> its batch. Augmentation and choice of caption depend on (seed, epoch, id).

    What worker processes receive.
    """

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
            pairs = [self._pair_or_next(*one, faults) for one in zip(ids.tolist(), seeds.tolist(), strict=True)]
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
        """Where nothing has to be read, drawn or replaced: one sample after the other would take most of a step."""
        if self.image_store is None or self.text_store is None:
            return None
        images, texts = self.image_store.only_rows(ids), self.text_store.only_rows(ids)
        if images is None or texts is None:
            return None
        return Batch(images["features"], texts["tokens"].long(), torch.from_numpy(ids), (), texts["features"])

    def _pair_or_next(self, id: int, seed: int, faults: list[Fault]) -> tuple[Any, Any]:
        """The sample, or the first usable one after it in source order: a bad sample keeps its id and its place."""
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
            "replacement found; repair or leave out that part of the data"
        )

    def _pair(self, id: int, seed: int) -> tuple[Any, Any]:
        """Image and caption, or where the rows of their features are stored. Every draw depends on (seed, epoch, id)
        alone."""
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
        """A sample that could not be used when features were stored: reading it says why."""
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
    """The start of a block of ids -> its images as they lie, with all their captions; bad ones are left out, not
    replaced. Without a `transform` only captions are given."""

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
    """Every id once, in order, with all its captions; `ids`: only these consecutive ones; `starts`: only the batches
    that begin there. The last batch is what is left."""
    ids = range(len(source)) if ids is None else ids
    starts = range(ids.start, ids.stop, batch_size) if starts is None else starts
    return load(ImageWindows(source, batch_size, transform, ids.stop), starts, workers, start_method)


def load(
    windows: TrainingWindows | ImageWindows, starts: Sequence[int], workers: int, start_method: str | None = None
) -> Iterator[Any]:
    """The batch of each start, in order. A worker that was killed is one line, one that hangs no wait."""
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


def _start(
    windows: TrainingWindows | ImageWindows, starts: Sequence[int], workers: int, start_method: str | None
) -> Iterator[Any]:
    """torch's iterator, with its workers started."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if main else None
    try:
        with warnings.catch_warnings():
            # More workers than cores: three lines in torch's words; runs/build.py says it in one.
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
            return iter(loader)
    finally:
        # torch listens for the death of a worker and raises wherever the main process is then. Without that, the loader
        # finds out within five seconds, where its error is expected.
        if main:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def _start_method_for(windows: TrainingWindows | ImageWindows) -> str | None:
    """None: Python's default. Downloads run in threads, and a fork copies the locks they hold, but not the threads that
    would release them: workers that download are forked from a server process that has none. It has already imported
    what they need."""
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
    """Ctrl-C reaches every process of the terminal; only the main one decides what it means and ends its workers."""
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked worker would have inherited the trainer's handler
    torch.set_num_threads(1)
