"""Orders are pure functions: every id once per epoch, any window at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.data import Order, ShardOrder, augmentation_seeds, travelled


def is_permutation(ids: np.ndarray, size: int) -> bool:
    return np.array_equal(np.sort(ids), np.arange(size))


def test_every_epoch_of_every_small_size_is_a_permutation():
    for size in range(1, 301):
        ids = Order(size, seed=3).ids(0, 2 * size)
        assert is_permutation(ids[:size], size) and is_permutation(ids[size:], size), size


@pytest.mark.parametrize("size", [4095, 4096, 4097, 100_003])
def test_an_epoch_of_a_large_size_is_a_permutation(size):
    assert is_permutation(Order(size, seed=1).ids(7 * size, size), size)


def test_epochs_differ_and_seeds_differ():
    first = Order(1000, seed=0)
    assert not np.array_equal(first.ids(0, 1000), first.ids(1000, 1000))
    assert not np.array_equal(first.ids(0, 1000), Order(1000, seed=1).ids(0, 1000))


def is_uniform(places: np.ndarray, size: int) -> bool:
    expected = len(places) / size
    chi_square = ((np.bincount(places, minlength=size) - expected) ** 2 / expected).sum()
    return chi_square < (size - 1) + 5 * np.sqrt(2 * (size - 1))  # five standard deviations; nothing is drawn anew


@pytest.mark.parametrize("size", [2, 3, 5, 10, 37, 64])
def test_over_epochs_the_first_id_lands_everywhere_equally_often(size):
    epochs = Order(size, seed=0).ids(0, 5000 * size).reshape(5000, size)
    assert is_uniform(np.argmin(epochs, axis=1), size)


@pytest.mark.parametrize("size", [5, 37])
def test_over_seeds_the_first_id_lands_everywhere_equally_often(size):
    assert is_uniform(np.array([np.argmin(Order(size, seed).ids(0, size)) for seed in range(400)]), size)


def test_all_six_orders_of_three_samples_occur_equally_often():
    orders = [tuple(epoch) for epoch in Order(3, seed=0).ids(0, 9000).reshape(3000, 3).tolist()]
    counts = np.array([orders.count(order) for order in sorted(set(orders))])
    assert len(counts) == 6
    assert ((counts - 500) ** 2 / 500).sum() < 5 + 5 * np.sqrt(10)


def test_neighbours_do_not_stay_together():
    ids = Order(100_000, seed=0).ids(0, 100_000)
    steps = np.abs(np.diff(ids))
    assert (steps == 1).sum() < 20  # a random order has 2 on average
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02


def test_a_window_of_a_billion_samples_is_had_at_once():
    order = Order(10**9, seed=0)
    ids = order.ids(3 * 10**9 - 500, 1000)
    assert ids.min() >= 0 and ids.max() < 10**9
    assert len(set(ids[:500].tolist())) == len(set(ids[500:].tolist())) == 500
    assert order.epochs(3 * 10**9 - 500, 1000).tolist() == [2] * 500 + [3] * 500


def test_the_order_of_a_seed_never_changes():
    """Runs that were begun with an earlier version continue in it."""
    assert Order(10, seed=0).ids(0, 20).tolist() == [4, 5, 8, 0, 6, 1, 2, 7, 3, 9, 8, 4, 7, 5, 3, 2, 1, 6, 9, 0]
    assert Order(10**12, seed=2**63).ids(5 * 10**12, 3).tolist() == [419768991567, 813977303008, 413359593542]
    assert ShardOrder([3, 5, 9], seed=0, together=2).ids(0, 18).tolist() == [
        0,
        1,
        2,
        3,
        5,
        6,
        4,
        7,
        8,
        0,
        2,
        1,
        7,
        4,
        5,
        8,
        3,
        6,
    ]
    assert augmentation_seeds(3, np.array([0, 1]), np.array([5, 5])).tolist() == [
        4300454767375677452,
        14012198960796351686,
    ]


def test_augmentation_seeds_differ_by_seed_epoch_and_id():
    ids, epochs = np.arange(1000), np.zeros(1000, dtype=np.int64)
    seeds = [
        augmentation_seeds(0, epochs, ids),
        augmentation_seeds(0, epochs + 1, ids),
        augmentation_seeds(1, epochs, ids),
    ]
    assert len(np.unique(np.concatenate(seeds))) == 3000


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum), st.integers(1, 4), st.integers(0, 5), st.data()
)
def test_every_sample_comes_once_per_epoch_from_few_shards_at_a_time(sizes, together, seed, data):
    ends = np.cumsum(sizes)
    order, size = ShardOrder(ends, seed, together), int(ends[-1])
    ids = order.ids(0, 3 * size)
    for epoch in range(3):
        assert sorted(ids[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    start = data.draw(st.integers(0, 3 * size))
    count = data.draw(st.integers(0, 3 * size - start))
    fresh = travelled(ShardOrder(ends, seed, together))
    assert np.array_equal(fresh.ids(start, count), ids[start : start + count])
    position = 0
    while position < 3 * size:
        group = order.group_at(position)
        shards = np.searchsorted(ends, ids[position : position + group.size], side="right")
        assert group.size and len(group.shards) <= together and set(shards) <= set(group.shards.tolist())
        position += group.size
        wanted = [*group.shards.tolist(), *order.group_at(position).shards.tolist()]
        assert order.shards_ahead(position - 1) == list(dict.fromkeys(wanted))  # fetched now, and next


def test_seeds_and_epochs_of_remote_data_differ_in_shards_and_in_samples():
    order = ShardOrder(np.arange(1, 41) * 25, seed=0, together=8)
    epochs = order.ids(0, 3000).reshape(3, 1000)
    other = ShardOrder(np.arange(1, 41) * 25, seed=1, together=8).ids(0, 1000)
    for first, second in ((epochs[0], epochs[1]), (epochs[1], epochs[2]), (epochs[0], other)):
        assert (first == second).mean() < 0.05
        assert set((first[:200] // 25).tolist()) != set((second[:200] // 25).tolist())
    assert len(set((epochs[0][:200] // 25).tolist())) == 8  # as many shards as are mixed, in equal parts
    assert np.bincount(epochs[0][:100] // 25).max() <= 25
