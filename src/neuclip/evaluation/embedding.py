"""Embeds sources: every image and every different text once, with the work shared among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from neuclip.data.faults import by_reason, count_unindexed
from neuclip.data.features import Place, StoredSide, stored_rows
from neuclip.data.loader import ImageBatch, read_images
from neuclip.data.source import Fault, Source
from neuclip.distributed.collectives import all_gather_object, gather_rows, is_main, local_range, rank, world_size
from neuclip.distributed.ranks import sync_errors
from neuclip.errors import RunFailed
from neuclip.models.build import BuiltModel
from neuclip.progress import track

T = TypeVar("T")

SORTED_TOGETHER = 32_768  # texts that are tokenized at a time and sorted by length
MOST_KNOWN = 200_000  # features that are cached for later sets: 0.4 GB at 512 dimensions


class TooManyBadSamples(RunFailed):
    """A set has so many bad samples that a figure over the others would not describe the set."""

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
    """Features of the images of a source that could be read, in the order of their ids. On the CPU, float32."""

    features: Tensor  # (n, d) unit rows
    ids: Tensor  # (n,) int64, ids in the source
    captions: list[tuple[str, ...]]  # all captions of each image
    faults: tuple[Fault, ...]  # the skipped samples


@dataclass(frozen=True)
class EmbeddedPairs:
    """Features of the n usable images of a source and of their k captions, of which t are different texts. Captions are
    in the order of their images; `text_features[caption_text]` are the (k, d) features of all captions."""

    image_features: Tensor  # (n, d) unit rows
    text_features: Tensor  # (t, d) unit rows, one for each different text
    texts: list[str]  # the t different texts in order of first appearance
    caption_image: Tensor  # (k,) int64, row of image_features
    caption_text: Tensor  # (k,) int64, row of text_features and texts
    ids: Tensor  # (n,) int64, ids in the source
    faults: tuple[Fault, ...]  # the skipped samples

    @property
    def first_text(self) -> Tensor:  # (n,) int64
        """The row in text_features of each image's first caption."""
        return self.caption_text[torch.searchsorted(self.caption_image, torch.arange(len(self.image_features)))]


