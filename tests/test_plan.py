"""The numbers that follow from the settings, and what the machine allows."""

from __future__ import annotations

import os

import pytest
import torch

from neuclip.errors import UserError
from neuclip.machine import choose_device, choose_precision, set_threads
from neuclip.plan import Plan, chunk_count, limit_epochs, warmup_steps
from neuclip.settings.reading import read_settings


@pytest.mark.parametrize(("warmup", "steps"), [(0.05, 50), (0.0, 0), (1, 1), (500, 500)])
def test_warm_up_is_a_share_below_one_and_a_count_from_one_on(warmup, steps):
    assert warmup_steps(warmup, 1000) == steps


@pytest.mark.parametrize(("pairs", "micro_batch", "chunks"), [(128, 48, 3), (128, 0, 1), (128, 500, 1), (3, 2, 2)])
def test_a_batch_is_cut_into_the_fewest_chunks_that_fit(pairs, micro_batch, chunks):
    assert chunk_count(pairs, micro_batch) == chunks


def test_a_plan_counts_whole_batches_and_shares_them_over_ranks():
    sizes = ["--train.samples", "1000", "--train.batch_size", "64", "--train.micro_batch_size", "12"]
    plan = Plan.of(read_settings(None, [*sizes, "--optimizer.warmup", "0.2"]), ranks=2)
    assert (plan.steps, plan.samples, plan.warmup_steps) == (15, 960, 3)
    assert (plan.local_batch, plan.micro_batch, plan.chunks, plan.smallest_chunk) == (32, 12, 3, 10)


def test_epochs_limit_the_samples_and_never_raise_them():
    settings = read_settings(None, ["--train.epochs", "8", "--train.samples", "300k", "--train.batch_size", "64"])
    assert limit_epochs(settings, 1_000).train.samples == 8_000
    assert limit_epochs(settings, 5).train.samples == 64  # one batch
    assert limit_epochs(settings, 100_000) == settings


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_or_precision_that_is_not_here_is_refused_with_what_is():
    with pytest.raises(UserError, match=r"run\.device cuda is not available here; give --run\.device .*cpu, or auto"):
        choose_device("cuda")
    cpu = torch.device("cpu")
    assert choose_precision("auto", cpu) == torch.float32 and choose_precision("bf16", cpu) == torch.bfloat16
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        choose_precision("fp16", cpu)


@pytest.mark.parametrize(("threads", "ranks", "variable", "chosen"), [(3, 1, "1", 3), (0, 2, "1", 4), (0, 2, "5", 1)])
def test_ranks_of_one_machine_share_its_cores_unless_a_number_is_given(monkeypatch, threads, ranks, variable, chosen):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    set_threads(threads, torch.device("cpu"))
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == chosen
