"""The numbers that follow from the settings."""

from __future__ import annotations

import pytest

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
