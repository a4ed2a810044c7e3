"""From a source to features: every image once, every different caption once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuclip.data.faults import by_reason, count_unindexed
from neuclip.data.loader import sequential
from neuclip.data.sample import Fault
from neuclip.data.source import Source
from neuclip.errors import RunFailed
from neuclip.models.towers import BuiltModel
from neuclip.progress import track


class TooManyBad(RunFailed):
    """So many samples of a set are bad that a figure over the rest would say nothing about the set."""

    def __init__(self, source: Source, faults: Sequence[Fault], limit: float):
        counts = by_reason((*source.faults, *faults))
        reason, count = counts.most_common(1)[0]
        bad, total = counts.total(), len(source) + count_unindexed(source)
        self.faults = tuple(faults)
        self.reason = (
            f"{bad:,} of {total:,} samples cannot be used ({bad / total:.1%}, "
            f"data.max_bad_share is {limit:.1%}), most often: {reason} ({count:,})"
        )
        super().__init__(f"{source.name}: {self.reason}; repair the data")


@dataclass(frozen=True)
class EmbeddedImages:
    """The images of a source that could be read, in the order of their ids. On the CPU, float32."""

    features: Tensor  # (n, d) unit rows
    ids: Tensor  # (n,) int64, the source's
    faults: tuple[Fault, ...]  # the samples left out


@dataclass(frozen=True)
class EmbeddedPairs:
    """The usable pairs of a source. `text_features[caption_of]` are the (n, d) text features pair by pair."""

    image_features: Tensor  # (n, d) unit rows
    text_features: Tensor  # (c, d) unit rows, one for each different caption
    captions: list[str]  # the c different captions in order of first appearance
    caption_of: Tensor  # (n,) int64, row of text_features and captions
    ids: Tensor  # (n,) int64, the source's
    faults: tuple[Fault, ...]  # the samples left out


@dataclass(frozen=True)
class Embedder:
    """A model and how it is fed. `what`, in its methods, names the work in progress.

    >>> embedder = Embedder(built, batch_size=256, workers=4, max_bad_share=0.05)
    >>> embedder.embed_pairs(source, "evaluating on icons-30k/new-drawings").image_features       # doctest: +SKIP
    """

    built: BuiltModel
    batch_size: int
    workers: int
    max_bad_share: float = 1.0

    def embed_pairs(self, source: Source, what: str) -> EmbeddedPairs:
        """Features of every usable pair; each image counts with its first caption. Raises TooManyBad when a larger
        share of the pairs than `max_bad_share` cannot be used, or none can."""
        images = self.embed_images(source, what)
        all_captions = source.captions()
        has_caption = torch.tensor([bool(all_captions[id]) for id in images.ids.tolist()], dtype=torch.bool)
        missing = [Fault(id, "caption is missing", source.where(id)) for id in images.ids[~has_caption].tolist()]
        faults = (*images.faults, *missing)
        self.refuse_bad_set(source, faults)
        ids = images.ids[has_caption]
        rows: dict[str, int] = {}
        caption_of = torch.tensor([rows.setdefault(all_captions[id], len(rows)) for id in ids.tolist()])
        captions = list(rows)
        text_features = self.embed_texts(captions, f"{what}, captions")
        return EmbeddedPairs(images.features[has_caption], text_features, captions, caption_of, ids, faults)

    def refuse_bad_set(self, source: Source, faults: Sequence[Fault]) -> None:
        """Raises TooManyBad. Each sample was read once: the share is exact. What could not be indexed counts as bad."""
        unindexed, size, limit = count_unindexed(source), len(source), self.max_bad_share
        if len(faults) + unindexed > limit * (size + unindexed) or len(faults) == size:
            raise TooManyBad(source, faults, limit)

    @torch.no_grad()
    def embed_images(self, source: Source, what: str) -> EmbeddedImages:
        """Features of every image that can be read. Bad samples are left out: a replacement must not be scored."""
        towers = self.built.towers
        features: list[Tensor] = []
        ids: list[Tensor] = []
        faults: list[Fault] = []
        batches = sequential(
            source,
            transform=self.built.transform,
            tokenize=self.built.tokenize,
            batch_size=self.batch_size,
            workers=self.workers,
        )
        with eval_mode(towers):
            for batch in track(batches, what, -(-len(source) // self.batch_size), "batches"):
                encoded = towers.encode_image(batch.images.to(towers.device)).float().cpu()
                bad = torch.tensor([fault.id for fault in batch.faults], dtype=torch.int64)
                usable = ~torch.isin(batch.ids, bad)
                features.append(encoded[usable])
                ids.append(batch.ids[usable])
                faults.extend(batch.faults)
        embedded = EmbeddedImages(torch.cat(features), torch.cat(ids), tuple(faults))
        check_finite(embedded.features, f"image features on {source.name}")
        return embedded

    @torch.no_grad()
    def embed_texts(self, texts: list[str], what: str) -> Tensor:  # -> (len(texts), d)
        """Unit features of the texts, on the CPU, float32."""
        towers, tokenize = self.built.towers, self.built.tokenize
        starts = range(0, len(texts), self.batch_size)
        features = []
        with eval_mode(towers):
            for start in track(starts, what, len(starts), "batches"):
                tokens = tokenize(texts[start : start + self.batch_size]).to(towers.device)
                features.append(towers.encode_text(tokens).float().cpu())
        check_finite(torch.cat(features), "text features")
        return torch.cat(features)


@contextmanager
def eval_mode(towers: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in the mode it had (locked ones are in eval mode while training)."""
    modes = [(module, module.training) for module in towers.modules()]
    towers.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_finite(features: Tensor, what: str) -> None:
    """A row that is not a number would lose or win every comparison, and the score would look like a score."""
    bad = ~features.isfinite().all(dim=1)
    if bad.any():
        raise RunFailed(
            f"{what}: {int(bad.sum()):,} of {len(features):,} rows are not finite, the first is row "
            f"{int(bad.nonzero()[0])}; the towers' weights or their precision are broken, use an earlier checkpoint"
        )
