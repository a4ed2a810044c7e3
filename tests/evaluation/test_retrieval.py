"""Recall against sorting and enumeration, with several captions, repeats and ties; and what a gallery shows of it."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from neuclip.data.open import open_source
from neuclip.errors import RunFailed
from neuclip.evaluation.embedding import EmbeddedPairs
from neuclip.evaluation.gallery import gallery, thumbnail
from neuclip.evaluation.retrieval import best_ranks, recall
from tests.evaluation.colour_shards import colour_image, write_samples
from tests.objectives.features import unit


def pairs_of(image: torch.Tensor, text: torch.Tensor, captions: list[list[int]], first_id: int = 0) -> EmbeddedPairs:
    """Image i has the captions `captions[i]`, rows of `text`."""
    caption_text = torch.tensor([row for own in captions for row in own])
    caption_image = torch.tensor([i for i, own in enumerate(captions) for _ in own])
    texts = [f"text {row}" for row in range(len(text))]
    ids = torch.arange(len(image)) + first_id
    return EmbeddedPairs(image, text, texts, caption_image, caption_text, ids, ())


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


@pytest.mark.parametrize("features", [lambda rows, seed: unit(rows, 6, seed=seed), tied], ids=["random", "tied"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_recall_is_that_of_sorting_with_several_captions_repeats_and_ties(features, seed):
    captions = drawn_captions(40, 60, most=5, seed=seed)
    image, text = features(40, seed), features(count_texts(captions), 9 + seed)
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
    pairs = pairs_of(unit(4, 3, seed=1), unit(7, 3, seed=2), [[0, 1], [2], [3, 4, 5], [6]])
    got = recall(pairs)
    assert not any("different" in key for key in got) and got["captions"] == 7
    for direction in ("image_to_text", "text_to_image"):
        ranks = reference(pairs)[direction]
        assert got[f"{direction}_recall_at_1"] == pytest.approx(sum(rank == 1 for rank in ranks) / len(ranks))


def test_equal_captions_are_ranked_in_order_and_count_once_among_different_ones():
    image = torch.eye(2)[[0, 0, 1]]
    got = recall(pairs_of(image, torch.eye(2), [[0], [0], [1]]), ks=(1, 2))
    assert got["image_to_text_recall_at_1"] == got["text_to_image_recall_at_1"] == pytest.approx(2 / 3)
    assert got["image_to_text_recall_at_2"] == got["text_to_image_recall_at_2"] == 1
    assert got["image_to_different_text_recall_at_1"] == got["different_text_to_image_recall_at_1"] == 1


@pytest.mark.parametrize("chunk", [1, 7, 299])
def test_recall_does_not_depend_on_the_chunk(monkeypatch, chunk):
    captions = drawn_captions(300, 400, most=3)
    pairs = pairs_of(unit(300, 8, seed=3), unit(count_texts(captions), 8, seed=4), captions)
    whole = recall(pairs)
    monkeypatch.setattr("neuclip.evaluation.retrieval.CHUNK", chunk)
    assert recall(pairs) == whole


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_equal_images_are_ranked_in_order_at_any_position(monkeypatch, chunk):
    monkeypatch.setattr("neuclip.evaluation.retrieval.CHUNK", chunk)
    # The product of two equal columns may differ in its last bit by their place in the matrix.
    image, text = unit(65, 768, seed=1).float(), unit(64, 768, seed=2).float()
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
    pairs = pairs_of(unit(4, 3, seed=0), unit(4, 3, seed=0), captions)
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


def test_features_that_are_not_finite_are_an_error():
    broken = unit(5, 3, seed=0)
    broken[3, 1] = math.nan
    with pytest.raises(RunFailed, match="row 3"):
        recall(pairs_of(broken, unit(5, 3, seed=0), [[i] for i in range(5)]))


# Queries with their best matches, for people to look at.

CAPTION_OF = [0, 0, 1, 2, 3, 4, 4, 5]  # of eight images


def shown(folder, *, first_id=0, **changes):
    """A gallery of red images, each as many pixels higher as its id says; and their features."""
    samples = [{"png": colour_image("red", (16, 16 + i)), "txt": b"x"} for i in range(9)]
    source = open_source(str(write_samples(folder / "held-out.tar", samples)))
    image, text = unit(8, 4, seed=2), unit(6, 4, seed=3)
    pairs = pairs_of(image, text, [[row] for row in CAPTION_OF], first_id)
    return gallery(pairs, source, **{"count": 5, "top": 3, "seed": 1} | changes), image, text


def picture(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.split("base64,")[1])))


def number_of(shown_image) -> int:
    return picture(shown_image["image"]).height - 16


@pytest.mark.parametrize("first_id", [0, 1])  # images are looked up by the ids of the source
def test_matches_have_the_highest_scores_and_are_right_for_the_images_own_captions(first_id, tmp_path):
    found, image, text = shown(tmp_path, first_id=first_id)
    for query in found["image_to_text"]:
        row = number_of(query) - first_id
        order = (image[row] @ text.T).argsort(descending=True).tolist()
        assert query["caption"] == f"text {CAPTION_OF[row]}"
        assert [match["caption"] for match in query["matches"]] == [f"text {caption}" for caption in order[:3]]
        assert query["rank"] == order.index(CAPTION_OF[row]) + 1
        assert [match["right"] for match in query["matches"]] == [query["rank"] == place for place in (1, 2, 3)]


def test_a_caption_is_right_with_any_of_its_images(tmp_path):
    found, image, text = shown(tmp_path, count=6, top=8)
    for query in found["text_to_image"]:
        caption = int(query["caption"].removeprefix("text "))
        order = (text[caption] @ image.T).argsort(descending=True).tolist()
        assert [number_of(match) for match in query["matches"]] == order
        right = [CAPTION_OF[row] == caption for row in order]
        assert [match["right"] for match in query["matches"]] == right
        assert query["rank"] == right.index(True) + 1


def test_queries_are_drawn_by_the_seed_and_it_is_plain_json_with_at_most_all_of_them(tmp_path):
    first, second, other, every = (
        shown(tmp_path, seed=seed, count=n)[0] for seed, n in ((1, 5), (1, 5), (5, 5), (1, 99))
    )
    assert first == second != other and len({query["caption"] for query in first["text_to_image"]}) == 5
    assert json.loads(json.dumps(every, allow_nan=False)) == every and every["dataset"] == "held-out"
    assert (len(every["image_to_text"]), len(every["text_to_image"])) == (8, 6)


def test_thumbnails_are_small_keep_their_proportions_and_have_a_white_ground():
    assert picture(thumbnail(colour_image("red", (400, 200)))).size == (96, 48)
    file = io.BytesIO()
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(file, "PNG")
    assert min(picture(thumbnail(file.getvalue())).convert("RGB").getpixel((10, 10))) > 250
