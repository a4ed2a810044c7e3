"""How far a method's normalizers are from the exact ones: against a double loop; what is drawn and what is counted."""

from __future__ import annotations

import math

import pytest
import torch

from neuclip import CLIP
from neuclip.errors import UserError
from neuclip.evaluation.normalizer_error import (
    both_log_normalizers,
    draw_rows,
    exact_log_normalizers,
    normalizer_error,
    squared_errors,
    windows,
)
from neuclip.objectives.objective import NoEstimate
from tests.objectives.features import unit

IMAGE, TEXT = unit(40, 6, seed=1), unit(40, 6, seed=2)


def reference(anchor_side, candidate_side, i, tau, eps):
    """Eq. 9 with math.exp; only candidate i itself is left out. The largest is taken out: the sum may overflow."""
    scores = [sum(a * b for a, b in zip(anchor_side[i], row, strict=True)) for row in candidate_side]
    others = [(s - scores[i]) / tau for j, s in enumerate(scores) if j != i]
    largest = max(others)
    total = sum(math.exp(one - largest) for one in others) / len(others)
    return largest + math.log(eps * math.exp(-largest) + total) if eps else largest + math.log(total)


def both_references(image, text, index, tau, eps):
    sides = (image.tolist(), text.tolist()), (text.tolist(), image.tolist())
    found = [[reference(*side, i, tau, eps) for i in index.tolist()] for side in sides]
    return tuple(torch.tensor(found, dtype=torch.float64))


class Knows:
    """An objective that answers what it was told, by sample id."""

    def __init__(self, image, text):
        self.image, self.text = image, text

    def log_normalizers(self, image_features, text_features, logit_scale, sample_ids=None, eps=None):
        return self.image[sample_ids], self.text[sample_ids]


class CannotSay:
    def log_normalizers(self, *_, **__):
        raise NoEstimate("SigLIP has no normalizer")


def measure(objective, image=IMAGE, text=TEXT, *, captions=None, **changes):
    asked = {"logit_scale": 20.0, "eps": 1e-6, "batch_size": 16, "anchors": 30, "seed": 3} | changes
    captions = torch.arange(len(image)) if captions is None else captions
    return normalizer_error(image, text, objective=objective, caption_of=captions, **asked)


def mean_of(name, *arguments, **changes):
    return measure(*arguments, **changes)["estimators"][name]["mean"]


