"""One direction, both, and hard negatives: the closed form against brute force in float64, and against NeuCLIP."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neuclip import NeuCLIP
from neuclip.integrations.text_pairs import DIRECTIONS, TextPairs
from tests.objectives.features import close, unit

B, D, M = 10, 6, 7
CASES = [(0, 0.07, 1e-6), (1, 0.19, 1e-2), (2, 0.07, 1e-14)]


def double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def warmed_up(*directions: str, seed: int, tau: float, **settings) -> TextPairs:
    objective = TextPairs(D, directions, num_prototypes=M, inner_steps=3, network_lr=0.1, **settings)
    objective(unit(B, D, seed=seed + 7), unit(B, D, seed=seed + 8), double(1 / tau))
    return objective


def brute_force(query, document, hard, prototypes, tau: float, eps: float) -> Tensor:
    """One direction, anchor by anchor and candidate by candidate, autograd throughout."""
    total = double(0)
    for i in range(B):
        excess = [torch.exp((query[i] @ document[j] - query[i] @ document[i]) / tau) for j in range(B) if j != i]
        own = [torch.exp((query[i] @ row - query[i] @ document[i]) / tau) for row in hard[i]]
        predicted = [torch.exp((query[i] @ w / w.norm() - query[i] @ document[i]) / tau) for w in prototypes]
        among = len(excess) + len(own)
        z = (len(excess) * eps + sum(excess) + sum(own)) / among
        nu = (len(excess) * (eps + sum(predicted) / len(predicted)) + sum(own)) / among
        total = total + (z / nu + torch.log(nu) - 1) / B
    return total


@pytest.mark.parametrize("hard", [0, 1, 3])
@pytest.mark.parametrize("directions", [DIRECTIONS[:1], DIRECTIONS])
@pytest.mark.parametrize(("seed", "tau", "eps"), CASES)
def test_loss_and_gradients_equal_brute_force(seed, tau, eps, directions, hard):
    objective = warmed_up(*directions, seed=seed, tau=tau, eps=eps)
    query, document = (unit(B, D, seed=seed + k).requires_grad_() for k in (0, 1))
    negatives = unit(B, hard, D, seed=seed + 2).requires_grad_() if hard else torch.zeros(B, 0, D)
    got = objective(query, document, double(1 / tau), negatives if hard else None)
    mean = brute_force(query, document, negatives, objective.network.for_image.rows, tau, eps)
    if directions == DIRECTIONS:
        mean = (
            mean + brute_force(document, query, torch.zeros(B, 0, D), objective.network.for_text.rows, tau, eps)
        ) / 2
    assert close(got, mean, 1e-11)
    inputs = [query, document, *([negatives] if hard else [])]
    for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(mean, inputs), strict=True):
        assert close(a, b, 1e-11)


def test_both_directions_without_hard_negatives_are_neuclip_over_two_tau():
    tau, rho = 0.07, 6.5
    settings = {"num_prototypes": M, "inner_steps": 3, "network_lr": 0.1}
    ours, neuclip = TextPairs(D, **settings), NeuCLIP(D, rho=rho, **settings)
    for seed in (0, 10, 20):
        query, document = (unit(B, D, seed=seed + k).requires_grad_() for k in (0, 1))
        got = ours(query, document, double(1 / tau))
        want = neuclip(query, document, double(1 / tau)) / (2 * tau) - rho
        assert close(got, want, 1e-12)
        for a, b in zip(*(torch.autograd.grad(loss, [query, document]) for loss in (got, want)), strict=True):
            assert close(a, b, 1e-12)


def test_before_anything_is_stored_it_is_the_softmax_over_the_batch_and_the_own_hard_negatives():
    query, document, hard = unit(B, D, seed=0), unit(B, D, seed=1), unit(B, 2, D, seed=2)
    logits = 10 * torch.cat([query @ document.T, torch.einsum("bd,bkd->bk", query, hard)], dim=1)
    positive = logits.diagonal()
    logits = logits.masked_fill(torch.eye(B, B + 2, dtype=torch.bool), -torch.inf)
    want = (logits.logsumexp(dim=1) - positive).mean() - double(B + 1).log()
    objective = TextPairs(D, DIRECTIONS[:1], num_prototypes=M, eps=0.0).eval()
    assert close(objective(query, document, double(10), hard), want, 1e-12)


def test_the_state_of_the_prototypes_continues_to_the_bit():
    def steps(objective: TextPairs, which: range) -> list[float]:
        batches = [(unit(B, D, seed=k).float(), unit(B, D, seed=k + 50).float()) for k in which]
        return [objective(*batch, torch.tensor(10.0)).item() for batch in batches]

    settings = {"num_prototypes": 25, "inner_steps": 2, "restart": "rolling"}
    whole, first, second = (TextPairs(D, DIRECTIONS[:1], **settings) for _ in range(3))
    want = steps(whole, range(6))
    got = steps(first, range(3))
    second.load_state_dict(first.state_dict())
    assert got + steps(second, range(3, 6)) == want


@pytest.mark.parametrize("tau", [0.01, 0.05])
def test_far_beyond_what_float32_can_hold_gradients_stay_finite(tau):
    query = unit(B, D, seed=0).float()
    document, hard = -query, query[:, None, :].clone()
    inputs = [x.clone().requires_grad_() for x in (query, document, hard)]
    objective = TextPairs(D, num_prototypes=M, inner_steps=1)
    for _ in range(2):
        loss = objective(inputs[0], inputs[1], torch.tensor(1 / tau), inputs[2])
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("directions", [(), ("doc_to_query",), ("query_to_doc", "doc_to_doc")])
def test_directions_it_does_not_have_are_named(directions):
    with pytest.raises(ValueError, match=r"give \('query_to_doc',\) or"):
        TextPairs(D, directions)
