"""The small network against torch's own layers and optimizers."""

from __future__ import annotations

import pytest
import torch
from neuclip.objectives.normalizers.residual_mlp import ResidualMLP, step_together
from neuclip.objectives.normalizers.row_optimizer import RowOptimizer
from torch import Tensor, nn

D, B = 6, 9


class Layers(nn.Module):
    """The same network from torch.nn, with its parameters in the same order."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.widen = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.LayerNorm(h))
        self.narrow = nn.Sequential(nn.Linear(h, d), nn.ReLU(), nn.LayerNorm(d))
        self.out = nn.Linear(d, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.out(torch.relu(self.narrow(self.widen(features)) + features))[:, 0]


def twins(width_factor: float = 1, **settings) -> tuple[ResidualMLP, Layers]:
    network = ResidualMLP(D, width_factor=width_factor, seed=3, **settings).double()
    layers = Layers(D, round(width_factor * D)).double()
    nn.utils.vector_to_parameters(network.weights.clone(), layers.parameters())
    return network, layers


def features(seed: int = 0) -> Tensor:
    return torch.randn(B, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(target: Tensor):
    return lambda output: (output - target).square().mean()


@pytest.mark.parametrize("width_factor", [1, 2, 0.5])
def test_output_and_gradient_in_the_features_equal_those_of_torchs_layers(width_factor):
    network, layers = twins(width_factor)
    x, y = features().requires_grad_(), features().requires_grad_()
    got, want = network(x), layers(y)
    assert got.shape == (B,) and torch.allclose(got, want, rtol=0, atol=1e-13)
    got.square().sum().backward()
    want.square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "optimizer"), [("adam", torch.optim.AdamW), ("adagrad", torch.optim.Adagrad), ("sgd", torch.optim.SGD)]
)
def test_ten_updates_follow_torchs_optimizers(name, optimizer, weight_decay):
    network, layers = twins(optimizer=RowOptimizer(name, 0.02, weight_decay))
    theirs = optimizer(layers.parameters(), lr=0.02, weight_decay=weight_decay)
    for step in range(10):
        x, loss = features(step), loss_of(features(50 + step)[:, 0])
        value = network.step(x, loss)
        theirs.zero_grad()
        want = loss(layers(x))
        want.backward()
        theirs.step()
        assert torch.allclose(value, want, rtol=0, atol=1e-10)
    assert torch.allclose(network.weights, nn.utils.parameters_to_vector(layers.parameters()), rtol=0, atol=1e-10)


def test_gradients_of_networks_that_step_together_are_clipped_together():
    networks, layers = zip(*(twins(optimizer=RowOptimizer("sgd", 1.0)) for _ in range(2)), strict=True)
    losses = [loss_of(10 + features(k)[:, 0]) for k in (1, 2)]
    step_together(
        [(network, features(), loss) for network, loss in zip(networks, losses, strict=True)], largest_gradient=0.5
    )
    sum(loss(layer(features())) for layer, loss in zip(layers, losses, strict=True)).backward()
    parameters = [p for layer in layers for p in layer.parameters()]
    assert nn.utils.clip_grad_norm_(parameters, 0.5) > 0.5
    for network, layer in zip(networks, layers, strict=True):
        want = torch.cat([(p - p.grad).detach().flatten() for p in layer.parameters()])
        assert torch.allclose(network.weights, want, rtol=0, atol=1e-12)


def test_initial_weights_depend_on_the_seed_alone_and_leave_torchs_generator_alone():
    before = torch.get_rng_state()
    one = ResidualMLP(D, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(one.weights, ResidualMLP(D, seed=1).weights)
    assert not torch.equal(one.weights, ResidualMLP(D, seed=2).weights)


def test_initial_weights_are_distributed_as_torchs_layers_are():
    network = ResidualMLP(40, width_factor=3, seed=0)
    layers = Layers(40, 120)
    parts = network.weights.split(network.sizes)
    for ours, theirs in zip(parts, layers.parameters(), strict=True):
        if theirs.numel() < 2 or theirs.std() == 0:
            assert ours.numel() == 1 or torch.equal(ours, theirs.flatten())  # scale and shift of a LayerNorm
        else:
            bound = max(ours.abs().max().item(), theirs.abs().max().item())
            assert ours.abs().max() > 0.8 * bound and theirs.abs().max() > 0.8 * bound
            assert abs(ours.mean()) < 0.3 * bound


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
def test_all_that_it_remembers_is_in_its_state_and_nothing_is_a_parameter(optimizer):
    loss = loss_of(torch.arange(float(B)))
    first = ResidualMLP(D, optimizer=RowOptimizer(optimizer, 0.01, initial_accumulator=0.1))
    for step in range(3):
        first.step(features(step).float(), loss)
    second = ResidualMLP(D, optimizer=first.optimizer, seed=9)
    second.load_state_dict(first.state_dict())
    for network in (first, second):
        assert list(network.parameters()) == []
        network.step(features(7).float(), loss)
    assert torch.equal(first.weights, second.weights)


def test_reinitialised_it_is_as_new():
    used = ResidualMLP(D, optimizer=RowOptimizer("adagrad", 1e-3, initial_accumulator=0.1))
    used.step(features().float(), loss_of(torch.ones(B)))
    used.reinitialise(5)
    new = ResidualMLP(D, optimizer=used.optimizer, seed=5)
    assert all(torch.equal(x, new.state_dict()[name]) for name, x in used.state_dict().items())


def test_a_step_is_taken_without_grad_mode_too():
    one, other = ResidualMLP(D), ResidualMLP(D)
    one.step(features().float(), loss_of(torch.ones(B)))
    with torch.no_grad():
        other.step(features().float(), loss_of(torch.ones(B)))
    assert torch.equal(one.weights, other.weights)
    assert not torch.equal(one.weights, ResidualMLP(D).weights)
