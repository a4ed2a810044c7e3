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

from neuclip import CLIP, SCENT, AmorLIP, DRRho, FastCLIP, LargeBatch, NeuCLIP, SigLIP
from neuclip.distributed import collectives
from neuclip.distributed.collectives import rank, sum_over_ranks, world_size
from neuclip.objectives import pairs
from neuclip.objectives.objective import NoEstimate, Objective
from neuclip.objectives.table import TableObjective
from tests.builders.processes import on_ranks, threads
from tests.objectives.features import reference_features

B, INPUT, D, N = 8, 5, 4, 19
STEPS, MORE = 5, 3

# AdaGrad from zero moves a coordinate by the whole rate whatever its gradient's size, so the sign of a gradient of
# 1e-17 would show: masked prototypes, which are right at once, do not learn here.
EPOCHS: dict[str, Any] = {"epoch_samples": 2 * B, "total_samples": 6 * B, "network_lr": 0.01}
GAMMA: dict[str, Any] = {"gamma": 0.3, "gamma_decay_samples": 30, "temperature_initial": 0.05}
METHODS: dict[str, Callable[[], Objective]] = {
    "clip": CLIP,
    "mini-batch form": lambda: CLIP(form="minibatch", rho=2.0, mask_duplicates=True),
    "siglip": SigLIP,
    "siglip, masked": lambda: SigLIP(mask_duplicates=True),
    "fastclip": lambda: FastCLIP(N, gamma_decay_samples=40),  # 19 samples divide by neither 2 nor 4
    "fastclip, constant": lambda: FastCLIP(N, temperature="constant", gamma_schedule="constant"),
    "fastclip, individual": lambda: FastCLIP(3 * N, temperature="individual", **GAMMA),
    # with 3 samples some rank of four owns none, and ids repeat in each batch
    "fastclip, three samples": lambda: FastCLIP(3, **GAMMA),
    "fastclip, individual, three samples": lambda: FastCLIP(3, temperature="individual", **GAMMA),
    "scent": lambda: SCENT(N, log_alpha=1.0),
    "scent, three samples": lambda: SCENT(3, temperature_gradient="fastclip"),
    "drrho": lambda: DRRho(N, reference=reference_features(N)),
    "drrho, with memory": lambda: DRRho(N, reference=reference_features(N), gamma=0.3, gamma_decay_samples=30),
    "amorlip": lambda: AmorLIP(D, **EPOCHS),
    "amorlip, masked": lambda: AmorLIP(D, mask_duplicates=True, reinitialise=False, **EPOCHS),
    # 11 slots for 8 rows: each restart is a fill over two steps; 11 divides over neither 2 nor 4 ranks
    "neuclip": lambda: NeuCLIP(D, num_prototypes=11, inner_steps=2, restart_every=3, network_lr=0.1),
    "neuclip, fewer prototypes than ranks": lambda: NeuCLIP(D, num_prototypes=3, inner_steps=2, network_lr=0.1),
    "neuclip, detached": lambda: NeuCLIP(
        D, num_prototypes=11, inner_steps=2, alpha_gradient="detached", restart_every=2, network_lr=0.1
    ),
    "neuclip, pooled": lambda: NeuCLIP(
        D, num_prototypes=11, inner_steps=2, restart_every=3, network_lr=0.1, pool_batch=True
    ),
    "neuclip, rolling": lambda: NeuCLIP(D, num_prototypes=21, inner_steps=1, restart="rolling", network_lr=0.1),
    "neuclip, rolling and masked": lambda: NeuCLIP(
        D, num_prototypes=21, inner_steps=0, restart="rolling", mask_own_positive=True, mask_duplicates=True
    ),
    "neuclip, separate": lambda: NeuCLIP(D, num_prototypes=5, inner_steps=2, fit="separate", network_lr=0.1),
    "neuclip, mlp": lambda: NeuCLIP(D, network="mlp", inner_steps=2),
    "neuclip, simultaneous": lambda: NeuCLIP(D, num_prototypes=11, update="simultaneous"),
    "neuclip, simultaneous mlp": lambda: NeuCLIP(D, network="mlp", update="simultaneous"),
}
REAL = ("clip", "fastclip, individual", "amorlip", "neuclip")  # of each kind of state one
every_method = pytest.mark.parametrize("name", METHODS)