@pytest.mark.parametrize("tau", [0.001, 0.005, 0.07, 1.0])  # at the first a sum without its maximum would overflow
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("chunks", [(1, 1), (7, 5), (512, 2048)])
def test_exact_normalizers_match_the_double_loop_for_any_chunks(tau, eps, chunks):
    index, (rows, columns) = torch.tensor([3, 39, 0, 17]), chunks
    positives = (IMAGE * TEXT).sum(dim=1)[index]
    given = {"tau": tau, "eps": eps, "chunk_rows": rows, "chunk_columns": columns}
    got = exact_log_normalizers(IMAGE[index], positives, TEXT, index, **given)
    assert torch.allclose(got, both_references(IMAGE, TEXT, index, tau, eps)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tau", [0.005, 0.01, 0.03, 1.0])
def test_float32_is_close_to_float64(tau):
    image, text, index = unit(500, 16, seed=1), unit(500, 16, seed=2), torch.arange(500)
    exact = torch.cat(both_log_normalizers(image, text, index, tau=tau, eps=1e-6))
    single = torch.cat(both_log_normalizers(image.float(), text.float(), index, tau=tau, eps=1e-6))
    assert single.dtype == torch.float32
    assert (single.double() - exact).abs().max() < 2e-6 / tau + 1e-6


def test_opposite_features_at_the_smallest_temperature_stay_finite():
    image = torch.tensor([[1.0], [1.0], [-1.0]])
    got = torch.cat(both_log_normalizers(image, -image, torch.arange(3), tau=0.005, eps=0.0))
    want = torch.cat(both_references(image.double(), -image.double(), torch.arange(3), 0.005, 0.0))
    assert torch.allclose(got.double(), want, atol=1e-3)


def test_a_duplicate_elsewhere_stays_in_the_sum():
    image, text = unit(50, 16, seed=1), unit(50, 16, seed=2)
    text[31] = text[8]
    image[31] = image[8]
    got = both_log_normalizers(image, text, torch.tensor([8]), tau=0.01, eps=0.0)
    assert torch.allclose(torch.cat(got), torch.cat(both_references(image, text, torch.tensor([8]), 0.01, 0.0)))
    assert (torch.cat(got) > math.log(1 / 49) - 1e-9).all()  # the twin alone gives exp(0) / (n - 1)


def test_an_estimator_fed_the_truth_has_no_error():
    truth = both_references(IMAGE, TEXT, torch.arange(40), 1 / 20, 1e-6)
    method = measure(Knows(*truth))["estimators"]["method"]
    assert method["mean"] < 1e-20 and method["without_estimate"] == 0


def test_a_batch_of_the_whole_data_set_has_no_error():
    errors = {size: mean_of("minibatch", CannotSay(), batch_size=size) for size in (40, 1000, 8)}
    assert errors[40] < 1e-20 and errors[1000] < 1e-20 and errors[8] > 0.01


def test_the_clip_objective_is_the_minibatch_estimator():
    estimators = measure(CLIP(eps=1e-6), unit(50, 6, seed=1), unit(50, 6, seed=2), anchors=50)["estimators"]
    assert estimators["method"]["mean"] == pytest.approx(estimators["minibatch"]["mean"], rel=1e-9)


@pytest.mark.parametrize(("size", "anchors", "batch"), [(50, 50, 16), (50, 7, 16), (16, 16, 16), (50, 33, 16)])
def test_every_anchor_is_in_exactly_one_full_batch_of_different_pairs(size, anchors, batch):
    drawn = torch.randperm(size)
    seen = []
    for rows, own in windows(drawn, anchors=anchors, batch_size=batch):
        assert len(rows) == batch == len(set(rows.tolist()))
        seen += rows[own].tolist()
    assert seen == drawn[:anchors].tolist()


def test_the_same_seed_gives_the_same_figures_and_another_seed_others():
    once, again, other = (measure(CannotSay(), seed=seed) for seed in (3, 3, 4))
    assert once == again != other
    assert "method" not in once["estimators"] and once["method_note"] == "SigLIP has no normalizer"


def test_anchors_without_an_estimate_are_left_out_and_counted():
    truth = (torch.zeros(4), torch.zeros(4))
    estimate = (torch.tensor([1.0, math.nan, 1.0, 3.0]), torch.tensor([2.0, math.nan, 2.0, 4.0]))
    errors = squared_errors(estimate, truth, torch.tensor([False, False, False, True]))
    assert errors["without_estimate"] == 1
    assert (errors["image"], errors["text"]) == pytest.approx((11 / 3, 24 / 3))
    assert errors["mean_without_duplicates"] == pytest.approx(2.5)


def test_repeated_captions_among_the_anchors_are_counted():
    captions = torch.arange(40)
    captions[5] = captions[6] = captions[7]
    captions[20] = captions[30]
    assert measure(CannotSay(), captions=captions, anchors=40)["duplicates"] == 5


def test_the_share_at_the_floor_grows_with_eps():
    shares = [measure(CannotSay(), eps=eps)["share_at_floor"] for eps in (0.0, 1e-12, 1e30)]
    assert shares[0] == 0 and shares[1] < shares[2] == 1


def test_one_pair_has_no_normalizer():
    with pytest.raises(UserError, match="two or more pairs"):
        measure(CannotSay(), IMAGE[:1], TEXT[:1])


def test_samples_that_cannot_be_read_leave_the_order_of_the_others():
    whole = draw_rows(torch.arange(50), 50, seed=3)
    readable = torch.tensor([id for id in range(50) if id not in (7, 21, 49)])
    drawn = readable[draw_rows(readable, 50, seed=3)]
    assert drawn.tolist() == [id for id in whole.tolist() if id not in (7, 21, 49)]
    assert torch.equal(whole, torch.randperm(50, generator=torch.Generator().manual_seed(3)))


def test_a_permuted_data_set_has_the_same_error():
    order = torch.randperm(40, generator=torch.Generator().manual_seed(9))
    told = Knows(torch.zeros(40, dtype=torch.float64), torch.ones(40, dtype=torch.float64))
    plain, moved = measure(told), measure(told, IMAGE[order], TEXT[order], sample_ids=order)
    for name in ("method", "minibatch"):
        assert moved["estimators"][name] == pytest.approx(plain["estimators"][name], rel=1e-9)


def test_the_method_is_asked_with_the_eps_of_the_truth():
    asked = []

    class Listens(CannotSay):
        def log_normalizers(self, *_, eps=None, **__):
            asked.append(eps)
            raise NoEstimate("")

    measure(Listens(), eps=1e-4)
    assert asked == [1e-4]
