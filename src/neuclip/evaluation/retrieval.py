"""Recall at k and median rank in both directions, with equal captions merged, and what guessing would give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from neuclip.evaluation.embedding import check_finite


def recall(
    image_features: Tensor,
    text_features: Tensor,
    caption_of: Tensor,
    *,
    ks: Sequence[int] = (1, 5, 10),
    chunk: int = 1024,
) -> dict[str, float]:  # (n, d), (c, d), (n,)
    """Queries are every image and every different caption. An image is right if its own caption is among the first
    k different captions, a caption if any of its images is among the first k. Ties go to the lowest index.

    `chance` is what a random order of the candidates would reach on average. Half of the queries or more have their
    right answer at the median rank or before it.

    >>> recall(torch.eye(3), torch.eye(3), torch.arange(3), ks=(1,))["image_to_text_recall_at_1"]
    1.0
    """
    check_finite(image_features, "image features")
    check_finite(text_features, "text features")
    images, captions = len(image_features), len(text_features)
    every_image = torch.arange(images, device=caption_of.device)
    rank_of_caption = best_ranks(image_features, text_features, every_image, caption_of, chunk=chunk)
    rank_of_image = best_ranks(text_features, image_features, caption_of, every_image, chunk=chunk)
    figures: dict[str, float] = {"images": images, "captions": captions}
    for k in ks:
        figures[f"image_to_text_recall_at_{k}"] = (rank_of_caption <= k).double().mean().item()
        figures[f"text_to_image_recall_at_{k}"] = (rank_of_image <= k).double().mean().item()
        figures[f"image_to_text_chance_at_{k}"] = min(1.0, k / captions)
        figures[f"text_to_image_chance_at_{k}"] = _chance_of_any(caption_of, images, captions, k)
    figures["image_to_text_median_rank"] = int(rank_of_caption.median())  # of an even number, the lower of the two
    figures["text_to_image_median_rank"] = int(rank_of_image.median())
    return figures


def best_ranks(
    queries: Tensor, candidates: Tensor, query_of: Tensor, candidate_of: Tensor, *, chunk: int = 1024
) -> Tensor:  # (q, d), (c, d), (p,), (p,) -> (q,) int64
    """The rank, from 1, of each query's best right candidate. Pair j says: candidate_of[j] is right for query_of[j].

    Ties go to the lowest index. A query without any right candidate has rank c + 1.
    """
    order = torch.argsort(query_of, stable=True)
    query_of, candidate_of = query_of[order], candidate_of[order]
    ranks = []
    for start in range(0, len(queries), chunk):
        scores = queries[start : start + chunk] @ candidates.T  # (b, c)
        edges = torch.tensor([start, start + len(scores)], device=query_of.device)
        first, last = torch.searchsorted(query_of, edges).tolist()
        ranks.append(_ranks_in_block(scores, query_of[first:last] - start, candidate_of[first:last]))
    return torch.cat(ranks)


def _ranks_in_block(scores: Tensor, rows: Tensor, columns: Tensor) -> Tensor:  # (b, c), (p,), (p,) -> (b,)
    count = scores.shape[1]
    values = scores[rows, columns]
    best = scores.new_full((len(scores),), -math.inf).scatter_reduce(0, rows, values, "amax")
    at_best = values == best[rows]
    first = torch.full_like(best, count, dtype=torch.int64)
    first = first.scatter_reduce(0, rows[at_best], columns[at_best], "amin")
    higher = (scores > best[:, None]).sum(dim=1)
    equal_before = (scores == best[:, None]) & (torch.arange(count, device=scores.device) < first[:, None])
    return 1 + higher + equal_before.sum(dim=1)


def _chance_of_any(caption_of: Tensor, images: int, captions: int, k: int) -> float:
    """Mean over captions of the probability that k different random images contain one of the caption's own."""
    own_counts = Counter(torch.bincount(caption_of, minlength=captions).tolist())
    draw = min(k, images)
    missed = sum(times * math.comb(images - own, draw) for own, times in own_counts.items())
    return 1 - missed / (math.comb(images, draw) * captions)
