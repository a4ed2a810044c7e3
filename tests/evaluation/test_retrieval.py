from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from neuclip.errors import RunFailed
from neuclip.evaluation.embedding import EmbeddedPairs
from neuclip.evaluation.retrieval import best_ranks, recall

DIRECTIONS = ("image_to_text", "text_to_image", "image_to_different_text", "different_text_to_image")


def unit(rows: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def pairs_of(image: torch.Tensor, text: torch.Tensor, captions: list[list[int]]) -> EmbeddedPairs:
    """Image i has the captions `captions[i]`, rows of `text`."""
    caption_text = torch.tensor([row for own in captions for row in own])
    caption_image = torch.tensor([i for i, own in enumerate(captions) for _ in own])
    texts = [f"text {row}" for row in range(len(text))]
    return EmbeddedPairs(image, text, texts, caption_image, caption_text, torch.arange(len(image)), ())


def drawn_captions(images: int, texts: int, most: int, seed: int = 5) -> list[list[int]]:
    """One to `most` of each image; every text occurs, some several times, also with one image. Rows are numbered in
    order of first appearance, as they are when a set is embedded."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, most + 1, (images,), generator=generator).tolist()
    rows = torch.randint(texts, (sum(counts),), generator=generator).tolist()
    number: dict[int, int] = {}
    rows = [number.setdefault(row, len(number)) for row in rows]
    return [[rows.pop(0) for _ in range(count)] for count in counts]


def count_texts(captions: list[list[int]]) -> int:
    return len({row for own in captions for row in own})


def reference_ranks(scores: torch.Tensor, right: list[set[int]]) -> list[int]:
    """Sort each query's candidates by (score down, index up), look for the first right one."""
    ranks = []
    for row, answers in zip(scores.tolist(), right, strict=True):
        order = sorted(range(len(row)), key=lambda j: (-row[j], j))
        ranks.append(next(place for place, j in enumerate(order, start=1) if j in answers))
    return ranks


def reference(pairs: EmbeddedPairs) -> dict[str, list[int]]:
    """Ranks by direction, from the expanded captions."""
    owner, texts = pairs.caption_image.tolist(), pairs.caption_text.tolist()
    images, different = range(len(pairs.image_features)), range(len(pairs.text_features))
    scores = pairs.image_features.double() @ pairs.text_features.double().T  # (n, t)
    expanded = scores[:, pairs.caption_text]
    has = {(i, t) for i, t in zip(owner, texts, strict=True)}
    return {
        "image_to_text": reference_ranks(expanded, [{c for c, own in enumerate(owner) if own == i} for i in images]),
        "text_to_image": reference_ranks(expanded.T, [{own} for own in owner]),
        "image_to_different_text": reference_ranks(scores, [{t for t in different if (i, t) in has} for i in images]),
        "different_text_to_image": reference_ranks(scores.T, [{i for i in images if (i, t) in has} for t in different]),
    }


def tied(rows: int, seed: int) -> torch.Tensor:
    """Few different values: most scores are those of others too."""
    return torch.randint(-1, 2, (rows, 3), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("features", [unit, tied])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_recall_is_that_of_sorting_with_several_captions_repeats_and_ties(features, seed):
    captions = drawn_captions(40, 60, most=5, seed=seed)
    image, text = (unit(40, 6, seed), unit(count_texts(captions), 6, 9 + seed))
    if features is tied:
        image, text = tied(40, seed), tied(len(text), 9 + seed)
    pairs = pairs_of(image, text, captions)
    got = recall(pairs)
    for direction, ranks in reference(pairs).items():
        for k in (1, 5, 10):
            want = sum(rank <= k for rank in ranks) / len(ranks)
            assert got[f"{direction}_recall_at_{k}"] == pytest.approx(want), (direction, k)
        assert got[f"{direction}_median_rank"] == sorted(ranks)[(len(ranks) - 1) // 2]
    counts = {"images": 40, "captions": sum(map(len, captions)), "different_captions": len(text)}
    assert {key: got[key] for key in counts} == counts and counts["captions"] > len(text)


def test_captions_that_do_not_repeat_have_no_second_definition():
    pairs = pairs_of(unit(4, 3, 1), unit(7, 3, 2), [[0, 1], [2], [3, 4, 5], [6]])
    got = recall(pairs)
    assert not any("different" in key for key in got) and got["captions"] == 7
    for direction in ("image_to_text", "text_to_image"):
        ranks = reference(pairs)[direction]
        assert got[f"{direction}_recall_at_1"] == pytest.approx(sum(rank == 1 for rank in ranks) / len(ranks))


def test_of_equal_captions_the_first_comes_first_and_over_different_ones_both_are_right():
    image = torch.eye(2)[[0, 0, 1]]
    got = recall(pairs_of(image, torch.eye(2), [[0], [0], [1]]), ks=(1, 2))
    assert got["image_to_text_recall_at_1"] == got["text_to_image_recall_at_1"] == pytest.approx(2 / 3)
    assert got["image_to_text_recall_at_2"] == got["text_to_image_recall_at_2"] == 1
    assert got["image_to_different_text_recall_at_1"] == got["different_text_to_image_recall_at_1"] == 1


@pytest.mark.parametrize("chunk", [1, 7, 64, 299, 10_000])
def test_recall_does_not_depend_on_the_chunk(monkeypatch, chunk):
    captions = drawn_captions(300, 400, most=3)
    pairs = pairs_of(unit(300, 8, 3), unit(count_texts(captions), 8, 4), captions)
    whole = recall(pairs)
    monkeypatch.setattr("neuclip.evaluation.retrieval.CHUNK", chunk)
    assert recall(pairs) == whole


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_of_equal_images_the_first_comes_first_wherever_it_stands(monkeypatch, chunk):
    monkeypatch.setattr("neuclip.evaluation.retrieval.CHUNK", chunk)
    # The product of two equal columns may differ in its last bit by their place in the matrix.
    image, text = unit(65, 768, 1, torch.float32), unit(64, 768, 2, torch.float32)
    image[-1], text = image[0], F.normalize(text + image[0], dim=1)
    rows = torch.arange(64)
    assert best_ranks(text, image, rows, torch.zeros_like(rows)).tolist() == [1] * 64
    assert best_ranks(text, image, rows, torch.full_like(rows, 64)).tolist() == [2] * 64


def test_a_query_without_a_right_answer_comes_last():
    nothing = torch.empty(0, dtype=torch.int64)
    assert best_ranks(torch.ones(1, 1), torch.ones(3, 1), nothing, nothing).tolist() == [4]


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_chance_equals_the_enumeration_of_all_draws(k):
    captions = [[0, 0], [0, 1], [1], [2, 3]]  # of 4 images, 7 captions, 4 different ones
    pairs = pairs_of(unit(4, 3), unit(4, 3), captions)
    figures = recall(pairs, ks=(k,))
    owner, texts = pairs.caption_image.tolist(), pairs.caption_text.tolist()

    def chance(candidates: int, right: list[set[int]]) -> float:
        draws = list(itertools.combinations(range(candidates), min(k, candidates)))
        return sum(bool(answers & {*draw}) for answers in right for draw in draws) / len(draws) / len(right)

    want = {
        "image_to_text": chance(7, [{c for c in range(7) if owner[c] == i} for i in range(4)]),
        "text_to_image": chance(4, [{owner[c]} for c in range(7)]),
        "image_to_different_text": chance(4, [{*own} for own in captions]),
        "different_text_to_image": chance(4, [{owner[c] for c in range(7) if texts[c] == t} for t in range(4)]),
    }
    for direction, share in want.items():
        assert figures[f"{direction}_chance_at_{k}"] == pytest.approx(share), direction


def test_features_that_are_not_numbers_are_no_score():
    broken = unit(5, 3)
    broken[3, 1] = math.nan
    with pytest.raises(RunFailed, match="row 3"):
        recall(pairs_of(broken, unit(5, 3), [[i] for i in range(5)]))
