"""One, two and four real processes: FastCLIP's losses, gradients and table are the same on any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing
from torch import distributed as dist

from neuclip import FastCLIP
from neuclip.distributed.collectives import rank, single_process, world_size

pytestmark = pytest.mark.slow

B, INPUT, D, STEPS, SAVED_AFTER = 8, 5, 4, 5, 3
# 13 samples divide by neither 2 nor 4; with 3 samples some process of four owns none, and ids repeat in each batch.
CASES = [("v3", 13), ("v3", 3), ("v2", 13), ("isogclr", 3), ("sogclr", 13)]


class Trial:
    """Some steps of one case, of which this process sees its rows; every process draws the same data."""

    def __init__(self, variant: str, size: int, folder: Path):
        generator = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(STEPS, 2, B, INPUT, generator=generator, dtype=torch.float64)
        self.ids = torch.randint(size, (STEPS, B), generator=generator)
        self.weights = [torch.randn(INPUT, D, generator=generator, dtype=torch.float64) for _ in range(2)]
        self.scale = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
        path = folder / f"table-{variant}-{size}" if variant == "sogclr" else None  # one of them in files
        settings = {"gamma": 0.3, "gamma_decay_samples": 30, "temperature_initial": 0.05}
        self.objective = FastCLIP(size, variant=variant, table_path=path, **settings)
        for weight in self.weights:
            weight.requires_grad_()

    def features(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        local = B // world_size()
        mine = slice(rank() * local, (rank() + 1) * local)
        image, text = (F.normalize(x[mine] @ w, dim=1) for x, w in zip(self.inputs[step], self.weights, strict=True))
        return image, text, self.ids[step][mine]

    def steps(self, which: range) -> list[Tensor]:
        """The mean over processes of losses and gradients."""
        found = []
        for step in which:
            image, text, ids = self.features(step)
            loss = self.objective(image, text, self.scale, sample_ids=ids)
            found += [loss.detach(), *torch.autograd.grad(loss, [*self.weights, self.scale])]
        if world_size() > 1:
            for value in found:
                dist.all_reduce(value)
                value /= world_size()
        return found


def whole_trial(case: tuple[str, int], folder: Path) -> dict[str, Any]:
    trial = Trial(*case, folder)
    found: dict[str, Any] = {"values": trial.steps(range(SAVED_AFTER)), "state": trial.objective.state_dict()}
    found["values"] += trial.steps(range(SAVED_AFTER, STEPS))
    found["last_state"] = trial.objective.state_dict()
    if trial.objective.individual is None:
        image, text, ids = trial.features(0)
        found["estimates"] = torch.stack(trial.objective.log_normalizers(image, text, trial.scale, sample_ids=ids), 1)
    return found


def continued_trial(case: tuple[str, int], folder: Path, state: Any) -> dict[str, Any]:
    trial = Trial(*case, folder)
    trial.objective.load_state_dict(state)
    return {"values": trial.steps(range(SAVED_AFTER, STEPS)), "last_state": trial.objective.state_dict()}


def one_process(process: int, processes: int, folder: str, saved: str | None) -> None:
    torch.set_num_threads(1)
    made_before = FastCLIP(13)  # processes may meet after the objective was made
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=process, world_size=processes)
    results: dict[str, Any] = {}
    for case in CASES:
        results[str(case)] = whole_trial(case, Path(folder))
        if saved is not None:
            state = torch.load(saved, weights_only=True)[str(case)]["state"]
            results[f"continued {case}"] = continued_trial(case, Path(folder), state)
    image, text, ids = Trial("v3", 13, Path(folder)).features(0)
    made_before(image, text, torch.tensor(10.0), sample_ids=ids)
    results["rows"] = len(made_before.table._rows)
    with single_process(), pytest.raises(RuntimeError, match="another number of processes"):
        made_before.log_normalizers(image, text, torch.tensor(10.0), sample_ids=ids)
    wrong = torch.full_like(ids, 13) if process == processes - 1 else ids  # of one process; all must hear of it
    with pytest.raises(ValueError, match=r"sample id 13 is outside 0\.\.12"):
        made_before(image, text, torch.tensor(10.0), sample_ids=wrong)
    state = made_before.state_dict()
    with single_process():
        made_before.load_state_dict(state)
        found = made_before.log_normalizers(image, text, torch.tensor(10.0), sample_ids=ids)
    assert not torch.stack(found).isnan().any()
    torch.save(results, Path(folder) / f"{process}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """By number of processes, what each process found. Four continue from what two saved, too."""
    results, saved = {}, None
    for processes in (2, 4):
        folder = tmp_path_factory.mktemp(f"processes-{processes}")
        multiprocessing.spawn(one_process, args=(processes, str(folder), saved), nprocs=processes)
        results[processes] = [torch.load(folder / f"{k}.pt", weights_only=True) for k in range(processes)]
        saved = str(folder / "0.pt")
    return results


def same(got: Any, want: Any) -> bool:
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(same(got[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(same(a, b) for a, b in zip(got, want, strict=True))
    if isinstance(want, Tensor):
        return torch.allclose(got, want, rtol=1e-10, atol=1e-12, equal_nan=True)
    return got == want


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_gives_the_losses_gradients_and_state_of_one(case, processes, found, tmp_path):
    want = whole_trial(case, tmp_path)
    estimates = want.pop("estimates", None)
    for process in range(processes):
        got = dict(found[processes][process][str(case)])
        mine = got.pop("estimates", None)
        assert same(got, want)
        if estimates is not None:
            assert same(mine, estimates.chunk(processes)[process])


@pytest.mark.parametrize("case", CASES)
def test_state_saved_on_two_processes_continues_alike_on_one_and_on_four(case, found, tmp_path):
    whole = whole_trial(case, tmp_path)
    want = {"values": whole["values"][4 * SAVED_AFTER :], "last_state": whole["last_state"]}
    assert same(continued_trial(case, tmp_path, found[2][0][str(case)]["state"]), want)
    for process in range(4):
        assert same(found[4][process][f"continued {case}"], want)


def test_each_process_keeps_its_share_only(found):
    assert [process["rows"] for process in found[2]] == [7, 6]
    assert [process["rows"] for process in found[4]] == [4, 3, 3, 3]
