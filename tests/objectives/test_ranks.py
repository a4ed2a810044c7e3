"""One, two and four ranks give the same losses, gradients, estimates and state, for every method. Ranks are threads
here, and real processes where a process is the claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode

from neuclip import CLIP, SCENT, AmorLIP, FastCLIP, LargeBatch, NeuCLIP, SigLIP
from neuclip.distributed.collectives import rank, sum_over_ranks, world_size
from neuclip.objectives import pairs
from neuclip.objectives.objective import NoEstimate, Objective
from neuclip.objectives.table import TableObjective
from tests.builders.processes import on_ranks, threads
from tests.objectives import features
from tests.objectives.features import B, D, unit

STEPS, MORE = 5, 3
GAMMA: dict[str, Any] = {"gamma": 0.3, "gamma_decay_samples": 30}
METHODS: dict[str, Callable[[], Objective]] = features.METHODS | {
    # of three samples some rank of four owns none, and ids repeat in each batch
    "fastclip, three samples": lambda: FastCLIP(3, **GAMMA),
    "fastclip, individual, three samples": lambda: FastCLIP(3, temperature="individual", **GAMMA),
    "scent, three samples": lambda: SCENT(3, temperature_gradient="fastclip"),
    "amorlip, masked": lambda: AmorLIP(D, epoch_samples=2 * B, mask_duplicates=True, reinitialise=False),
    "neuclip, fewer prototypes than ranks": lambda: NeuCLIP(D, num_prototypes=3, inner_steps=2, network_lr=0.1),
    # 11 slots for 8 rows: each restart is a fill over two steps
    "neuclip, detached": lambda: NeuCLIP(
        D, num_prototypes=11, inner_steps=2, alpha_gradient="detached", restart_every=2, network_lr=0.1
    ),
    "neuclip, simultaneous mlp": lambda: NeuCLIP(D, network="mlp", update="simultaneous"),
}
REAL = ("clip", "fastclip, individual", "amorlip", "neuclip")  # of each kind of state one
every_method = pytest.mark.parametrize("method", METHODS)


def own_rows() -> slice:
    return slice(rank() * B // world_size(), (rank() + 1) * B // world_size())


def batch(objective: Objective, step: int) -> dict[str, Tensor]:
    """This rank's part of what an objective is given."""
    given = {key: x[own_rows()] if x.ndim else x for key, x in features.batch(step, torch.float64).items()}
    if isinstance(objective, TableObjective):
        given["sample_ids"] = given["sample_ids"] % objective.dataset_size
    return given


def of_all(own: Tensor) -> Tensor:  # (b, ...) -> (B, ...)
    whole = own.new_zeros(B, *own.shape[1:])
    whole[own_rows()] = own
    return sum_over_ranks(whole)


def run(objective: Objective, steps: range, *, bad: int | None = None, rows: int = 1) -> dict[str, Any]:
    """Losses and gradients, averaged over ranks as DDP does, then state and estimates. In step `bad` the last `rows`
    pairs of the batch hold NaN."""
    results: dict[str, Any] = {}
    for step in steps:
        given = batch(objective, step)
        leaves = [given[key] for key in ("image_features", "text_features", "logit_scale", "logit_bias")]
        if step == bad:
            spoilt = torch.arange(B)[own_rows(), None] >= B - rows
            given["image_features"] = leaves[0].masked_fill(spoilt, math.nan)
        loss = objective(**given)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        for name, value in zip(("loss", "image", "text", "scale", "bias"), (loss, *gradients), strict=True):
            results[f"{name} of step {step}"] = (of_all if value.ndim else sum_over_ranks)(value) / world_size()
        results[f"left out in step {step}"] = objective.metrics["left_out"]
    results["state"] = {key: x.clone() if isinstance(x, Tensor) else x for key, x in objective.state_dict().items()}
    return results | {"estimates": estimates(objective)}


def estimates(objective: Objective) -> Tensor | None:  # (B, 2)
    given = batch(objective, 0)
    names = ("image_features", "text_features", "logit_scale", "sample_ids")
    try:
        return of_all(torch.stack(objective.log_normalizers(*(given[name] for name in names)), dim=1))
    except NoEstimate:
        return None


def assert_same(got: Any, want: Any, where: str) -> None:
    if isinstance(want, dict):
        assert set(got) == set(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}, {key}")
    elif isinstance(want, Tensor):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12, equal_nan=True), where
    else:
        assert got == want, where


@pytest.fixture(scope="module")
def alone() -> Callable[[str], dict[str, Any]]:
    """Of a method, what it does on one rank, and how it goes on; each computed once."""
    found: dict[str, dict[str, Any]] = {}

    def of(method: str) -> dict[str, Any]:
        if method not in found:
            objective = METHODS[method]()
            found[method] = {"whole": run(objective, range(STEPS))}
            found[method]["continued"] = run(objective, range(STEPS, STEPS + MORE))
        return found[method]

    return of


