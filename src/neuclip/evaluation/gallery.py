"""The gallery of a report: random held-out queries with their best matches."""

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
    """`count` random images with their `top` different captions, and `count` random captions with their `top` images.

    `rank` is the rank of the best right answer, from 1. An image is shown with its first caption, but each of its
    captions is right. The result is plain JSON, with images as data URIs.

    >>> shown = gallery(embedded, source, count=12, top=5, seed=0)                              # doctest: +SKIP
    >>> shown["image_to_text"][0].keys()                                                        # doctest: +SKIP
    dict_keys(['image', 'caption', 'rank', 'matches'])
    """
    image_features, text_features, texts = embedded.image_features, embedded.text_features, embedded.texts
    generator = torch.Generator().manual_seed(seed)
    drawn_images = torch.randperm(len(image_features), generator=generator)[:count]
    drawn_texts = torch.randperm(len(text_features), generator=generator)[:count]
    positives = set(zip(embedded.caption_image.tolist(), embedded.caption_text.tolist(), strict=True))
    first_text = embedded.first_text.tolist()

    def image_entry(row: int) -> dict[str, str]:
        return {"image": thumbnail(source[int(embedded.ids[row])].image), "caption": texts[first_text[row]]}

    right = _right_pairs(drawn_images, embedded.caption_image, embedded.caption_text)
    matches = _first_matches(image_features[drawn_images], text_features, right, top)
    image_to_text = [
        image_entry(image)
        | {"rank": rank}
        | {"matches": [{"caption": texts[text], "score": s, "right": (image, text) in positives} for text, s in best]}
        for image, (rank, best) in zip(drawn_images.tolist(), matches, strict=True)
    ]
    right = _right_pairs(drawn_texts, embedded.caption_text, embedded.caption_image)
    matches = _first_matches(text_features[drawn_texts], image_features, right, top)
    text_to_image = [
        {"caption": texts[text], "rank": rank}
        | {"matches": [image_entry(image) | {"score": s, "right": (image, text) in positives} for image, s in best]}
        for text, (rank, best) in zip(drawn_texts.tolist(), matches, strict=True)
    ]
    return {"dataset": source.name, "image_to_text": image_to_text, "text_to_image": text_to_image}


def thumbnail(content: bytes) -> str:
    """The image as a data URI: on white, its longest side at most 96 pixels."""
    image = decode(content).convert("RGBA")
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    # Line drawings on a transparent background would vanish on a dark page.
    flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    file = BytesIO()
    flat.save(file, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def _right_pairs(drawn: Tensor, query_of: Tensor, candidate_of: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs (query, right candidate) of the drawn queries; a query's number is its index in `drawn`."""
    number, pair = (drawn[:, None] == query_of).nonzero(as_tuple=True)
    return number, candidate_of[pair]


def _first_matches(
    queries: Tensor, candidates: Tensor, right: tuple[Tensor, Tensor], top: int
) -> list[tuple[int, list[tuple[int, float]]]]:
    """For each query the rank of its best right candidate, and the best `top` candidates with their scores."""
    ranks = best_ranks(queries, candidates, *right).tolist()
    # A stable sort, not topk: ties must go to the lowest index, and topk breaks them arbitrarily.
    scores, order = (queries @ candidates.T).sort(dim=1, descending=True, stable=True)
    first = zip(order[:, :top].tolist(), scores[:, :top].tolist(), strict=True)
    return [(rank, list(zip(*best, strict=True))) for rank, best in zip(ranks, first, strict=True)]
