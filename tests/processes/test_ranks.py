"""Oracle 9: one, two and four real processes give the same losses, gradients and state, for every method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing
from torch import distributed as dist

from neuclip import CLIP, AmorLIP, FastCLIP, NeuCLIP, SigLIP
from neuclip.distributed.collectives import counted_traffic
from neuclip.objectives.objective import Objective

B, INPUT, D, N = 8, 5, 4, 19
STEPS, MORE = 5, 3

# AdaGrad from zero moves a coordinate by the whole rate whatever its gradient's size, so the sign of a gradient of
# 1e-17 would show; a start above zero keeps rounding small.
GENTLE = {"network_lr": 0.1, "initial_accumulator": 1e-6}

METHODS: dict[str, Callable[[], Objective]] = {
    "clip": CLIP,
    "mini-batch form": lambda: CLIP(form="minibatch", rho=2.0, mask_duplicates=True),
    "siglip": SigLIP,
    "fastclip": lambda: FastCLIP(N, gamma_decay_samples=40),
    "fastclip v0, its temperature gradient": lambda: FastCLIP(N, variant="v0", temperature_gradient="fastclip"),
    "fastclip v2": lambda: FastCLIP(3 * N, variant="v2"),
    "amorlip": lambda: AmorLIP(D, epoch_samples=2 * B, total_samples=6 * B),
    # 11 slots for 8 rows: each restart is a fill over two steps; 11 divides over neither 2 nor 4 processes
    "neuclip": lambda: NeuCLIP(D, num_prototypes=11, inner_steps=2, restart_every=3, network_lr=0.1),
    "neuclip, fewer prototypes than processes": lambda: NeuCLIP(D, num_prototypes=3, inner_steps=2, network_lr=0.1),
    "neuclip, detached, adam": lambda: NeuCLIP(
        D, num_prototypes=11, inner_steps=2, alpha_gradient="detached", network_optimizer="adam", restart_every=2
    ),
    "neuclip, rolling and masked": lambda: NeuCLIP(
        D, num_prototypes=21, inner_steps=1, restart="rolling", mask_own_positive=True, mask_duplicates=True, **GENTLE
    ),
    "neuclip, separate": lambda: NeuCLIP(D, num_prototypes=5, inner_steps=2, fit="separate", network_lr=0.1),
    "neuclip, mlp": lambda: NeuCLIP(D, network="mlp", inner_steps=2),
    "neuclip, simultaneous": lambda: NeuCLIP(D, num_prototypes=11, update="simultaneous"),
}


def batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of both towers (B, INPUT), sample ids with repeats over time and once within a batch, caption ids."""
    generator = torch.Generator().manual_seed(step)
    images, texts = torch.randn(2, B, INPUT, generator=generator, dtype=torch.float64)
    ids = torch.randperm(N, generator=generator)[:B]
    if step == 2:
        ids[-1] = ids[0]
    return images, texts, ids, ids % 7


