"""From a source to features: every image once, every different caption once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuclip.data.loader import sequential
from neuclip.data.sample import Fault
from neuclip.data.source import Source
from neuclip.errors import RunFailed
from neuclip.evaluation.unusable import refuse_above
from neuclip.progress import track

Transform = Callable[[Any], Tensor]
Tokenize = Callable[[list[str]], Tensor]


@dataclass(frozen=True)
class EmbeddedImages:
    """The images of a source that could be read, in the order of their ids. On the CPU, float32."""

    features: Tensor  # (n, d) unit rows
    ids: Tensor  # (n,) int64, the source's
    faults: tuple[Fault, ...]  # the samples left out


@dataclass(frozen=True)
class Embedded:
    """The usable pairs of a source. `text_features[caption_of]` are the (n, d) text features pair by pair."""

    image_features: Tensor  # (n, d) unit rows
    text_features: Tensor  # (c, d) unit rows, one for each different caption
    captions: list[str]  # the c different captions in order of first appearance
    caption_of: Tensor  # (n,) int64, row of text_features and captions
    ids: Tensor  # (n,) int64, the source's
    faults: tuple[Fault, ...]  # the samples left out


def embed_pairs(
    towers: nn.Module,
    source: Source,
    *,
    transform: Transform,
    tokenize: Tokenize,
    batch_size: int,
    workers: int,
    what: str,
    max_bad_share: float = 1.0,
) -> Embedded:
    """Features of every usable pair; each image counts with its first caption. `what` names the work in progress.
    Raises TooManyBad when a larger share of the pairs cannot be used, or none can.

    >>> embedded = embed_pairs(towers, source, transform=transform, tokenize=tokenize, batch_size=256, workers=4,
    ...                        what="evaluating on icons-30k/new-drawings")                         # doctest: +SKIP
    """
    images = embed_images(
        towers, source, transform=transform, tokenize=tokenize, batch_size=batch_size, workers=workers, what=what
    )
    all_captions = source.captions()
    named = torch.tensor([bool(all_captions[id]) for id in images.ids.tolist()], dtype=torch.bool)
    unnamed = tuple(Fault(id, "caption is missing", source.where(id)) for id in images.ids[~named].tolist())
    refuse_above(max_bad_share, source, images.faults + unnamed)
    ids = images.ids[named]
    rows: dict[str, int] = {}
    caption_of = torch.tensor([rows.setdefault(all_captions[id], len(rows)) for id in ids.tolist()])
    captions = list(rows)
    return Embedded(
        image_features=images.features[named],
        text_features=embed_texts(towers, captions, tokenize=tokenize, batch_size=batch_size, what=f"{what}, captions"),
        captions=captions,
        caption_of=caption_of,
        ids=ids,
        faults=images.faults + unnamed,
    )


@torch.no_grad()
def embed_images(
    towers: nn.Module,
    source: Source,
    *,
    transform: Transform,
    tokenize: Tokenize,
    batch_size: int,
    workers: int,
    what: str,
) -> EmbeddedImages:
    """Features of every image that can be read. Bad samples are left out: a stand-in must not be scored."""
    features: list[Tensor] = []
    ids: list[Tensor] = []
    faults: list[Fault] = []
    device: Any = towers.device
    batches = sequential(source, transform=transform, tokenize=tokenize, batch_size=batch_size, workers=workers)
    with evaluating(towers):
        for batch in track(batches, what, -(-len(source) // batch_size), "batches"):
            encoded = towers.encode_image(batch.images.to(device)).float().cpu()  # type: ignore[operator]
            bad = torch.tensor([fault.id for fault in batch.faults], dtype=torch.int64)
            usable = ~torch.isin(batch.ids, bad)
            features.append(encoded[usable])
            ids.append(batch.ids[usable])
            faults.extend(batch.faults)
    found = EmbeddedImages(torch.cat(features), torch.cat(ids), tuple(faults))
    check_finite(found.features, f"image features on {source.name}")
    return found


@torch.no_grad()
def embed_texts(
    towers: nn.Module, texts: list[str], *, tokenize: Tokenize, batch_size: int, what: str
) -> Tensor:  # -> (len(texts), d)
    """Unit features of the texts, on the CPU, float32."""
    device: Any = towers.device
    starts = range(0, len(texts), batch_size)
    with evaluating(towers):
        features = torch.cat(
            [
                towers.encode_text(tokenize(texts[start : start + batch_size]).to(device)).float().cpu()  # type: ignore[operator]
                for start in track(starts, what, len(starts), "batches")
            ]
        )
    check_finite(features, "text features")
    return features


@contextmanager
def evaluating(towers: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every part is in the mode it had (locked parts are in eval mode while training)."""
    modes = [(part, part.training) for part in towers.modules()]
    towers.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def check_finite(features: Tensor, what: str) -> None:
    """A row that is not a number would lose or win every comparison, and the score would look like a score."""
    bad = ~features.isfinite().all(dim=1)
    if bad.any():
        raise RunFailed(
            f"{what}: {int(bad.sum()):,} of {len(features):,} rows are not finite, first of all row "
            f"{int(bad.nonzero()[0])}; the towers' weights or their precision are broken, use an earlier checkpoint"
        )
