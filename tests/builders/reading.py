"""How tests open data and read them: as users and runs do, with results that are compared in one line."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from PIL import Image

from neuclip.data import held_out, loader
from neuclip.data import open as opening
from neuclip.data import source as sources
from neuclip.data.loader import Batch, Batches
from neuclip.data.order import Order
from neuclip.data.source import BadSample, Source
from neuclip.data.tar.remote import Limits
from neuclip.errors import RunFailed, UserError
from neuclip.settings.reading import read_settings
from tests.builders.data import plain, tokenize


def open_source(address: object, *, cache_size: int = 10**9, timeout: float = 20, tries: int = 3, **columns: str):
    """`cache_size`, `timeout` and `tries` are limits of remote data."""
    limits = Limits(cache_size, timeout, attempts=tries, first_wait=0)
    return opening.open_source(str(address), limits=limits, **columns)


def settings(*flags: str):
    return read_settings(None, list(flags))


def training_data(address: object, *flags: str) -> Source:
    return opening.open_training_data(settings("--data.train", str(address), *flags))


def retrieval(address: object, *flags: str) -> Source:
    """One sample per image, as what is measured on is opened."""
    return held_out.open_retrieval(str(address), settings(*flags))


def training(
    source: Source,
    *,
    seed: int = 0,
    batch_size: int = 6,
    order: Order | None = None,
    transform: Callable[[Image.Image], torch.Tensor] = plain,
    tokens: Callable[[list[str]], torch.Tensor] = tokenize,
    workers: int = 0,
    **options: Any,
) -> Batches:
    """`options` are rank, ranks and start_method."""
    order = order or Order(len(source), seed)
    options |= {"batch_size": batch_size, "transform": transform, "tokenize": tokens, "seed": seed, "workers": workers}
    return Batches(source, order, **options)


def batches(source: Source, *, steps: int = 1, first: int = 0, **options: Any) -> Iterator[Batch]:
    """Those of training from sample `first` on."""
    return training(source, **options).steps(first, steps)


def ids_of(batches: Iterable[Batch]) -> list[int]:
    return [id for batch in batches for id in batch.ids.tolist()]


def read_images(source: Source, *, batch_size: int = 4, transform=plain, workers: int = 0, **options: Any):
    """Batches of evaluation: every id once, in order."""
    return loader.read_images(source, transform=transform, batch_size=batch_size, workers=workers, **options)


def content(source: Source) -> list[tuple[bytes, tuple[str, ...]]]:
    return [(one.image, one.captions) for one in (source[id] for id in range(len(source)))]


def captions(source: Source) -> list[tuple[str, ...]]:
    return [captions for _, captions in content(source)]


def texts(address: object, **columns: str) -> list[str]:
    """The first caption of every sample."""
    return [one[0] for one in captions(open_source(address, **columns))]


def outcomes(source: Source) -> list[str]:
    """Of each id its first caption, or the reason why it is bad."""
    results = []
    for id in range(len(source)):
        try:
            results.append(source[id].captions[0])
        except BadSample as bad:
            results.append(bad.reason)
    return results


def fault_of(source: Source, id: int) -> BadSample:
    with pytest.raises(BadSample) as caught:
        source[id]
    return caught.value


def faults(source: Source) -> list[tuple[str, str, int]]:
    """What could not be indexed: reason, place, how many."""
    assert all(fault.id == -1 for fault in source.faults)
    return [(fault.reason, fault.where, fault.times) for fault in source.faults]


def fingerprint(source: Source) -> tuple[int, str]:
    found, _ = sources.fingerprint(source)
    return int(found["count"]), str(found["sha256"])


def caption_counts(source: Source) -> str:
    return str(sources.fingerprint(source)[1])


def travelled(source: Any) -> Any:
    """As it arrives in another process."""
    return pickle.loads(pickle.dumps(source))


def refusal(action: object, kind: type[Exception] = UserError, **columns: Any) -> str:
    """The one line with which an address, or a call, is refused."""
    with pytest.raises(kind) as caught:
        action() if callable(action) else open_source(action, **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def failure(action: object, **columns: Any) -> str:
    """The one line with which a run ends because of the machine, or of the data."""
    return refusal(action, RunFailed, **columns)
