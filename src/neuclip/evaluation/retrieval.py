"""The one ranker, and what retrieval is measured by: recall at k and median rank in both directions, beside chance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from neuclip.evaluation.embedding import EmbeddedPairs, check_finite

CHUNK = 128  # queries whose scores are in memory at a time


def recall(pairs: EmbeddedPairs, *, ks: Sequence[int] = (1, 5, 10)) -> dict[str, float]:
    """The standard of the field: every image is a query against all captions, and is right if any of its own is among
    the first k; every caption is a query against all images, and is right if its own image is.

    Where captions repeat, only chance tells equal ones apart. Then there is also `image_to_different_text`: an image is
    right if any of its texts is among the first k different ones; and `different_text_to_image`: a text is right if any
    image that has it is among the first k. Ties go to the lowest index.

    `chance` is what a random order of the candidates would reach on average. Half of the queries or more have their
    right answer at the median rank or before it.
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
        figures[f"{direction}_median_rank"] = int(ranks.median())  # of an even number, the lower of the two

    add("image_to_text", image, every_text, image_of, every_caption)
    add("text_to_image", every_text, image, every_caption, image_of)
    if texts < captions:
        own_image, own_text = torch.stack([image_of, text_of]).unique(dim=1)
        figures["different_captions"] = texts
        add("image_to_different_text", image, text, own_image, own_text)
        add("different_text_to_image", text, image, own_text, own_image)
    return figures


def best_ranks(
    queries: Tensor, candidates: Tensor, query_of: Tensor, candidate_of: Tensor
) -> Tensor:  # (q, d), (c, d), (p,), (p,) -> (q,) int64
    """The rank, from 1, of each query's best right candidate. Pair j says: candidate_of[j] is right for query_of[j].

    Ties go to the lowest index. A query without any right candidate has the rank after the last.

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
    """The number of the first query of each block, and the scores (b, c) of the block."""
    # Equal rows are scored once: the same product at another place of a matrix may differ in its last bit.
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
    """By k: the mean over queries of the probability that k different random candidates contain one of the query's
    own. Query q has as many of its own as `query_of` names it."""
    own_counts = Counter(torch.bincount(query_of).tolist())
    chances = {}
    for k in ks:
        draw = min(k, candidates)
        missed = sum(times * math.comb(candidates - own, draw) for own, times in own_counts.items())
        chances[k] = 1 - missed / (math.comb(candidates, draw) * own_counts.total())
    return chances
