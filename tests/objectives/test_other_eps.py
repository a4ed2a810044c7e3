"""Every method's estimate with an eps that is not its own, against its formula in plain float64."""

from __future__ import annotations

import math

import pytest
import torch

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.evaluation.normalizer_error import both_log_normalizers, normalizer_error
from neuclip.objectives.fastclip import exchange_eps
from neuclip.objectives.objective import NoEstimate
from tests.objectives.features import unit

N, D, OWN, TAU = 12, 4, 1e-3, 0.1
SCALE = torch.tensor(1 / TAU, dtype=torch.float64)
IMAGE, TEXT, IDS = unit(N, D, seed=1), unit(N, D, seed=2), torch.arange(N)
POSITIVE = (IMAGE * TEXT).sum(dim=1).tolist()
METHODS = {
    "clip": lambda: CLIP(eps=OWN),
    "neuclip": lambda: NeuCLIP(D, num_prototypes=5, inner_steps=2, network_lr=0.1, eps=OWN),
    "mlp": lambda: NeuCLIP(D, network="mlp", inner_steps=2, eps=OWN),
    "fastclip": lambda: FastCLIP(N, gamma=0.5, gamma_schedule="constant", eps=OWN),
    "amorlip": lambda: AmorLIP(D, total_samples=6 * N, epoch_samples=N, eps=OWN),
}


def trained(name: str):
    objective = METHODS[name]()
    for seed in (3, 4):
        objective(unit(N, D, seed=seed), unit(N, D, seed=seed + 9), SCALE, sample_ids=IDS)
    return objective.eval()


def g_of(name: str, objective, side: int) -> list[float]:
    """The method's estimate of g, without eps, of every anchor of one side."""
    anchors, others = ((IMAGE, TEXT), (TEXT, IMAGE))[side]

    def mean_over(candidates: torch.Tensor, i: int) -> float:
        return sum(math.exp((float(c @ anchors[i]) - POSITIVE[i]) / TAU) for c in candidates) / len(candidates)

    if name == "clip":
        return [mean_over(torch.cat([others[:i], others[i + 1 :]]), i) for i in range(N)]
    if name == "neuclip":
        rows = (objective.network.for_image, objective.network.for_text)[side].rows
        return [mean_over(rows / rows.norm(dim=1, keepdim=True), i) for i in range(N)]
    if name == "mlp":
        outputs = (objective.network.for_image, objective.network.for_text)[side](anchors).tolist()
        return [math.exp(out - p / TAU) for out, p in zip(outputs, POSITIVE, strict=True)]
    if name == "fastclip":
        stored = objective.state_dict()[("table.log_u_image", "table.log_u_text")[side]]
        return [math.exp(log_u) - OWN for log_u in stored.tolist()]
    sums = (objective.image_sums, objective.text_sums)[side].predict(anchors).tolist()
    relative = [math.exp(out - p / TAU) for out, p in zip(sums, POSITIVE, strict=True)]
    return [max(0.0, r - objective.settings.positive_coefficient) / (N - 1) for r in relative]


@pytest.mark.parametrize("eps", [1e-5, OWN, 0.5])
@pytest.mark.parametrize("name", METHODS)
def test_an_estimate_with_another_eps_is_the_methods_own_g_with_it(name, eps):
    objective = trained(name)
    found = objective.log_normalizers(IMAGE, TEXT, SCALE, sample_ids=IDS, eps=eps)
    for side, got in enumerate(found):
        want = torch.tensor([math.log(eps + g) for g in g_of(name, objective, side)], dtype=torch.float64)
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_own_eps_is_the_default_to_the_bit(name):
    objective = trained(name)
    plain = objective.log_normalizers(IMAGE, TEXT, SCALE, sample_ids=IDS)
    given = objective.log_normalizers(IMAGE, TEXT, SCALE, sample_ids=IDS, eps=OWN)
    assert all(torch.equal(one, other) for one, other in zip(plain, given, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_the_error_is_that_of_float64_by_hand_with_one_eps_for_all(name):
    objective, eps = trained(name), 0.01
    found = normalizer_error(
        IMAGE,
        TEXT,
        logit_scale=SCALE,
        eps=eps,
        objective=objective,
        batch_size=N,  # for CLIP a whole batch is the truth
        anchors=N,
        seed=0,
        caption_of=IDS,
    )
    truth = [side.tolist() for side in both_log_normalizers(IMAGE, TEXT, IDS, tau=TAU, eps=eps)]
    sides = [
        sum((math.log(eps + g) - exact) ** 2 for g, exact in zip(g_of(name, objective, side), truth[side], strict=True))
        for side in (0, 1)
    ]
    method = found["estimators"]["method"]
    assert (method["image"], method["text"]) == pytest.approx((sides[0] / N, sides[1] / N), rel=1e-8, abs=1e-15)
    assert (method["mean"] < 1e-15) == (name == "clip") and found["estimators"]["minibatch"]["mean"] < 1e-15


def test_siglip_has_no_estimate_with_any_eps():
    with pytest.raises(NoEstimate, match="SigLIP has no normalizer"):
        SigLIP().log_normalizers(IMAGE, TEXT, SCALE, eps=1e-6)


def test_a_stored_eps_hides_what_is_far_below_it_and_unvisited_samples_stay_unknown():
    log_u = torch.tensor([0.5 + 1e-6, 1e-6 + 1e-8, 1e-6, math.nan]).log()
    smaller, larger = exchange_eps(log_u, 1e-6, 1e-9), exchange_eps(log_u, 1e-6, 1e-4)
    assert smaller[0].item() == pytest.approx(math.log(0.5), abs=1e-5)
    assert smaller[1].item() == pytest.approx(math.log(1.1e-8), abs=2e-3) and smaller[2:].isnan().all()
    assert larger[:3].tolist() == pytest.approx([math.log(0.5001), math.log(1.0001e-4), math.log(1e-4)], abs=1e-5)
    assert larger[3].isnan()
