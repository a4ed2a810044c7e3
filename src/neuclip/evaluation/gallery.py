"""Held-out queries with their best matches, for people to look at. The queries are drawn at random, not chosen."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from neuclip.data.decoding import decode
from neuclip.data.source import Source
from neuclip.evaluation.embedding import EmbeddedPairs
from neuclip.evaluation.retrieval import best_ranks

THUMBNAIL_PIXELS = 96  # longest side


def gallery(embedded: EmbeddedPairs, source: Source, *, count: int, top: int, seed: int) -> dict[str, Any]:
    """`count` random images with their `top` captions, and `count` random captions with their `top` images.

    `rank`, from 1, is that of the best right answer. Plain JSON, images as data URIs.

    >>> shown = gallery(embedded, source, count=12, top=5, seed=0)                              # doctest: +SKIP
    >>> shown["image_to_text"][0].keys()                                                        # doctest: +SKIP
    dict_keys(['image', 'caption', 'rank', 'matches'])
    """
    image_features, text_features = embedded.image_features, embedded.text_features
    captions, caption_of = embedded.captions, embedded.caption_of
    generator = torch.Generator().manual_seed(seed)
    images = torch.randperm(len(image_features), generator=generator)[:count]
    texts = torch.randperm(len(text_features), generator=generator)[:count]
    own_captions = torch.arange(len(images)), caption_of[images]
    own_images = (texts[:, None] == caption_of[None, :]).nonzero(as_tuple=True)
    caption = [captions[row] for row in caption_of.tolist()]  # by image

    def image(row: int) -> str:
        return thumbnail(source[int(embedded.ids[row])].image)

    matches = _first_matches(image_features[images], text_features, own_captions, top)
    image_to_text = [
        {
            "image": image(query),
            "caption": caption[query],
            "rank": rank,
            "matches": [{"caption": captions[c], "score": s, "right": captions[c] == caption[query]} for c, s in best],
        }
        for query, (rank, best) in zip(images.tolist(), matches, strict=True)
    ]
    matches = _first_matches(text_features[texts], image_features, own_images, top)
    text_to_image = [
        {
            "caption": captions[query],
            "rank": rank,
            "matches": [
                {"image": image(i), "caption": caption[i], "score": s, "right": caption[i] == captions[query]}
                for i, s in best
            ],
        }
        for query, (rank, best) in zip(texts.tolist(), matches, strict=True)
    ]
    return {"dataset": source.name, "image_to_text": image_to_text, "text_to_image": text_to_image}


def thumbnail(content: bytes) -> str:
    """The image at most 96 pixels long, on white, as a data URI."""
    image = decode(content).convert("RGBA")
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    # Line drawings on a transparent background would vanish on a dark page.
    flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    file = BytesIO()
    flat.save(file, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _first_matches(
    queries: Tensor, candidates: Tensor, right: tuple[Tensor, ...], top: int
) -> list[tuple[int, list[tuple[int, float]]]]:
    """For each query the rank of its best right candidate, and the first `top` candidates with their scores."""
    query_of, candidate_of = right
    ranks = best_ranks(queries, candidates, query_of, candidate_of).tolist()
    # A stable sort, not topk: topk promises nothing about ties, and here they go to the lowest index.
    scores, order = (queries @ candidates.T).sort(dim=1, descending=True, stable=True)
    first = zip(order[:, :top].tolist(), scores[:, :top].tolist(), strict=True)
    return [(rank, list(zip(*best, strict=True))) for rank, best in zip(ranks, first, strict=True)]