@dataclass(frozen=True)
class Embedder:
    """A model with the settings for embedding data sets. `what`, in its methods, is the label of the progress line.

    Features are cached, because sets may share images and texts. The methods are collective: each rank embeds a share,
    and all ranks get all features.

    >>> embedder = Embedder(built, batch_size=256, workers=4, max_bad_share=0.05)                  # doctest: +SKIP
    >>> embedder.embed_pairs(source, "evaluating on icons-30k/new-drawings").image_features       # doctest: +SKIP
    """

    built: BuiltModel
    batch_size: int
    workers: int
    max_bad_share: float = 1.0
    known_images: dict[Hashable, np.ndarray] = field(default_factory=dict, repr=False)  # (d,) by digest of the image
    known_texts: dict[Hashable, np.ndarray] = field(default_factory=dict, repr=False)  # (d,) by text
    stored: Callable[[Source], Mapping[str, StoredSide]] = lambda source: {}  # features of locked towers, if any

    def embed_pairs(self, source: Source, what: str, *, first_caption_only: bool = False) -> EmbeddedPairs:
        """Features of all images that have a caption, and of their captions, or of the first caption only. Raises
        TooManyBadSamples if more than `max_bad_share` of the samples cannot be used, or none can."""
        images = self.embed_images(source, what)
        has_caption = torch.tensor([bool(texts) for texts in images.captions], dtype=torch.bool)
        missing = [Fault(id, "caption is missing", source.where(id)) for id in images.ids[~has_caption].tolist()]
        faults = (*images.faults, *missing)
        self.check_bad_share(source, faults)
        captions = [texts[:1] if first_caption_only else texts for texts in images.captions if texts]
        rows: dict[str, int] = {}
        caption_text = torch.tensor([rows.setdefault(text, len(rows)) for texts in captions for text in texts])
        ids = images.ids[has_caption]
        caption_image = torch.arange(len(captions)).repeat_interleave(torch.tensor([len(texts) for texts in captions]))
        different, stored = list(rows), self.stored(source).get("text")
        return EmbeddedPairs(
            images.features if has_caption.all() else images.features[has_caption],
            self._stored_texts(stored, ids, captions) if stored else self.embed_texts(different, f"{what}, captions"),
            different,
            caption_image,
            caption_text,
            ids,
            faults,
        )

    def check_bad_share(self, source: Source, faults: Sequence[Fault]) -> None:
        """Raise TooManyBadSamples if the share of bad samples is too large. It is exact, because each sample was read
        once. Samples that could not be indexed count as bad."""
        unindexed, size, limit = count_unindexed(source), len(source), self.max_bad_share
        if len(faults) + unindexed > limit * (size + unindexed) or len(faults) == size:
            raise TooManyBadSamples(source, faults, limit)

    def embed_images(self, source: Source, what: str) -> EmbeddedImages:
        """Features of all images that can be read. Bad samples are skipped; a replacement would falsify the scores."""
        if stored := self.stored(source).get("image"):
            return self._stored_images(source, stored)
        make_room(self.known_images)
        batches = local_range(-(-len(source) // self.batch_size))
        ids = range(batches.start * self.batch_size, min(batches.stop * self.batch_size, len(source)))
        with sync_errors():
            new, read, features = self._embed_share(source, ids, what)
            check_finite(features, f"image features on {source.name}")
        features, shares = gather_rows(features), all_gather_object((new, read))
        new, read = [digest for one, _ in shares for digest in one], [batch for _, one in shares for batch in one]
        digests = [digest for batch in read for digest in batch.digests]
        return EmbeddedImages(
            add_and_look_up(self.known_images, new, features, digests),
            torch.cat([batch.ids for batch in read]),
            [captions for batch in read for captions in batch.captions],
            tuple(fault for batch in read for fault in batch.faults),
        )

    @torch.no_grad()
    def _embed_share(
        self, source: Source, ids: range, what: str
    ) -> tuple[list[bytes], list[ImageBatch], Tensor]:  # -> ..., ..., (len(new), d)
        """Embed this rank's images. Returns the digests of the images that are not in the cache, all batches without
        their pixels, and the features of the new images."""
        towers, features = self.built.towers, [torch.empty(0, self.built.embed_dim)]
        new: dict[bytes, None] = {}
        read: list[ImageBatch] = []
        batches = read_images(
            source, transform=self.built.transform, batch_size=self.batch_size, workers=self.workers, ids=ids
        )
        with eval_mode(towers):
            for batch in self._track(batches, what, len(source), "images"):
                rows = []
                for row, digest in enumerate(batch.digests):
                    if digest not in self.known_images and digest not in new:
                        new[digest] = None
                        rows.append(row)
                if rows:
                    images = batch.images if len(rows) == len(batch.images) else batch.images[rows]
                    features.append(towers.encode_image(images.to(towers.device)).float().cpu())
                read.append(batch._replace(images=torch.empty(0)))
        return list(new), read, torch.cat(features)

    def _stored_images(self, source: Source, stored: StoredSide) -> EmbeddedImages:
        """The images' features, computed from the stored outputs of the locked tower's trunk."""
        places = {id: slots[0] for id in range(len(source)) if (slots := stored.places(id))}
        bad = [id for id in range(len(source)) if id not in places]
        unread = read_images(source, transform=self.built.transform, batch_size=1, workers=0, starts=bad)
        captions: dict[int, tuple[str, ...]] = {}
        for batch in read_images(source, transform=None, batch_size=self.batch_size, workers=0):
            captions |= {id: own for id, own in zip(batch.ids.tolist(), batch.captions, strict=True) if id in places}
        return EmbeddedImages(
            self._head("image", [places[id] for id in captions]),
            torch.tensor(list(captions), dtype=torch.int64),
            list(captions.values()),
            tuple(fault for batch in unread for fault in batch.faults),
        )

    def _stored_texts(self, stored: StoredSide, ids: Tensor, captions: Sequence[Sequence[str]]) -> Tensor:  # -> (t, d)
        """The features of the different texts in order of first appearance, from stored outputs of the trunk."""
        places: dict[str, Place] = {}
        for id, texts in zip(ids.tolist(), captions, strict=True):
            for text, place in zip(texts, stored.places(id), strict=False):
                places.setdefault(text, place)
        return self._head("text", list(places.values()))

    @torch.no_grad()
    def _head(self, side: str, places: Sequence[Place]) -> Tensor:  # -> (len(places), d)
        """Features from stored outputs of the trunk: applies the rest of the locked tower."""
        towers = self.built.towers
        parts = [places[start : start + self.batch_size] for start in range(0, len(places), self.batch_size)]
        with eval_mode(towers):
            rows = [towers.locked_rows(side, stored_rows("features", part).to(towers.device)).cpu() for part in parts]
        return torch.cat([torch.empty(0, self.built.embed_dim), *rows])

    def embed_texts(self, texts: list[str], what: str) -> Tensor:  # -> (len(texts), d)
        """Unit features of the texts, on the CPU, float32."""
        make_room(self.known_texts)
        new = [text for text in dict.fromkeys(texts) if text not in self.known_texts]
        shares = [new[number :: world_size()] for number in range(world_size())]
        features = torch.empty(0, self.built.embed_dim)
        if new:
            with sync_errors():
                features = self._encode_texts(shares[rank()], what)
                check_finite(features, "text features")
            features = gather_rows(features)
        return add_and_look_up(self.known_texts, [text for share in shares for text in share], features, texts)

    @torch.no_grad()
    def _encode_texts(self, texts: list[str], what: str) -> Tensor:  # -> (len(texts), d)
        towers, features = self.built.towers, torch.empty(len(texts), self.built.embed_dim)
        with eval_mode(towers):
            for rows, tokens in self._track(self._token_batches(texts), what, len(texts) * world_size(), "texts"):
                features[rows] = towers.encode_text(tokens.to(towers.device)).float().cpu()
        return features

    def _token_batches(self, texts: list[str]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of `texts` and their tokens. Texts of similar length are in one batch, to reduce padding."""
        towers = self.built.towers
        for start in range(0, len(texts), SORTED_TOGETHER):
            tokens = self.built.tokenize(texts[start : start + SORTED_TOGETHER])
            lengths = towers.text_lengths(tokens.to(towers.device)).cpu()
            for rows in lengths.argsort(stable=True).split(self.batch_size):
                yield start + rows, tokens[rows]

    def _track(self, batches: Iterator[T], what: str, total: int, unit: str) -> Iterator[T]:
        """Show progress on the main rank. Its count is multiplied by the number of ranks, whose shares are equal."""
        return track(batches, what, total, unit, step=self.batch_size * world_size()) if is_main() else batches


def make_room(known: dict[Hashable, np.ndarray]) -> None:
    """Clear the cache if it is too large. Called before a set is embedded: memory is bounded by the features of one set
    and MOST_KNOWN others."""
    if len(known) > MOST_KNOWN:
        known.clear()


def add_and_look_up(
    known: dict[Hashable, np.ndarray], new: Sequence[Hashable], features: Tensor, wanted: Sequence[Hashable]
) -> Tensor:  # (len(new), d) -> (len(wanted), d)
    """Add the `features` of the keys `new` to the cache, and return the features of the keys `wanted`. A key that two
    ranks embedded keeps the first row, because equal images must have equal features."""
    before = len(known)
    for key, row in zip(new, features.numpy(), strict=True):
        known.setdefault(key, row)
    if new == wanted and len(known) == before + len(new):
        return features  # a large set is not copied
    return torch.from_numpy(np.stack([known[key] for key in wanted])) if wanted else features[:0]


@contextmanager
def eval_mode(towers: nn.Module) -> Iterator[None]:
    """Set eval mode; afterwards restore the mode of every module (locked modules are in eval mode during training)."""
    modes = [(module, module.training) for module in towers.modules()]
    towers.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_finite(features: Tensor, what: str) -> None:
    """Raise RunFailed if features are not finite. NaN would lose or win every comparison and give a plausible score."""
    bad = ~features.isfinite().all(dim=1)
    if bad.any():
        raise RunFailed(
            f"{what}: {int(bad.sum()):,} of {len(features):,} rows are not finite, the first is row "
            f"{int(bad.nonzero()[0])}; the towers' weights or their precision are broken, use an earlier checkpoint"
        )
