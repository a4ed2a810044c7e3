"""Chunks give the gradient of the whole batch, in float64, for every method in the registry."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuclip.models.towers import Towers
from neuclip.objectives import OBJECTIVES, build_objective
from neuclip.objectives.objective import Objective
from neuclip.settings.objectives import OBJECTIVES as OBJECTIVE_SETTINGS
from neuclip.training.accumulation import Accumulation

B, WIDTH, VOCABULARY, LENGTH = 8, 6, 20, 3


class Model(nn.Module):
    """Two towers of one layer each, with what makes a second forward pass dangerous if asked for."""

    def __init__(self, extra: nn.Module | None = None):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(12, 10), nn.Tanh(), extra or nn.Identity(), nn.Linear(10, 6))
        self.text = nn.EmbeddingBag(VOCABULARY, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        self.logit_bias = nn.Parameter(torch.tensor(-3.0))

    def encode_image(self, images: Tensor, normalize: bool) -> Tensor:
        return F.normalize(self.image(images), dim=1)

    def encode_text(self, tokens: Tensor, normalize: bool) -> Tensor:
        return F.normalize(self.text(tokens), dim=1)


def small_towers(extra: nn.Module | None = None) -> Towers:
    torch.manual_seed(1)
    return Towers(Model(extra)).double().train()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(B, 3, 2, 2, generator=generator, dtype=torch.float64),
            torch.randint(VOCABULARY, (B, LENGTH), generator=generator),
        )
        for _ in range(count)
    ]


def objective_named(name: str) -> Objective:
    settings = OBJECTIVE_SETTINGS[name]()
    known = {"embed_dim": WIDTH, "dataset_size": 4 * B, "epoch_samples": 4 * B, "total_samples": 8 * B}
    objective = build_objective(name, settings, **known)
    return objective.double()


def gradients(towers: Towers, objective: Objective, micro_batch_size: int | None) -> list[Tensor]:
    """Of three steps; None: plain autograd, without the cut."""
    found = []
    accumulation = Accumulation(towers, micro_batch_size=micro_batch_size or 0)
    for number, (images, tokens) in enumerate(batches(3)):
        ids = torch.arange(number * B, (number + 1) * B)
        towers.zero_grad()
        if micro_batch_size is None:
            image, text = towers(images, tokens)
            objective(image, text, towers.logit_scale, towers.logit_bias, sample_ids=ids).backward()
        else:
            accumulation.backward(objective(*accumulation.features(images, tokens), sample_ids=ids))
        found += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in towers.parameters()]
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("micro_batch_size", [0, 1, 3, 100])
def test_chunks_give_the_gradient_of_the_whole_batch_with_temperature_and_bias(name, micro_batch_size):
    whole = gradients(small_towers(), objective_named(name), None)
    chunked = gradients(small_towers(), objective_named(name), micro_batch_size)
    for one, other in zip(whole, chunked, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-13)
    assert any(g.abs().max() > 1e-3 for g in whole)


def test_a_scaled_loss_gives_a_scaled_gradient_through_the_cut():
    images, tokens = batches(1)[0]
    found = []
    for scale in (1.0, 1024.0):
        towers = small_towers()
        accumulation = Accumulation(towers, micro_batch_size=3)
        accumulation.backward(scale * objective_named("clip")(*accumulation.features(images, tokens)))
        found.append([p.grad / scale for p in towers.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*found, strict=True))


def test_both_passes_draw_the_same_dropout_and_leave_the_generator_where_one_would():
    images, tokens = batches(1)[0]
    towers, reference = small_towers(nn.Dropout(0.5)), small_towers(nn.Dropout(0.5))
    accumulation = Accumulation(towers, micro_batch_size=3)
    torch.manual_seed(7)
    features = accumulation.features(images, tokens)
    torch.rand(3)  # as an objective might
    accumulation.backward(objective_named("clip")(*features))
    after = torch.get_rng_state()
    torch.manual_seed(7)
    parts = [reference(x, t) for x, t in zip(images.tensor_split(3), tokens.tensor_split(3), strict=True)]
    torch.rand(3)
    assert torch.equal(after, torch.get_rng_state())
    image, text = (torch.cat(side) for side in zip(*parts, strict=True))
    objective_named("clip")(image, text, reference.logit_scale).backward()
    for p, want in zip(towers.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p.grad, torch.zeros_like(p) if want.grad is None else want.grad, rtol=1e-10, atol=1e-13)


def test_running_statistics_see_each_chunk_once():
    images, tokens = batches(1)[0]
    towers, reference = small_towers(nn.BatchNorm1d(10)), small_towers(nn.BatchNorm1d(10))
    accumulation = Accumulation(towers, micro_batch_size=3)
    accumulation.backward(objective_named("clip")(*accumulation.features(images, tokens)))
    for part in zip(images.tensor_split(3), tokens.tensor_split(3), strict=True):
        reference(*part)
    assert all(torch.allclose(a, b) for a, b in zip(towers.buffers(), reference.buffers(), strict=True))
    assert towers.model.image[3].num_batches_tracked == 3


@pytest.mark.parametrize("micro_batch_size", [0, 3])
def test_a_frozen_tower_stays_without_gradient(micro_batch_size):
    images, tokens = batches(1)[0]
    towers = small_towers()
    towers.model.image.requires_grad_(False)
    accumulation = Accumulation(towers, micro_batch_size=micro_batch_size)
    accumulation.backward(objective_named("clip")(*accumulation.features(images, tokens)))
    assert all(p.grad is None for p in towers.model.image.parameters())
    assert towers.model.text.weight.grad.abs().max() > 0
