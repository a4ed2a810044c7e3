"""Every sample exactly once per epoch, in the same batches to the bit for any workers, ranks, cuts and resumes."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuclip.data.mixture import order_of
from neuclip.data.order import Order
from tests.builders.data import image_bytes, lengths, noisy, several, spawned, write, write_shards, write_tar
from tests.builders.reading import (
    batches,
    captions,
    content,
    failure,
    fingerprint,
    ids_of,
    open_source,
    read_images,
    refusal,
    training,
    travelled,
)

SHARDS = st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any)
RANKS = st.integers(1, 4)
SEEDS = st.integers(0, 2**63)
BATCH = 12  # divides over one to four ranks


@contextmanager
def shards(sizes: list[int]) -> Iterator:
    """Shards of so many pairs each; the k-th pair of all has id k."""
    with tempfile.TemporaryDirectory() as folder:
        yield open_source(write_shards(Path(folder), sizes))


@pytest.fixture
def source(tmp_path):
    return open_source(write_shards(tmp_path / "shards", [5, 1, 9]))


def run(source, seed: int, first: int, steps: int, *, ranks=1, batch_size=BATCH, **options) -> list[int]:
    """The ids that all ranks together see from sample `first` on: step by step, in each rank by rank."""
    options |= {"seed": seed, "first": first, "steps": steps, "batch_size": batch_size, "ranks": ranks}
    shares = [batches(source, rank=rank, **options) for rank in range(ranks)]
    found = []
    for batch in itertools.chain.from_iterable(zip(*shares, strict=True)):
        assert batch.tokens[:, 0].tolist() == batch.ids.tolist() and not batch.faults  # each with its own caption
        found += batch.ids.tolist()
    return found


def same(first, second) -> bool:
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.tokens, b.tokens) and torch.equal(a.ids, b.ids)
        and a.faults == b.faults
        for a, b in zip(first, second, strict=True)
    )  # fmt: skip


# Exactly once


@settings(max_examples=15)
@given(SHARDS, RANKS, SEEDS)
def test_every_sample_comes_exactly_once_per_epoch_in_one_order_for_any_ranks(sizes, ranks, seed):
    with shards(sizes) as source:
        size = len(source)
        ids = run(source, seed, 0, -(-3 * size // BATCH), ranks=ranks)
        assert all(sorted(ids[number * size : (number + 1) * size]) == list(range(size)) for number in range(3))
        assert ids == run(source, seed, 0, -(-3 * size // BATCH)) == Order(size, seed).ids(0, len(ids)).tolist()


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


@settings(max_examples=10)
@given(SHARDS, SEEDS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_workers_share_nothing_so_any_of_them_gives_any_batch_at_any_time(sizes, seed, workers, draw):
    with shards(sizes) as source:
        expected = list(batches(source, seed=seed, batch_size=BATCH, steps=5))
        copies = [travelled(training(source, seed=seed, batch_size=BATCH).windows) for _ in range(workers)]
        for step in draw.sample(range(5), 5):
            assert same([draw.choice(copies)[step * BATCH]], [expected[step]])


@settings(max_examples=3)
@given(SHARDS, st.integers(1, 2), st.integers(1, 2), SEEDS)
def test_any_number_of_worker_processes_sees_the_ids_of_one_process(sizes, workers, ranks, seed):
    with shards(sizes) as source:
        assert run(source, seed, 12, 4, ranks=ranks, workers=workers) == run(source, seed, 12, 4)


def test_a_run_ended_while_its_workers_read_ahead_resumes_on_others_without_loss_or_repetition():
    with shards([3, 4, 2]) as source:
        running = batches(source, seed=2, workers=2, batch_size=BATCH, steps=20)
        seen = ids_of(itertools.islice(running, 3))
        running.close()  # by then the workers have read up to four batches more
        assert seen + run(source, 2, len(seen), 2, ranks=2, workers=1) == run(source, 2, 0, 5)


@pytest.mark.parametrize("size", [1, 3])
def test_one_shard_for_many_workers_and_ranks_neither_hangs_nor_starves(size):
    with shards([size]) as source:
        assert run(source, 1, 2, 2, ranks=2, workers=2) == Order(size, seed=1).ids(2, 2 * BATCH).tolist()


# The same bits


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2},
        pytest.param({"workers": 1, "transform": spawned, "start_method": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_batches_are_equal_to_the_bit_for_any_number_of_workers_however_they_start(source, options):
    expected = list(batches(source, transform=noisy, first=4, steps=7))
    assert same(expected, batches(source, **{"transform": noisy, "first": 4, "steps": 7, **options}))


def test_the_rows_of_all_ranks_are_the_global_batch(source):
    options = {"batch_size": 8, "transform": noisy, "first": 3, "steps": 4}
    shares = [list(batches(source, rank=rank, ranks=4, **options)) for rank in range(4)]
    for step, batch in enumerate(batches(source, **options)):
        assert torch.equal(batch.images, torch.cat([share[step].images for share in shares]))
        assert torch.equal(batch.ids, torch.cat([share[step].ids for share in shares]))
    assert "batch_size 6 or 9" in refusal(lambda: batches(source, batch_size=8, ranks=3))


@settings(max_examples=15)
@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 5), st.integers(0, 5))
def test_a_resumed_run_continues_the_same_batches(first_sample, batch_size, done, left):
    with shards([3, 4]) as source:
        options = {"batch_size": batch_size, "transform": noisy}
        whole = list(batches(source, first=first_sample, steps=done + left, **options))
        resumed = batches(source, first=first_sample + done * batch_size, steps=left, **options)
        assert same(whole[done:], list(resumed))


def test_augmentation_differs_between_epochs_and_seeds(source):
    def image_of_zero(seed, epoch):
        batch = next(batches(source, batch_size=15, transform=noisy, seed=seed, first=epoch * 15))
        return batch.images[batch.ids == 0]

    assert not torch.equal(image_of_zero(0, 0), image_of_zero(0, 1))
    assert not torch.equal(image_of_zero(0, 0), image_of_zero(1, 0))
    assert torch.equal(image_of_zero(1, 2), image_of_zero(1, 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_main_process_random_state_alone(source, workers):
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.get_rng_state(), random.getstate()
    list(batches(source, transform=noisy, workers=workers, steps=2))
    assert torch.equal(torch.get_rng_state(), expected[0]) and random.getstate() == expected[1]


def test_one_of_several_captions_is_chosen_by_epoch_and_evaluation_takes_all(tmp_path):
    members = [("a.png", image_bytes(0)), ("a.json", b'{"caption": ["is 1", "is 2", "is 3"]}')]
    source = open_source(write_tar(tmp_path / "0.tar", members))
    assert {batch.tokens.item() for batch in batches(source, batch_size=1, steps=40)} == {1, 2, 3}
    (batch,) = read_images(source)
    assert batch.captions == (("is 1", "is 2", "is 3"),)


def test_a_mixture_has_dense_ids_over_sources_of_any_kind_and_its_batches_carry_them(tmp_path):
    table, shards = write("csv", tmp_path / "t", several([["a"]] * 7)), write_shards(tmp_path / "shards", [5])
    source = open_source(f"{table}:2,{shards}")
    assert content(source) == content(open_source(table)) + content(open_source(shards))
    assert "pairs.csv row 7" in source.where(6) and "00000.tar: 00000.png" in source.where(7)
    assert content(travelled(source)) == content(source) and fingerprint(travelled(source)) == fingerprint(source)
    for id in (12, -1):
        with pytest.raises(IndexError):
            source[id]
    options = {"batch_size": 19, "transform": noisy, "tokens": lengths, "steps": 2}
    found = list(batches(source, order=order_of(source, 0), **options))
    ids = [batch.ids.tolist() for batch in found]
    assert Counter(ids[0]) == Counter({id: 2 if id < 7 else 1 for id in range(12)}) and ids[0] != ids[1]
    twice = [found[0].images[place] for place, id in enumerate(ids[0]) if id == 0]
    assert not twice[0].equal(twice[1])  # the two appearances are cropped differently


def test_a_killed_worker_is_one_line_where_the_batch_is_read_and_nowhere_else(source):
    running = batches(source, workers=1, steps=50)
    next(running)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    wait([worker.sentinel])  # torch would raise here, or wherever else the main process is
    assert "a data worker was killed" in failure(lambda: list(running))


# Evaluation


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_id_or_a_share_of_them_once_in_order(source, workers):
    found = list(read_images(source, workers=workers))
    assert ids_of(found) == list(range(15)) and [len(batch.ids) for batch in found] == [4, 4, 4, 3]
    assert [texts for batch in found for texts in batch.captions] == captions(source)
    digests = [hashlib.blake2b(image, digest_size=16).digest() for image, _ in content(source)]
    assert [digest for batch in found for digest in batch.digests] == digests
    found = read_images(source, workers=workers, ids=range(4, 11))
    assert [batch.ids.tolist() for batch in found] == [[4, 5, 6, 7], [8, 9, 10]]
    assert list(read_images(source, workers=workers, ids=range(8, 8))) == []
