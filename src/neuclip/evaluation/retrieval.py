"""Recall at k and median rank in both directions, and what guessing would give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from neuclip.evaluation.embedding import EmbeddedPairs, check_finite


def recall(pairs: EmbeddedPairs, *, ks: Sequence[int] = (1, 5, 10), chunk: int = 128) -> dict[str, float]:
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
    ranks = best_ranks(image, every_text, image_of, every_caption, chunk=chunk)
    figures: dict[str, float] = {"images": images, "captions": captions}
    figures |= _figures("image_to_text", ranks, _chances(image_of, captions, ks))
    ranks = best_ranks(every_text, image, every_caption, image_of, chunk=chunk)
    figures |= _figures("text_to_image", ranks, _chances(every_caption, images, ks))
    if texts < captions:
        own_image, own_text = torch.stack([image_of, text_of]).unique(dim=1)
        figures["different_captions"] = texts
        ranks = best_ranks(image, text, own_image, own_text, chunk=chunk)
        figures |= _figures("image_to_different_text", ranks, _chances(own_image, texts, ks))
        ranks = best_ranks(text, image, own_text, own_image, chunk=chunk)
        figures |= _figures("different_text_to_image", ranks, _chances(own_text, images, ks))
    return figures


def _figures(direction: str, ranks: Tensor, chances: dict[int, float]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for k, chance in chances.items():
        figures[f"{direction}_recall_at_{k}"] = (ranks <= k).double().mean().item()
        figures[f"{direction}_chance_at_{k}"] = chance
    figures[f"{direction}_median_rank"] = int(ranks.median())  # of an even number, the lower of the two
    return figures


def best_ranks(
    queries: Tensor,
    candidates: Tensor,
    query_of: Tensor,
    candidate_of: Tensor,
    *,
    chunk: int = 128,
) -> Tensor:  # (q, d), (c, d), (p,), (p,) -> (q,) int64
    """The rank, from 1, of each query's best right candidate. Pair j says: candidate_of[j] is right for query_of[j].

    Ties go to the lowest index. A query without any right candidate has the rank after the last.
    """
    # Equal rows are scored once: the same product at another place of a matrix may differ in its last bit.
    rows, column = candidates.unique(dim=0, return_inverse=True)
    repeated = len(rows) < len(candidates)
    candidates = rows if repeated else candidates
    order = torch.argsort(query_of, stable=True)
    query_of, candidate_of = query_of[order], candidate_of[order]
    ranks = []
    for start in range(0, len(queries), chunk):
        scores = queries[start : start + chunk] @ candidates.T  # (b, c)
        scores = scores[:, column] if repeated else scores
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