@every_method
@pytest.mark.parametrize(("ranks", "strip"), [(2, 1), (4, 2**22)], ids=["2, in strips of one row", "4"])
def test_any_number_of_ranks_gives_the_losses_gradients_estimates_and_state_of_one(
    method, ranks, strip, alone, monkeypatch
):
    want = alone(method)["whole"]
    monkeypatch.setattr(pairs, "STRIP", {"cpu": strip})
    monkeypatch.setattr(pairs, "KEPT", 2**25 if strip > 1 else 0)
    for number, got in enumerate(threads(ranks, lambda _: run(METHODS[method](), range(STEPS)))):
        assert_same(got, want, f"rank {number} of {ranks}")


@every_method
def test_the_state_of_two_ranks_continues_alike_on_one_and_on_four(method, alone):
    saved = threads(2, lambda _: run(METHODS[method](), range(STEPS)))[1]["state"]

    def work(_: int = 0) -> dict[str, Any]:
        objective = METHODS[method]().double()
        objective.load_state_dict(saved)
        return run(objective, range(STEPS, STEPS + MORE))

    for number, got in enumerate([work(), *threads(4, work)]):
        assert_same(got, alone(method)["continued"], f"run {number}")


@every_method
@pytest.mark.parametrize("rows", [1, B])
def test_bad_rows_on_some_ranks_are_known_on_all_and_have_the_effect_of_one_rank(method, rows):
    want = run(METHODS[method](), range(4), bad=1, rows=rows)
    assert want["left out in step 1"] == rows and math.isnan(want["loss of step 1"])
    assert torch.isfinite(torch.stack([want["loss of step 2"], want["loss of step 3"]])).all()
    for ranks in (2, 4):
        for got in threads(ranks, lambda _: run(METHODS[method](), range(4), bad=1, rows=rows)):
            assert_same(got, want, f"with {rows} bad rows on {ranks} ranks")


def test_an_objective_built_before_the_process_group_keeps_its_block_at_the_first_call():
    early = [(NeuCLIP(D, num_prototypes=7, inner_steps=0), FastCLIP(19)) for _ in range(3)]
    given = {"logit_scale": 10.0, "sample_ids": torch.arange(4)}
    given |= {"image_features": unit(4, D, seed=0), "text_features": unit(4, D, seed=1)}

    def work(rank: int) -> tuple[Tensor, Tensor, int]:
        neuclip, fastclip = early[rank]
        neuclip(**given), fastclip(**given)
        return neuclip.normalizer.rows, neuclip.state_dict()["normalizer.rows"], len(fastclip.table.rows)

    own, states, shares = zip(*threads(3, work), strict=True)
    assert [rows.shape[1] for rows in own] == [3, 2, 2] and shares == (7, 6, 6)
    assert all(torch.equal(state, torch.cat(own, dim=1)) for state in states)
    with pytest.raises(RuntimeError, match="number of ranks changed since this objective was used; build a new one"):
        early[0][0](**given)


def error_of(action: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        action(*arguments, **named)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_with_different_batch_sizes_get_an_error_instead_of_hanging_at_the_first_call_and_at_later_ones():
    def work(rank: int) -> list[str]:
        rows, objective = torch.eye(4), CLIP()
        objective(rows[:2], rows[:2], 10.0)
        short = rows[: 2 + rank]  # as the last batch of one rank may be
        return [error_of(one, short, short, 10.0) for one in (CLIP(), objective)]

    assert all("different batch sizes (2, 3)" in error for errors in threads(2, work) for error in errors)


def test_a_wrong_sample_id_on_one_rank_is_an_error_on_all():
    def work(rank: int) -> str:
        rows, ids = torch.eye(4)[:2], torch.tensor([rank, 13 if rank == 3 else rank + 5])
        return error_of(FastCLIP(13), rows, rows, 10.0, sample_ids=ids)

    assert all("a sample id is outside 0..12" in found for found in threads(4, work))


# Real processes: what they share with threads, DistributedDataParallel, and what is sent.


class Towers(torch.nn.Module):
    """Two encoders, with BatchNorm in one of them, a temperature and a bias; and perhaps the objective inside, as
    Lightning has it."""

    def __init__(self, objective: Objective | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.BatchNorm1d(D)).double()
        self.text = torch.nn.Linear(D, D).double()
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.logit_bias = torch.nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))
        self.objective = objective

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        rows = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        given = *rows, self.logit_scale.exp(), self.logit_bias
        return given if self.objective is None else (self.objective(*given, sample_ids=torch.arange(B)[own_rows()]),)


def own_inputs(step: int) -> Tensor:  # (2, b, D)
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, B, D, generator=generator, dtype=torch.float64)[:, own_rows()]


def inside_ddp() -> dict[str, Any]:
    """The state, and each parameter's gradient, after some steps of a module that holds the objective."""
    towers = Towers(METHODS["neuclip"]())
    towers.image.eval()
    options = {"find_unused_parameters": True}  # NeuCLIP leaves the bias out
    wrapped = torch.nn.parallel.DistributedDataParallel(towers, **options) if world_size() > 1 else towers
    for step in range(STEPS):
        wrapped(*own_inputs(step))[0].backward()
    gradients = {name: x.grad for name, x in towers.named_parameters() if name != "logit_bias"}
    return {"state": towers.objective.state_dict(), "gradients": gradients}


