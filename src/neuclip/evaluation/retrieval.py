"""Ranks candidates, and computes the metrics of retrieval: recall@k, its chance level and the median rank, in both
directions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from neuclip.evaluation.embedding import EmbeddedPairs, check_finite

CHUNK = 128  # queries whose scores are in memory at a time


def recall(pairs: EmbeddedPairs, *, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """Recall as the field defines it. Every image is a query among all captions, and is right if one of its captions is
    among the first k; every caption is a query among all images, and is right if its image is among the first k.

    If captions repeat, this measures luck, too: nothing tells equal captions apart. Two more directions are then
    measured. In `image_to_different_text`, equal captions are one candidate, and an image is right if one of its
    captions is among the first k different ones. In `different_text_to_image`, a caption is right if one of the images
    that have it is among the first k. Ties go to the lowest index.

    `chance` is the mean recall of a random order of the candidates. At least half of the queries have their right
    answer at the median rank or before.
    """
    image, text = pairs.image_features, pairs.text_features
    check_finite(image, "image features")
    check_finite(text, "text features")
    images, captions, texts = len(image), len(pairs.caption_text), len(text)
    image_of, text_of, every_caption = pairs.caption_image, pairs.caption_text, torch.arange(captions)
    every_text = text if texts == captions else text[text_of]
    figures: dict[str, float] = {"images": images, "captions": captions}

    def add(direction: str, queries: Tensor, candidates: Tensor, query_of: Tensor, candidate_of: Tensor) -> None:
        ranks = best_ranks(queries, candidates, query_of, candidate_of)
        for k, chance in _chances(query_of, len(candidates), ks).items():
            figures[f"{direction}_recall_at_{k}"] = (ranks <= k).double().mean().item()
            figures[f"{direction}_chance_at_{k}"] = chance
        figures[f"{direction}_median_rank"] = int(ranks.median())  # for an even count the lower of the middle two

    add("image_to_text", image, every_text, image_of, every_caption)
    add("text_to_image", every_text, image, every_caption, image_of)
    if texts < captions:
        pair_image, pair_text = torch.stack([image_of, text_of]).unique(dim=1)
        figures["different_captions"] = texts
        add("image_to_different_text", image, text, pair_image, pair_text)
        add("different_text_to_image", text, image, pair_text, pair_image)
    return figures


def best_ranks(
    queries: Tensor, candidates: Tensor, query_of: Tensor, candidate_of: Tensor
) -> Tensor:  # (q, d), (c, d), (p,), (p,) -> (q,) int64
    """The rank of each query's best right candidate, from 1. For each pair j, candidate_of[j] is right for query_of[j].

    Ties go to the lowest index. A query without a right candidate has the rank c + 1.

    >>> best_ranks(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), torch.tensor([0, 0]))
    tensor([1, 2])
    """
    order = torch.argsort(query_of, stable=True)
    query_of, candidate_of = query_of[order], candidate_of[order]
    ranks = []
    for start, scores in score_blocks(queries, candidates):
        edges = torch.tensor([start, start + len(scores)], device=query_of.device)
        first, last = torch.searchsorted(query_of, edges).tolist()
        ranks.append(_ranks_in_block(scores, query_of[first:last] - start, candidate_of[first:last]))
    return torch.cat(ranks)


def score_blocks(queries: Tensor, candidates: Tensor) -> Iterator[tuple[int, Tensor]]:  # (q, d), (c, d)
    """Yield the index of the first query of each block, and the scores (b, c) of the block."""
    # Equal candidates are scored once: the same product in another column of a matrix may differ in its last bit.
    rows, column = candidates.unique(dim=0, return_inverse=True)
    repeated = len(rows) < len(candidates)
    candidates = rows if repeated else candidates
    for start in range(0, len(queries), CHUNK):
        scores = queries[start : start + CHUNK] @ candidates.T
        yield start, scores[:, column] if repeated else scores


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


def _chances(query_of: Tensor, candidates: int, ks: Sequence[int]) -> dict[int, float]:
    """For each k the probability that k random candidates contain a right one, averaged over the queries. The number of
    right candidates of query q is the count of q in `query_of`."""
    right_counts = Counter(torch.bincount(query_of).tolist())
    chances = {}
    for k in ks:
        draw = min(k, candidates)
        missed = sum(times * math.comb(candidates - right, draw) for right, times in right_counts.items())
        chances[k] = 1 - missed / (math.comb(candidates, draw) * right_counts.total())
    return chances
