"""What an objective is given of a batch: who is excluded, and which inputs are refused."""

from __future__ import annotations

import pytest
import torch

from neuclip import CLIP, NeuCLIP
from neuclip.objectives.pairs import batch_log_normalizers, check_keys, gather_pairs
from tests.objectives.features import unit

B, D = 5, 6


def test_own_partner_same_sample_and_same_caption_are_excluded_and_leave_the_count():
    pairs = gather_pairs(
        unit(B, D, seed=0),
        unit(B, D, seed=1),
        dtype=torch.float64,
        sample_ids=torch.tensor([4, 8, 4, 9, 7]),
        caption_ids=torch.tensor([0, 1, 2, 2, 2]),
    )
    want = torch.eye(B, dtype=torch.bool)
    for i, j in ((0, 2), (2, 3), (2, 4), (3, 4)):
        want[i, j] = want[j, i] = True
    assert torch.equal(pairs.excluded, want)
    assert pairs.num_negatives.tolist() == [3, 4, 1, 2, 2]
    assert pairs.positive_column.tolist() == list(range(B)) and pairs.local_rows == slice(0, B)


def test_a_pair_without_negatives_counts_one_so_that_nothing_is_divided_by_zero():
    pairs = gather_pairs(unit(1, D, seed=0), unit(1, D, seed=1), dtype=torch.float64)
    assert pairs.num_negatives.tolist() == [1]
    image, text = batch_log_normalizers(pairs, torch.tensor(0.1), eps=1e-3)
    assert image.exp().item() == pytest.approx(1e-3) and text.exp().item() == pytest.approx(1e-3)


def test_anchors_keep_their_graph_and_candidates_are_values():
    image, text = unit(B, D, seed=0).requires_grad_(), unit(B, D, seed=1).requires_grad_()
    pairs = gather_pairs(image, text, dtype=torch.float64)
    assert pairs.image.requires_grad and pairs.positive.requires_grad
    assert not any(x.requires_grad for x in (pairs.all_image, pairs.all_text, *pairs.similarities))
    assert torch.allclose(pairs.similarities[0].diagonal(), pairs.positive)
    assert torch.allclose(pairs.similarities[0], pairs.similarities[1].T)


def test_half_precision_features_are_computed_with_in_float32():
    image, text = (unit(B, D, seed=k).bfloat16() for k in (0, 1))
    pairs = gather_pairs(image, text, dtype=torch.float32)
    assert {x.dtype for x in (pairs.image, pairs.all_text, pairs.positive, *pairs.similarities)} == {torch.float32}


@pytest.mark.parametrize(
    ("image", "text", "message"),
    [
        (torch.ones(4, D), torch.ones(4, D), "not unit rows"),
        (unit(4, D, seed=0), unit(3, D, seed=0), "one shape"),
        (unit(4, D + 1, seed=0), unit(4, D + 1, seed=0), "embed_dim=6"),
        (unit(4, D, seed=0) * torch.nan, unit(4, D, seed=0), "not unit rows"),
    ],
)
def test_features_that_cannot_be_right_are_refused(image, text, message):
    with pytest.raises(ValueError, match=message):
        NeuCLIP(D)(image, text, torch.tensor(10.0))


@pytest.mark.parametrize("keys", [torch.arange(B + 1), torch.zeros(B), torch.zeros(B, 1, dtype=torch.int64)])
def test_ids_that_are_not_one_integer_per_pair_are_refused(keys):
    with pytest.raises(ValueError, match="give 5 integers, one per pair"):
        check_keys(keys, unit(B, D, seed=0), "sample_ids")
    with pytest.raises(ValueError, match="caption_ids have shape"):
        CLIP()(unit(B, D, seed=0), unit(B, D, seed=1), torch.tensor(10.0), caption_ids=keys)
