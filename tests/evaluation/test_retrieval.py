from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from neuclip.errors import RunFailed
from neuclip.evaluation.retrieval import best_ranks, recall


def unit(rows: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def captions_with_repeats(images: int, captions: int) -> torch.Tensor:
    extra = torch.randint(captions, (images - captions,), generator=torch.Generator().manual_seed(5))
    return torch.cat([torch.arange(captions), extra])


def reference_share(queries, candidates, right, k):
    """Sort each query's candidates by (score down, index up), look for a right one among the first k."""
    hits = 0
    for i, query in enumerate(queries.tolist()):
        scores = [sum(a * b for a, b in zip(query, row, strict=True)) for row in candidates.tolist()]
        order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
        hits += any(j in right[i] for j in order[:k])
    return hits / len(queries)


@pytest.mark.parametrize("k", [1, 5, 10])
def test_recall_matches_the_double_loop_with_repeated_captions(k):
    image, text, caption_of = unit(40, 6, 1), unit(25, 6, 2), captions_with_repeats(40, 25)
    images = [{i for i in range(40) if caption_of[i] == c} for c in range(25)]
    got = recall(image, text, caption_of)
    want = reference_share(image, text, [{int(c)} for c in caption_of], k)
    assert got[f"image_to_text_recall_at_{k}"] == pytest.approx(want)
    assert got[f"text_to_image_recall_at_{k}"] == pytest.approx(reference_share(text, image, images, k))


def test_half_of_the_queries_have_their_answer_at_the_median_rank_or_before():
    caption_of = captions_with_repeats(41, 24)
    image, text = unit(41, 6, 1), unit(24, 6, 2)
    figures = recall(image, text, caption_of, ks=range(1, 42))
    for direction, queries in (("image_to_text", 41), ("text_to_image", 24)):  # an odd and an even number
        recalls = [figures[f"{direction}_recall_at_{k}"] for k in range(1, 42)]
        want = next(k for k, share in enumerate(recalls, 1) if share * queries >= queries / 2)
        assert figures[f"{direction}_median_rank"] == want and want > 1


def test_recall_does_not_depend_on_the_chunk():
    image, text, caption_of = unit(300, 8, 3), unit(170, 8, 4), captions_with_repeats(300, 170)
    whole = recall(image, text, caption_of, chunk=10_000)
    assert all(recall(image, text, caption_of, chunk=chunk) == whole for chunk in (1, 7, 64, 299))


def test_ties_go_to_the_lowest_index():
    image, text = torch.ones(4, 1), torch.ones(4, 1)
    figures = recall(image, text, torch.arange(4), ks=(1, 3))
    assert figures["image_to_text_recall_at_1"] == 1 / 4  # only image 0 has the caption that stands first
    assert figures["text_to_image_recall_at_3"] == 3 / 4
    everything = torch.arange(4)
    assert best_ranks(image, text, everything, everything).tolist() == [1, 2, 3, 4]


def test_a_caption_is_ranked_by_the_best_of_its_images():
    images = torch.tensor([[0.1], [0.9], [0.5], [0.9]])
    rank = best_ranks(torch.ones(1, 1), images, torch.tensor([0, 0]), torch.tensor([2, 3]))
    assert rank.tolist() == [2]  # image 3 ties with image 1, which comes first


def test_a_query_without_a_right_answer_comes_last():
    nothing = torch.empty(0, dtype=torch.int64)
    assert best_ranks(torch.ones(1, 1), torch.ones(3, 1), nothing, nothing).tolist() == [4]


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_chance_equals_the_enumeration_of_all_draws(k):
    caption_of = torch.tensor([0, 0, 0, 1, 2, 2])
    figures = recall(unit(6, 3), unit(3, 3), caption_of, ks=(k,))
    draws = list(itertools.combinations(range(6), min(k, 6)))
    want = [sum(any(caption_of[i] == c for i in draw) for draw in draws) / len(draws) for c in range(3)]
    assert figures[f"text_to_image_chance_at_{k}"] == pytest.approx(sum(want) / 3)
    assert figures[f"image_to_text_chance_at_{k}"] == min(1, k / 3)


def test_random_features_score_near_chance():
    image, text, caption_of = unit(3000, 16, 7), unit(1000, 16, 8), captions_with_repeats(3000, 1000)
    figures = recall(image, text, caption_of)
    for direction, queries in (("image_to_text", 3000), ("text_to_image", 1000)):
        chance = figures[f"{direction}_chance_at_10"]
        spread = math.sqrt(chance * (1 - chance) / queries)
        # Images of one caption share their query direction, so the hits are not quite independent: 5 deviations.
        assert abs(figures[f"{direction}_recall_at_10"] - chance) < 5 * spread


def test_counts_are_those_of_the_queries():
    figures = recall(unit(6, 3), unit(3, 3), torch.tensor([0, 0, 0, 1, 2, 2]))
    assert (figures["images"], figures["captions"]) == (6, 3)


def test_features_that_are_not_numbers_are_no_score():
    broken = unit(5, 3)
    broken[3, 1] = math.nan
    with pytest.raises(RunFailed, match="row 3"):
        recall(broken, unit(5, 3), torch.arange(5))