def batch(objective: Objective, step: int, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's features of both sides, sample ids with repeats over time and once within a batch, caption ids."""
    generator = torch.Generator().manual_seed(step)
    images, texts = torch.randn(2, B, INPUT, generator=generator, dtype=torch.float64)
    ids = torch.randperm(N, generator=generator)[:B]
    if step == 2:
        ids[-1] = ids[0]
    own = slice(rank() * B // world_size(), (rank() + 1) * B // world_size())
    image, text = (F.normalize(x[own] @ w, dim=1) for x, w in zip((images, texts), weights, strict=True))
    return (
        image,
        text,
        (ids % objective.dataset_size if isinstance(objective, TableObjective) else ids)[own],
        (ids % 7)[own],
    )


def encoder_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(100)
    return [torch.randn(INPUT, D, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2)]


def run(objective: Objective, steps: range, *, bad: int | None = None, rows: int = 1) -> dict[str, Any]:
    """Losses and gradients, averaged over ranks as DDP does, then state and estimates. In step `bad` the last `rows`
    pairs of the batch hold NaN."""
    weights, results = encoder_weights(), {}
    scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (8.0, -2.0))
    for step in steps:
        image, text, ids, captions = batch(objective, step, weights)
        if step == bad:
            places = torch.arange(len(image)) + rank() * len(image)
            image = image.masked_fill((places >= B - rows)[:, None], math.nan)
        loss = objective(image, text, scale, bias, sample_ids=ids, caption_ids=captions)
        gradients = torch.autograd.grad(loss, [*weights, scale, bias], allow_unused=True, materialize_grads=True)
        for name, value in zip(("loss", "image", "text", "scale", "bias"), (loss, *gradients), strict=True):
            results[f"{name} of step {step}"] = sum_over_ranks(value) / world_size()
        results[f"left out in step {step}"] = objective.metrics["left_out"]
    results["state"] = {key: x.clone() if isinstance(x, Tensor) else x for key, x in objective.state_dict().items()}
    return results | {"estimates": estimates(objective, weights, scale)}


def estimates(objective: Objective, weights: list[Tensor], scale: Tensor) -> Tensor | None:
    """Log-normalizers (B, 2) of a batch, put together from all ranks; None for methods that have none."""
    image, text, ids, _ = batch(objective, 0, weights)
    try:
        local = torch.stack(objective.log_normalizers(image, text, scale, sample_ids=ids), dim=1)
    except NoEstimate:
        return None
    whole = torch.zeros(B, 2, dtype=torch.float64)
    whole[rank() * len(local) : (rank() + 1) * len(local)] = local
    return sum_over_ranks(whole)


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

    def of(name: str) -> dict[str, Any]:
        if name not in found:
            objective = METHODS[name]()
            found[name] = {"whole": run(objective, range(STEPS))}
            found[name]["continued"] = run(objective, range(STEPS, STEPS + MORE))
        return found[name]

    return of


@every_method
def test_any_number_of_ranks_gives_the_losses_gradients_estimates_and_state_of_one(name, alone):
    for ranks in (2, 4):
        for number, got in enumerate(threads(ranks, lambda _: run(METHODS[name](), range(STEPS)))):
            assert_same(got, alone(name)["whole"], f"rank {number} of {ranks}")


@every_method
def test_the_state_of_two_ranks_continues_alike_on_one_and_on_four(name, alone):
    saved = threads(2, lambda _: run(METHODS[name](), range(STEPS)))[1]["state"]

    def work(_: int = 0) -> dict[str, Any]:
        objective = METHODS[name]().double()
        objective.load_state_dict(saved)
        return run(objective, range(STEPS, STEPS + MORE))

    for number, got in enumerate([work(), *threads(4, work)]):
        assert_same(got, alone(name)["continued"], f"run {number}")


@every_method
def test_strips_of_one_row_change_nothing(name, alone, monkeypatch):
    monkeypatch.setattr(pairs, "STRIP", {"cpu": 1})
    monkeypatch.setattr(pairs, "KEPT", 0)
    for got in threads(2, lambda _: run(METHODS[name](), range(STEPS))):
        assert_same(got, alone(name)["whole"], "in strips")


@every_method
@pytest.mark.parametrize("rows", [1, B])
def test_bad_rows_on_some_of_the_ranks_are_told_on_all_and_do_what_they_do_on_one(name, rows):
    want = run(METHODS[name](), range(4), bad=1, rows=rows)
    assert want["left out in step 1"] == rows and math.isnan(want["loss of step 1"])
    assert torch.isfinite(torch.stack([want["loss of step 2"], want["loss of step 3"]])).all()
    for ranks in (2, 4):
        for got in threads(ranks, lambda _: run(METHODS[name](), range(4), bad=1, rows=rows)):
            assert_same(got, want, f"with {rows} bad rows on {ranks} ranks")


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_with_different_batch_sizes_get_an_error_instead_of_hanging_at_the_first_call_and_at_later_ones():
    def work(rank: int) -> tuple[str, str]:
        rows, objective, scale = torch.eye(4), CLIP(), torch.tensor(10.0)
        first = error_of(lambda: CLIP()(rows[: 2 + rank], rows[: 2 + rank], scale))
        objective(rows[:2], rows[:2], scale)
        later = rows[: 2 + rank]  # as the last batch of one rank may be
        return first, error_of(lambda: objective(later, later, scale))

    for first, later in threads(2, work):
        assert "different batch sizes (2, 3)" in first and "different batch sizes (2, 3)" in later


def test_a_wrong_sample_id_on_one_rank_is_an_error_on_all():
    def work(rank: int) -> str:
        rows, ids = torch.eye(4)[:2], torch.tensor([rank, 13 if rank == 3 else rank + 5])
        return error_of(lambda: FastCLIP(13)(rows, rows, torch.tensor(10.0), sample_ids=ids))

    assert all("a sample id is outside 0..12" in found for found in threads(4, work))


class Module(torch.nn.Module):
    """Encoders and objective in one module, as Lightning has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(x.detach()) for x in encoder_weights()])
        self.objective = METHODS["neuclip"]()

    def forward(self, step: int) -> Tensor:
        image, text, ids, _ = batch(self.objective, step, [*self.weights])
        return self.objective(image, text, torch.tensor(8.0, dtype=torch.float64), sample_ids=ids)


def inside_ddp() -> dict[str, Any]:
    """The state, and each parameter's gradient, after some steps of a module that holds the objective."""
    module = Module()
    wrapped = torch.nn.parallel.DistributedDataParallel(module) if world_size() > 1 else module
    for step in range(STEPS):
        wrapped(step).backward()
    return {"state": module.objective.state_dict(), "gradients": {str(k): w.grad for k, w in enumerate(module.weights)}}


def bytes_of_a_step(name: str) -> int:
    """What this rank sends in the forward and backward pass of step 4, as ring collectives send it, without the few
    bytes that are exchanged on the host."""
    objective, weights, sent = METHODS[name](), encoder_weights(), []
    run(objective, range(4))
    image, text, ids, _ = batch(objective, 4, weights)
    others = world_size() - 1

    def counted(send: Callable[..., Any], size: Callable[[Tensor, Tensor], float]) -> Callable[..., Any]:
        def work(first: Tensor, second: Tensor | None = None, **rest: Any) -> Any:
            sent.append(size(first, first if second is None else second))
            return send(first, **rest) if second is None else send(first, second, **rest)

        return work

    with pytest.MonkeyPatch.context() as patch:
        gather = counted(collectives._all_gather, lambda _, rows: others * rows.nbytes)
        scatter = counted(collectives._reduce_scatter, lambda rows, _: others * rows.nbytes)
        reduce = counted(dist.all_reduce, lambda total, _: 2 * others / world_size() * total.nbytes)
        patch.setattr(collectives, "_all_gather", gather)
        patch.setattr(collectives, "_reduce_scatter", scatter)
        patch.setattr(dist, "all_reduce", reduce)
        objective(image, text, torch.tensor(8.0), sample_ids=ids).backward()
    return round(sum(sent))


class Towers(torch.nn.Module):
    """Two encoders, with BatchNorm in one of them, a temperature and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = torch.nn.Sequential(torch.nn.Linear(INPUT, D), torch.nn.BatchNorm1d(D)).double()
        self.text = torch.nn.Linear(INPUT, D).double()
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.logit_bias = torch.nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, ...]:
        features = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        return *features, self.logit_scale.exp(), self.logit_bias


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
    own = slice(rank() * B // world_size(), (rank() + 1) * B // world_size())
    for step in range(2):
        towers.zero_grad()
        inputs = torch.randn(2, B, INPUT, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        objective(*encode(*inputs[:, own]), sample_ids=torch.arange(B)[own]).backward()
    return {"gradients": {name: x.grad for name, x in towers.named_parameters()}, "averages": sum(averages)}


# CLIP leaves the bias out, and an individual temperature the scale: DDP must not wait for them.
LOSSES: dict[str, Callable[[], Objective]] = {
    "siglip": SigLIP,
    "clip": CLIP,
    "fastclip, individual": METHODS["fastclip, individual"],
}


def one_process(folder: str) -> None:
    torch.set_num_threads(1)
    early = FastCLIP(13)  # built before the process group
    dist.init_process_group("gloo")
    found: dict[str, Any] = {name: run(METHODS[name](), range(STEPS)) for name in REAL}
    found["inside DDP"] = inside_ddp()
    found["large batch"] = {name: [large_batch(size, make()) for size in (0, 1, 3)] for name, make in LOSSES.items()}
    found["equal chunks"] = large_batch(2, SigLIP(), train=True)
    found["bytes"] = {name: bytes_of_a_step(name) for name in ("clip", "neuclip", "neuclip, detached", "amorlip")}
    rows = torch.eye(4)[:2]
    early(rows, rows, torch.tensor(10.0), sample_ids=torch.tensor([rank(), rank() + 5]))
    found["rows of the table"] = len(early.table.rows)
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
@pytest.mark.parametrize("name", REAL)
def test_real_processes_do_what_threads_do(name, processes, alone):
    for found in processes:
        assert_same(found[name], alone(name)["whole"], name)


@pytest.mark.slow
def test_inside_a_module_that_ddp_wraps_each_rank_keeps_its_own_block(processes):
    whole = inside_ddp()
    for found in processes:
        assert_same(found["inside DDP"], whole, "DDP")


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_large_batch_on_two_ranks_has_the_gradient_of_the_whole_and_ddp_averages_once_per_step(name, processes):
    whole = large_batch(0, LOSSES[name]())["gradients"]
    for found in processes:
        for chunks in found["large batch"][name]:
            assert_same(chunks["gradients"], whole, name)
            assert chunks["averages"] == 2  # steps


@pytest.mark.slow
def test_batchnorm_normalizes_each_chunk_by_itself_on_any_rank(processes):
    alone, whole = (large_batch(size, SigLIP(), train=True)["gradients"] for size in (2, 0))
    assert not torch.allclose(alone["image.0.weight"], whole["image.0.weight"])
    for found in processes:
        assert_same(found["equal chunks"]["gradients"], alone, "chunks of two")


@pytest.mark.slow
def test_a_table_built_before_the_process_group_is_cut_to_each_ranks_share(processes):
    assert [found["rows of the table"] for found in processes] == [7, 6]


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