def run(objective: Objective, steps: range, rank: int, ranks: int) -> dict[str, Any]:
    """Losses and gradients, averaged over processes as DDP does, of this process's rows of each step's batch."""
    generator = torch.Generator().manual_seed(100)
    weights = [torch.randn(INPUT, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]
    scale = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    mine = slice(rank * B // ranks, (rank + 1) * B // ranks)
    found: dict[str, Any] = {}
    for step in steps:
        images, texts, ids, captions = (x[mine] for x in batch(step))
        image, text = F.normalize(images @ weights[0], dim=1), F.normalize(texts @ weights[1], dim=1)
        with counted_traffic() as traffic:
            loss = objective(image, text, scale, bias, sample_ids=ids, caption_ids=captions)
        gradients = torch.autograd.grad(loss, [*weights, scale, bias], allow_unused=True, materialize_grads=True)
        for name, value in zip(("loss", "image", "text", "scale", "bias"), (loss.detach(), *gradients), strict=True):
            found[f"{name} of step {step}"] = averaged(value, ranks)
        found[f"bytes of step {step}"] = traffic.bytes
    found["state"] = objective.state_dict()
    return found


def averaged(value: Tensor, ranks: int) -> Tensor:
    if ranks > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= ranks
    return value


def one_process(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{ranks}", rank=rank, world_size=ranks)
    found = {name: {"whole": run(build(), range(STEPS), rank, ranks)} for name, build in METHODS.items()}
    if ranks == 4:  # go on from what two processes saved
        saved = torch.load(f"{folder}/2-0.pt", weights_only=True)
        for name, build in METHODS.items():
            objective = build().double()
            objective.load_state_dict(saved[name]["whole"]["state"])
            found[name]["continued"] = run(objective, range(STEPS, STEPS + MORE), rank, ranks)
    found["inside DDP"] = state_inside_ddp(rank, ranks)
    found["unequal"] = complaint_about(F.normalize(torch.randn(2 + rank % 2, D), dim=1))
    torch.save(found, f"{folder}/{ranks}-{rank}.pt")
    dist.destroy_process_group()


class Module(torch.nn.Module):
    """Towers and objective in one module, as Lightning has it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100)
        weights = [torch.randn(INPUT, D, generator=generator, dtype=torch.float64) for _ in range(2)]
        self.weights = torch.nn.ParameterList(weights)
        self.objective = METHODS["neuclip"]()

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        image, text = F.normalize(images @ self.weights[0], dim=1), F.normalize(texts @ self.weights[1], dim=1)
        return self.objective(image, text, torch.tensor(8.0, dtype=torch.float64))


def state_inside_ddp(rank: int, ranks: int) -> dict[str, Any]:
    module, mine = Module(), slice(rank * B // ranks, (rank + 1) * B // ranks)
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    for step in range(STEPS):
        wrapped(*(x[mine] for x in batch(step)[:2])).backward()
    return module.objective.state_dict()


def complaint_about(rows: Tensor) -> str:
    try:
        CLIP()(rows, rows, torch.tensor(10.0))
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (2, 4):
        multiprocessing.spawn(one_process, args=(ranks, str(folder)), nprocs=ranks)
    return {path.stem: torch.load(path, weights_only=True) for path in Path(folder).glob("*.pt")}


@pytest.fixture(scope="module")
def single_process():
    found = {}
    for name, build in METHODS.items():
        objective = build()
        found[name] = {"whole": run(objective, range(STEPS), 0, 1)}
        found[name]["whole"]["state"] = {key: _copied(value) for key, value in found[name]["whole"]["state"].items()}
        found[name]["continued"] = run(objective, range(STEPS, STEPS + MORE), 0, 1)
    return found


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def assert_same(got: Any, want: Any, where: str) -> None:
    if isinstance(want, dict):
        assert set(got) == set(want), where
        for key in want:
            if not key.startswith("bytes"):
                assert_same(got[key], want[key], f"{where}, {key}")
    elif isinstance(want, Tensor):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12, equal_nan=True), where
    else:
        assert got == want, where


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_any_number_of_processes_gives_the_losses_gradients_and_state_of_one(name, runs, alone):
    for process in ("2-0", "2-1", "4-0", "4-1", "4-2", "4-3"):
        assert_same(runs[process][name]["whole"], alone[name]["whole"], process)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_state_of_two_processes_continues_alike_on_one_and_on_four(name, runs, alone):
    objective = METHODS[name]().double()
    objective.load_state_dict(runs["2-0"][name]["whole"]["state"])
    assert_same(run(objective, range(STEPS, STEPS + MORE), 0, 1), alone[name]["continued"], "on one")
    for rank in range(4):
        assert_same(runs[f"4-{rank}"][name]["continued"], alone[name]["continued"], f"on four, rank {rank}")


@pytest.mark.slow
def test_inside_a_module_that_ddp_wraps_each_process_keeps_its_own_block(runs):
    module = Module()
    for step in range(STEPS):
        module(*batch(step)[:2])
    for process in ("2-0", "2-1", "4-3"):
        assert_same(runs[process]["inside DDP"], module.objective.state_dict(), process)


@pytest.mark.slow
def test_processes_with_different_batch_sizes_are_told_so_instead_of_hanging(runs):
    for process in ("2-0", "2-1", "4-0", "4-3"):
        assert "different batch sizes (2, 3" in runs[process]["unequal"]


@pytest.mark.slow
def test_features_travel_once_and_inner_steps_exchange_one_number_per_anchor_and_side(runs):
    """Bytes per step and process; f = 8 bytes in float64. See docs/scaling.md for the formulas."""
    for ranks in (2, 4):
        found, f, b = runs[f"{ranks}-0"], 8, B // ranks
        sent = {name: found[name]["whole"]["bytes of step 4"] for name in METHODS}
        features = (ranks - 1) * 2 * b * D * f
        keys, four_numbers = (ranks - 1) * b * 8, (ranks - 1) * 4 * b * f
        assert sent["clip"] == features + keys + four_numbers
        inner = (ranks - 1) * 2 * B * f  # both sides of one exchange
        three_numbers = (ranks - 1) * 3 * b * f  # positives and log-normalizers
        # before the restart, two inner steps, and the final prediction
        detached = features + keys + four_numbers + three_numbers + (1 + 2 + 1) * inner
        assert sent["neuclip, detached, adam"] == detached
        assert sent["neuclip"] == detached + (ranks - 1) * 2 * b * D * f  # the gradient through alpha
