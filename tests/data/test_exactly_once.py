"""An epoch is an epoch: every sample exactly once, on any workers and ranks, over any cut and resume."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from neuclip.data.sample import Batch
from PIL import Image

from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import Order
from neuclip.data.source import Source
from tests.data.small_shards import Member, write_tar
from tests.data.small_shards import pair as drawn_pair

SHARDS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
RANKS = st.integers(1, 4)
SEEDS = st.integers(0, 2**63)
BATCH = 12  # divides over one to four ranks


@cache
def pair(number: int) -> list[Member]:
    return drawn_pair(number)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB").resize((2, 2)))).permute(2, 0, 1)


def tokens(captions: list[str]) -> torch.Tensor:
    """The number that the caption ends with: pair k is "image k"."""
    return torch.tensor([[int(caption.split()[-1])] for caption in captions])


@contextmanager
def shards(sizes: list[int]) -> Iterator[Source]:
    """Shards of so many pairs each; the k-th pair of all has id k."""
    numbers = iter(range(sum(sizes)))
    with tempfile.TemporaryDirectory() as folder:
        for shard, size in enumerate(sizes):
            members = [member for number in itertools.islice(numbers, size) for member in pair(number)]
            write_tar(Path(folder) / f"{shard:05d}.tar", members)
        yield open_source(folder)


def batches_of(source: Source, seed: int, *, batch_size=BATCH, rank=0, ranks=1, workers=0) -> Batches:
    return Batches(
        source, Order(len(source), seed), batch_size=batch_size, transform=pixels, tokenize=tokens, seed=seed,
        workers=workers, rank=rank, ranks=ranks,
    )  # fmt: skip


def ids_of(shares: list[list[Batch]]) -> list[int]:
    """The ids of all ranks as the global batches have them: step by step, in each rank by rank."""
    found = []
    for batch in itertools.chain.from_iterable(zip(*shares, strict=True)):
        assert batch.tokens[:, 0].tolist() == batch.ids.tolist() and not batch.faults  # each with its own caption
        found += batch.ids.tolist()
    return found


def run(source: Source, seed: int, first: int, steps: int, *, ranks=1, **options) -> list[int]:
    """The ids that all ranks together see from sample `first` on."""
    return ids_of(
        [list(batches_of(source, seed, rank=r, ranks=ranks, **options).steps(first, steps)) for r in range(ranks)]
    )


@settings(max_examples=25)
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


@settings(max_examples=25)
@given(SHARDS, RANKS, RANKS, SEEDS, st.integers(0, 4), st.integers(0, 3), st.sampled_from([12, 24]))
def test_a_run_that_is_cut_and_resumed_on_other_ranks_sees_the_ids_of_an_uninterrupted_one(
    sizes, ranks, ranks_after, seed, done, left, batch_after
):
    with shards(sizes) as source:
        before = run(source, seed, 0, done, ranks=ranks)
        after = run(source, seed, len(before), left, ranks=ranks_after, batch_size=batch_after)
        assert len(before + after) == done * BATCH + left * batch_after
        assert before + after == Order(len(source), seed).ids(0, len(before + after)).tolist()


@settings(max_examples=100)
@given(st.integers(1, 10**12), SEEDS, st.integers(0, 10**13), st.lists(st.integers(0, 40), max_size=8))
def test_any_number_of_cuts_at_any_sample_leaves_the_order_as_it_is(size, seed, start, parts):
    order = Order(size, seed)
    ends = list(itertools.accumulate(parts, initial=start))
    joined = [id for first, part in zip(ends, parts, strict=False) for id in order.ids(first, part).tolist()]
    assert joined == order.ids(start, sum(parts)).tolist()


@settings(max_examples=15)
@given(SHARDS, SEEDS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_workers_share_nothing_so_any_of_them_gives_any_batch_at_any_time(sizes, seed, workers, draw):
    with shards(sizes) as source:
        expected = list(batches_of(source, seed).steps(0, 5))
        windows = batches_of(source, seed).windows
        copies = [pickle.loads(pickle.dumps(windows)) for _ in range(workers)]
        for step in draw.sample(range(5), 5):
            batch = draw.choice(copies)[step * BATCH]
            assert torch.equal(batch.ids, expected[step].ids) and torch.equal(batch.images, expected[step].images)


def test_the_last_batch_of_an_epoch_is_filled_up_from_the_next_epoch():
    with shards([7, 3]) as source:
        batches = [batch.ids.tolist() for batch in batches_of(source, seed=5, batch_size=4).steps(0, 5)]
        assert [len(batch) for batch in batches] == [4] * 5  # two epochs of ten: none short, none dropped
        first, second = Order(10, seed=5).ids(0, 10).tolist(), Order(10, seed=5).ids(10, 10).tolist()
        assert batches[2] == first[8:] + second[:2]
        assert list(itertools.chain(*batches)) == first + second


@settings(max_examples=8)
@given(SHARDS, st.integers(0, 4), RANKS, SEEDS)
def test_any_number_of_worker_processes_sees_the_ids_of_one_process(sizes, workers, ranks, seed):
    with shards(sizes) as source:
        assert run(source, seed, 12, 4, ranks=ranks, workers=workers) == run(source, seed, 12, 4)


def test_a_run_ended_while_its_workers_read_ahead_resumes_on_others_without_loss_or_repetition():
    with shards([3, 4, 2]) as source:
        running = batches_of(source, seed=2, workers=2).steps(0, 20)
        seen = [id for batch in itertools.islice(running, 3) for id in batch.ids.tolist()]
        running.close()  # by then the workers have read up to four batches more
        resumed = run(source, 2, len(seen), 2, ranks=2, workers=1)
        assert seen + resumed == run(source, 2, 0, 5)


def test_one_shard_for_many_workers_and_ranks_neither_hangs_nor_starves():
    with shards([3]) as source:
        for ranks in (1, 4):
            ids = run(source, 1, 0, 2, ranks=ranks, workers=4)
            assert ids == Order(3, seed=1).ids(0, 2 * BATCH).tolist()