def large_batch(micro_batch_size: int, objective: Objective, *, train: bool = False) -> dict[str, Any]:
    """Gradients of the second of two steps, and how often DDP averaged. BatchNorm sees a chunk at a time: it has its
    running statistics here, unless the chunks of all ranks are those of one."""
    towers, averages = Towers(), []
    towers.image.train(train)
    encode = LargeBatch(towers, micro_batch_size=micro_batch_size)
    if world_size() > 1:
        encode = torch.nn.parallel.DistributedDataParallel(encode)

        def count(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and strings not at all
            averages.append(bucket.is_last())
            return allreduce_hook(dist.group.WORLD, bucket)

        encode.register_comm_hook(None, count)
        with pytest.raises(ValueError, match="LargeBatch goes inside DistributedDataParallel"):
            LargeBatch(encode, micro_batch_size=1)
    for step in range(2):
        towers.zero_grad()
        objective(*encode(*own_inputs(step)), sample_ids=torch.arange(B)[own_rows()]).backward()
    return {"gradients": {name: x.grad for name, x in towers.named_parameters()}, "averages": sum(averages)}


# CLIP leaves the bias out, and an individual temperature the scale: DDP must not wait for them.
LOSSES = ("siglip", "clip", "fastclip, individual")


class Sent(TorchDispatchMode):
    """What this rank sends inside, as ring collectives send it, without what is exchanged on the host."""

    bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        others = world_size() - 1
        match func.name():
            case "c10d::_allgather_base_":
                self.bytes += others * args[1].nbytes
            case "c10d::_reduce_scatter_base_":
                self.bytes += others * args[0].nbytes
            case "c10d::allreduce_":
                self.bytes += 2 * others / world_size() * sum(x.nbytes for x in args[0])
        return func(*args, **(kwargs or {}))


def bytes_of_a_step(method: str) -> int:
    objective = METHODS[method]()
    run(objective, range(3))
    with Sent() as sent:
        objective(**batch(objective, 3)).backward()
    return round(sent.bytes)


def one_process(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {method: run(METHODS[method](), range(STEPS)) for method in REAL}
    found["inside DDP"] = inside_ddp()
    found["large batch"] = {name: [large_batch(size, METHODS[name]()) for size in (0, 1, 3)] for name in LOSSES}
    found["equal chunks"] = large_batch(2, SigLIP(), train=True)
    found["bytes"] = {name: bytes_of_a_step(name) for name in ("clip", "neuclip", "neuclip, detached", "amorlip")}
    torch.save(found, f"{folder}/{rank()}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two real ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    ended = on_ranks(2, one_process, str(folder))
    assert [rank.code for rank in ended] == [0, 0], ended
    return [torch.load(folder / f"{number}.pt", weights_only=True) for number in (0, 1)]


@pytest.mark.slow
def test_real_processes_do_what_threads_do(processes, alone):
    for found in processes:
        for method in REAL:
            assert_same(found[method], alone(method)["whole"], method)


@pytest.mark.slow
def test_inside_a_module_that_ddp_wraps_each_rank_keeps_its_own_block(processes):
    whole = inside_ddp()
    for found in processes:
        assert_same(found["inside DDP"], whole, "DDP")


@pytest.mark.slow
@pytest.mark.parametrize("method", LOSSES)
def test_a_large_batch_on_two_ranks_has_the_gradient_of_the_whole_and_ddp_averages_once_per_step(method, processes):
    whole = large_batch(0, METHODS[method]())["gradients"]
    for found in processes:
        for chunks in found["large batch"][method]:
            assert_same(chunks["gradients"], whole, method)
            assert chunks["averages"] == 2  # steps


@pytest.mark.slow
def test_batchnorm_normalizes_each_chunk_by_itself_on_any_rank(processes):
    alone, whole = (large_batch(size, SigLIP(), train=True)["gradients"] for size in (2, 0))
    assert not torch.allclose(alone["image.0.weight"], whole["image.0.weight"])
    for found in processes:
        assert_same(found["equal chunks"]["gradients"], alone, "chunks of two")


@pytest.mark.slow
def test_features_are_sent_once_and_inner_steps_exchange_one_number_per_anchor_and_side(processes):
    """Bytes per step and rank; f = 8 bytes in float64. See docs/method.md for the formulas."""
    f, b = 8, B // 2
    features, keys, backward = 2 * b * D * f, 2 * b * 8, 6 * b * f  # keys: how sound a pair is, and the sample's
    clip, inner = features + keys + backward, 2 * B * f
    detached = clip + 2 * b * f + (1 + 2 + 1) * inner  # targets; before the restart, two inner steps, the prediction
    networks = 3 * 2 * (2 * D * D + 7 * D + 1) * f  # one gradient of both networks per update
    want = {"clip": clip, "neuclip": detached + features, "neuclip, detached": detached, "amorlip": clip + networks}
    assert [found["bytes"] for found in processes] == [want, want]  # neuclip's more: the gradient through alpha
