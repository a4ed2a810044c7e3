"""Oracle 9: one, two and four real ranks give the same losses, gradients, estimates and state, for every method."""

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
from neuclip.distributed.collectives import counted_traffic, single_process, world_size
from neuclip.objectives.objective import NoEstimate, Objective

pytestmark = pytest.mark.slow

B, INPUT, D, N = 8, 5, 4, 19
STEPS, MORE = 5, 3
EVERY_RANK = ("2-0", "2-1", "4-0", "4-1", "4-2", "4-3")  # number of ranks, rank

# AdaGrad from zero moves a coordinate by the whole rate whatever its gradient's size, so the sign of a gradient of
# 1e-17 would show; a start above zero keeps rounding small.
ACCUMULATED = {"network_lr": 0.1, "initial_accumulator": 1e-6}
EPOCHS: dict[str, Any] = {"epoch_samples": 2 * B, "total_samples": 6 * B, "network_lr": 0.01}
GAMMA: dict[str, Any] = {"gamma": 0.3, "gamma_decay_samples": 30, "temperature_initial": 0.05}

Build = Callable[[Path], Objective]  # of a folder for files
METHODS: dict[str, Build] = {
    "clip": lambda _: CLIP(),
    "mini-batch form": lambda _: CLIP(form="minibatch", rho=2.0, mask_duplicates=True),
    "siglip": lambda _: SigLIP(),
    "fastclip": lambda _: FastCLIP(N, gamma_decay_samples=40),  # 19 samples divide by neither 2 nor 4
    "fastclip v0, its temperature gradient": lambda _: FastCLIP(N, variant="v0", temperature_gradient="fastclip"),
    "fastclip v2": lambda _: FastCLIP(3 * N, variant="v2", **GAMMA),
    # with 3 samples some rank of four owns none, and ids repeat in each batch
    "fastclip, three samples": lambda _: FastCLIP(3, **GAMMA),
    "fastclip isogclr, three samples": lambda _: FastCLIP(3, variant="isogclr", **GAMMA),
    "fastclip sogclr, in files": lambda folder: FastCLIP(N, variant="sogclr", table_path=folder / "table", **GAMMA),
    "amorlip": lambda _: AmorLIP(D, epoch_samples=2 * B, total_samples=6 * B),
    "amorlip, rate times ranks": lambda _: AmorLIP(
        D, network_lr_times_ranks=True, **EPOCHS | {"network_lr": 0.01 / world_size()}
    ),
    "amorlip, adaptive": lambda _: AmorLIP(D, adaptive_temperature=True, mask_duplicates=True, **EPOCHS),
    "amorlip, kl_asymmetric": lambda _: AmorLIP(D, divergence="kl_asymmetric", **EPOCHS),
    "amorlip, kl_symmetric": lambda _: AmorLIP(D, divergence="kl_symmetric", **EPOCHS),
    "amorlip, js": lambda _: AmorLIP(D, divergence="js", reinitialise_every=0, **EPOCHS),
    # 11 slots for 8 rows: each restart is a fill over two steps; 11 divides over neither 2 nor 4 ranks
    "neuclip": lambda _: NeuCLIP(D, num_prototypes=11, inner_steps=2, restart_every=3, network_lr=0.1),
    "neuclip, fewer prototypes than ranks": lambda _: NeuCLIP(D, num_prototypes=3, inner_steps=2, network_lr=0.1),
    "neuclip, detached, adam": lambda _: NeuCLIP(
        D, num_prototypes=11, inner_steps=2, alpha_gradient="detached", network_optimizer="adam", restart_every=2
    ),
    "neuclip, rolling and masked": lambda _: NeuCLIP(
        D,
        num_prototypes=21,
        inner_steps=1,
        restart="rolling",
        mask_own_positive=True,
        mask_duplicates=True,
        **ACCUMULATED,
    ),
    "neuclip, separate": lambda _: NeuCLIP(D, num_prototypes=5, inner_steps=2, fit="separate", network_lr=0.1),
    "neuclip, mlp": lambda _: NeuCLIP(D, network="mlp", inner_steps=2),
    "neuclip, simultaneous": lambda _: NeuCLIP(D, num_prototypes=11, update="simultaneous"),
    "neuclip, simultaneous mlp": lambda _: NeuCLIP(D, network="mlp", update="simultaneous"),
}


def batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of both encoders (B, INPUT), sample ids with repeats over time and once within a batch, caption ids."""
    generator = torch.Generator().manual_seed(step)
    images, texts = torch.randn(2, B, INPUT, generator=generator, dtype=torch.float64)
    ids = torch.randperm(N, generator=generator)[:B]
    if step == 2:
        ids[-1] = ids[0]
    return images, texts, ids, ids % 7


def encoder_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(100)
    return [torch.randn(INPUT, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]


def local_batch(
    objective: Objective, step: int, weights: list[Tensor], rank: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features of both sides, sample ids and caption ids of this rank's rows."""
    rows = slice(rank * B // ranks, (rank + 1) * B // ranks)
    images, texts, ids, captions = (x[rows] for x in batch(step))
    if isinstance(objective, FastCLIP):
        ids = ids % objective.dataset_size
    return F.normalize(images @ weights[0], dim=1), F.normalize(texts @ weights[1], dim=1), ids, captions


def run(objective: Objective, steps: range, rank: int, ranks: int) -> dict[str, Any]:
    """Losses and gradients, averaged over ranks as DDP does, of this rank's rows of each step's batch."""
    weights = encoder_weights()
    scale = torch.tensor(8.0, dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    results: dict[str, Any] = {}
    for step in steps:
        image, text, ids, captions = local_batch(objective, step, weights, rank, ranks)
        with counted_traffic() as traffic:
            loss = objective(image, text, scale, bias, sample_ids=ids, caption_ids=captions)
        gradients = torch.autograd.grad(loss, [*weights, scale, bias], allow_unused=True, materialize_grads=True)
        for name, value in zip(("loss", "image", "text", "scale", "bias"), (loss.detach(), *gradients), strict=True):
            results[f"{name} of step {step}"] = mean_over_ranks(value, ranks)
        results[f"bytes of step {step}"] = traffic.bytes
    results["state"] = objective.state_dict()
    results["estimates"] = estimates(objective, weights, scale, rank, ranks)
    return results


def mean_over_ranks(value: Tensor, ranks: int) -> Tensor:
    if ranks > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= ranks
    return value


def estimates(objective: Objective, weights: list[Tensor], scale: Tensor, rank: int, ranks: int) -> Tensor | None:
    """Log-normalizers (B, 2) of a batch, put together from all ranks; None for methods that have none."""
    image, text, ids, _ = local_batch(objective, 0, weights, rank, ranks)
    try:
        local = torch.stack(objective.log_normalizers(image, text, scale, sample_ids=ids), dim=1)
    except NoEstimate:
        return None
    parts = [torch.empty_like(local) for _ in range(ranks)]
    if ranks > 1:
        dist.all_gather(parts, local.contiguous())
    return torch.cat(parts) if ranks > 1 else local


def one_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    files = Path(folder)
    early = FastCLIP(13)  # built before the process group
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting{ranks}", rank=rank, world_size=ranks)
    results = {name: {"whole": run(build(files), range(STEPS), rank, ranks)} for name, build in METHODS.items()}
    if ranks == 4:  # continue from what two ranks saved
        saved = torch.load(f"{folder}/2-0.pt", weights_only=True)
        for name, build in METHODS.items():
            objective = build(files).double()
            objective.load_state_dict(saved[name]["whole"]["state"])
            results[name]["continued"] = run(objective, range(STEPS, STEPS + MORE), rank, ranks)
    results["inside DDP"] = state_inside_ddp(rank, ranks)
    results["unequal"] = error_of(lambda: call(CLIP(), F.normalize(torch.randn(2 + rank % 2, D), dim=1)))
    results["table"] = table_of(early, rank, ranks)
    torch.save(results, f"{folder}/{ranks}-{rank}.pt")
    dist.destroy_process_group()


def call(objective: Objective, rows: Tensor, ids: Tensor | None = None) -> Tensor:
    return objective(rows, rows, torch.tensor(10.0), sample_ids=ids)


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def table_of(objective: FastCLIP, rank: int, ranks: int) -> dict[str, Any]:
    """What becomes of a table of 13 samples: its local rows, and what is said to those who use it wrongly."""
    rows, ids = F.normalize(torch.randn(2, D), dim=1), torch.tensor([rank, rank + 5])
    call(objective, rows, ids)
    found: dict[str, Any] = {"rows": len(objective.table._rows)}
    with single_process():
        found["alone"] = error_of(lambda: objective.log_normalizers(rows, rows, torch.tensor(10.0), sample_ids=ids))
    wrong = torch.full_like(ids, 13) if rank == ranks - 1 else ids  # on one rank; all must hear of it
    found["outside"] = error_of(lambda: call(objective, rows, wrong))
    state = objective.state_dict()
    with single_process():
        objective.load_state_dict(state)
        estimate = objective.log_normalizers(rows, rows, torch.tensor(10.0), sample_ids=ids)
    return found | {"loaded alone": bool(torch.stack(estimate).isfinite().all())}


class Module(torch.nn.Module):
    """Encoders and objective in one module, as Lightning has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(x.detach()) for x in encoder_weights()])
        self.objective = METHODS["neuclip"](Path())

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        image, text = F.normalize(images @ self.weights[0], dim=1), F.normalize(texts @ self.weights[1], dim=1)
        return self.objective(image, text, torch.tensor(8.0, dtype=torch.float64))


def state_inside_ddp(rank: int, ranks: int) -> dict[str, Any]:
    module, rows = Module(), slice(rank * B // ranks, (rank + 1) * B // ranks)
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    for step in range(STEPS):
        wrapped(*(x[rows] for x in batch(step)[:2])).backward()
    return module.objective.state_dict()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    """By number of ranks and rank, what each found."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (2, 4):
        multiprocessing.spawn(one_rank, args=(ranks, str(folder)), nprocs=ranks)
    return {path.stem: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    """The same on one rank."""
    results = {}
    for name, build in METHODS.items():
        objective = build(tmp_path_factory.mktemp("alone"))
        whole = run(objective, range(STEPS), 0, 1)
        whole["state"] = {key: x.clone() if isinstance(x, Tensor) else x for key, x in whole["state"].items()}
        results[name] = {"whole": whole, "continued": run(objective, range(STEPS, STEPS + MORE), 0, 1)}
    return results


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


@pytest.mark.parametrize("name", METHODS)
def test_any_number_of_ranks_gives_the_losses_gradients_estimates_and_state_of_one(name, runs, alone):
    for rank in EVERY_RANK:
        assert_same(runs[rank][name]["whole"], alone[name]["whole"], rank)


@pytest.mark.parametrize("name", METHODS)
def test_the_state_of_two_ranks_continues_alike_on_one_and_on_four(name, runs, alone, tmp_path):
    objective = METHODS[name](tmp_path).double()
    objective.load_state_dict(runs["2-0"][name]["whole"]["state"])
    assert_same(run(objective, range(STEPS, STEPS + MORE), 0, 1), alone[name]["continued"], "on one")
    for rank in range(4):
        assert_same(runs[f"4-{rank}"][name]["continued"], alone[name]["continued"], f"on four, rank {rank}")


def test_inside_a_module_that_ddp_wraps_each_rank_keeps_its_own_block(runs):
    module = Module()
    for step in range(STEPS):
        module(*batch(step)[:2])
    for rank in ("2-0", "2-1", "4-3"):
        assert_same(runs[rank]["inside DDP"], module.objective.state_dict(), rank)


def test_ranks_with_different_batch_sizes_get_an_error_instead_of_hanging(runs):
    for rank in EVERY_RANK:
        assert "different batch sizes (2, 3" in runs[rank]["unequal"]


def test_each_rank_keeps_its_share_of_the_table_only(runs):
    assert [runs[rank]["table"]["rows"] for rank in EVERY_RANK] == [7, 6, 4, 3, 3, 3]


def test_a_table_is_read_by_the_ranks_it_was_made_for_or_after_loading_its_state(runs):
    for rank in EVERY_RANK:
        assert "another number of ranks" in runs[rank]["table"]["alone"]
        assert runs[rank]["table"]["loaded alone"]


def test_a_wrong_sample_id_on_one_rank_is_an_error_on_all(runs):
    for rank in EVERY_RANK:
        assert "sample id 13 is outside 0..12" in runs[rank]["table"]["outside"]


def test_features_are_sent_once_and_inner_steps_exchange_one_number_per_anchor_and_side(runs):
    """Bytes per step and rank; f = 8 bytes in float64. See docs/scaling.md for the formulas."""
    for ranks in (2, 4):
        f, b = 8, B // ranks
        sent = {name: runs[f"{ranks}-0"][name]["whole"]["bytes of step 4"] for name in METHODS}
        features = (ranks - 1) * 2 * b * D * f
        keys, four_numbers = (ranks - 1) * b * 8, (ranks - 1) * 4 * b * f
        assert sent["clip"] == features + keys + four_numbers
        inner = (ranks - 1) * 2 * B * f  # both sides of one exchange
        three_numbers = (ranks - 1) * 3 * b * f  # positives and log-normalizers
        # before the restart, two inner steps, and the final prediction
        detached = features + keys + four_numbers + three_numbers + (1 + 2 + 1) * inner
        assert sent["neuclip, detached, adam"] == detached
        assert sent["neuclip"] == detached + (ranks - 1) * 2 * b * D * f  # the gradient through alpha
        networks = 3 * 2 * (ranks - 1) / ranks * 2 * (2 * D * D + 7 * D + 1) * f  # one gradient per network update
        assert sent["amorlip, adaptive"] == features + 2 * keys + four_numbers + networks  # sample and caption ids
