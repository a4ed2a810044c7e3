"""An epoch is an epoch: every sample exactly once, on any workers and ranks, over any cut and resume."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.data import Member, Order, batches, open_source, travelled, windows, write_tar
from tests.builders.data import pair as drawn_pair

SHARDS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
RANKS = st.integers(1, 4)
SEEDS = st.integers(0, 2**63)
BATCH = 12  # divides over one to four ranks


@cache
def pair(number: int) -> list[Member]:
    return drawn_pair(number)


@contextmanager
def shards(sizes: list[int]) -> Iterator:
    """Shards of so many pairs each; the k-th pair of all has id k."""
    numbers = iter(range(sum(sizes)))
    with tempfile.TemporaryDirectory() as folder:
        for shard, size in enumerate(sizes):
            members = [member for number in itertools.islice(numbers, size) for member in pair(number)]
            write_tar(Path(folder) / f"{shard:05d}.tar", members)
        yield open_source(folder)


def run(source, seed: int, first: int, steps: int, *, ranks=1, batch_size=BATCH, **options) -> list[int]:
    """The ids that all ranks together see from sample `first` on: step by step, in each rank by rank."""
    options |= {"seed": seed, "first": first, "steps": steps, "batch_size": batch_size, "ranks": ranks}
    shares = [batches(source, rank=rank, **options) for rank in range(ranks)]
    found = []
    for batch in itertools.chain.from_iterable(zip(*shares, strict=True)):
        assert batch.tokens[:, 0].tolist() == batch.ids.tolist() and not batch.faults  # each with its own caption
        found += batch.ids.tolist()
    return found


@settings(max_examples=15)
@given(SHARDS, RANKS, SEEDS)
def test_every_sample_comes_exactly_once_per_epoch_and_equal_seeds_give_equal_order(sizes, ranks, seed):
    with shards(sizes) as source:
        size = len(source)
        ids = run(source, seed, 0, -(-3 * size // BATCH), ranks=ranks)
        epochs = [ids[number * size : (number + 1) * size] for number in range(3)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert size < 9 or epochs[0] != epochs[1] != epochs[2]  # of fewer, two shuffles may be equal by chance
        assert ids == run(source, seed, 0, -(-3 * size // BATCH)), "one rank sees another order"
        assert size < 9 or ids[:size] != Order(size, seed + 1).ids(0, size).tolist()


@settings(max_examples=15)
@given(SHARDS, RANKS, RANKS, SEEDS, st.integers(0, 4), st.integers(0, 3), st.sampled_from([12, 24]))
def test_a_run_that_is_cut_and_resumed_on_other_ranks_sees_the_ids_of_an_uninterrupted_one(
    sizes, ranks, ranks_after, seed, done, left, batch_after
):
    with shards(sizes) as source:
        before = run(source, seed, 0, done, ranks=ranks)
        after = run(source, seed, len(before), left, ranks=ranks_after, batch_size=batch_after)
        assert len(before + after) == done * BATCH + left * batch_after
        assert before + after == Order(len(source), seed).ids(0, len(before + after)).tolist()


@settings(max_examples=60)
@given(st.integers(1, 10**12), SEEDS, st.integers(0, 10**13), st.lists(st.integers(0, 40), max_size=8))
def test_any_number_of_cuts_at_any_sample_leaves_the_order_as_it_is(size, seed, start, parts):
    order = Order(size, seed)
    ends = list(itertools.accumulate(parts, initial=start))
    joined = [id for first, part in zip(ends, parts, strict=False) for id in order.ids(first, part).tolist()]
    assert joined == order.ids(start, sum(parts)).tolist()


@settings(max_examples=10)
@given(SHARDS, SEEDS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_workers_share_nothing_so_any_of_them_gives_any_batch_at_any_time(sizes, seed, workers, draw):
    with shards(sizes) as source:
        expected = list(batches(source, seed=seed, batch_size=BATCH, steps=5))
        copies = [travelled(windows(source, seed=seed, batch_size=BATCH)) for _ in range(workers)]
        for step in draw.sample(range(5), 5):
            batch = draw.choice(copies)[step * BATCH]
            assert torch.equal(batch.ids, expected[step].ids) and torch.equal(batch.images, expected[step].images)


def test_the_last_batch_of_an_epoch_is_filled_up_from_the_next_epoch():
    with shards([7, 3]) as source:
        found = [batch.ids.tolist() for batch in batches(source, seed=5, batch_size=4, steps=5)]
        assert [len(batch) for batch in found] == [4] * 5  # two epochs of ten: none short, none dropped
        first, second = Order(10, seed=5).ids(0, 10).tolist(), Order(10, seed=5).ids(10, 10).tolist()
        assert found[2] == first[8:] + second[:2]
        assert list(itertools.chain(*found)) == first + second


@settings(max_examples=3)
@given(SHARDS, st.integers(1, 2), st.integers(1, 2), SEEDS)
def test_any_number_of_worker_processes_sees_the_ids_of_one_process(sizes, workers, ranks, seed):
    with shards(sizes) as source:
        assert run(source, seed, 12, 4, ranks=ranks, workers=workers) == run(source, seed, 12, 4)


def test_a_run_ended_while_its_workers_read_ahead_resumes_on_others_without_loss_or_repetition():
    with shards([3, 4, 2]) as source:
        running = batches(source, seed=2, workers=2, batch_size=BATCH, steps=20)
        seen = [id for batch in itertools.islice(running, 3) for id in batch.ids.tolist()]
        running.close()  # by then the workers have read up to four batches more
        resumed = run(source, 2, len(seen), 2, ranks=2, workers=1)
        assert seen + resumed == run(source, 2, 0, 5)


def test_one_shard_for_many_workers_and_ranks_neither_hangs_nor_starves():
    with shards([3]) as source:
        assert run(source, 1, 0, 2, ranks=2, workers=2) == Order(3, seed=1).ids(0, 2 * BATCH).tolist()
