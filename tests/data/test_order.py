"""Orders are pure functions of seed and position: every id once per epoch, or as often as its weight says."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuclip.data.mixture import order_of
from neuclip.data.order import Order, ShardOrder, augmentation_seeds
from tests.builders.data import write_files, write_shards
from tests.builders.reading import open_source, travelled

SEEDS = st.integers(0, 2**63)


def is_permutation(ids: np.ndarray, size: int) -> bool:
    return np.array_equal(np.sort(ids), np.arange(size))


@pytest.mark.parametrize("sizes", [range(1, 301), (4095, 4096, 4097, 100_003)])
def test_every_epoch_is_a_permutation_and_no_two_are_equal(sizes):
    for size in sizes:
        ids = Order(size, seed=3).ids(7 * size, 2 * size)
        assert is_permutation(ids[:size], size) and is_permutation(ids[size:], size), size
        assert size < 9 or not np.array_equal(ids[:size], ids[size:])  # of fewer, two shuffles may be equal by chance
        assert size < 9 or not np.array_equal(ids[:size], Order(size, seed=4).ids(7 * size, size))


@settings(max_examples=60)
@given(st.integers(1, 10**12), SEEDS, st.integers(0, 10**13), st.lists(st.integers(0, 40), max_size=8))
def test_any_number_of_cuts_at_any_sample_leaves_the_order_as_it_is(size, seed, start, parts):
    order = Order(size, seed)
    ends = list(itertools.accumulate(parts, initial=start))
    joined = [id for first, part in zip(ends, parts, strict=False) for id in order.ids(first, part).tolist()]
    assert joined == order.ids(start, sum(parts)).tolist()


def is_uniform(counts: np.ndarray) -> bool:
    expected, freedom = counts.mean(), len(counts) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return chi_square < freedom + 5 * np.sqrt(2 * freedom)  # five standard deviations; nothing is drawn anew


@pytest.mark.parametrize("size", [2, 3, 5, 10, 37, 64])
def test_over_epochs_and_over_seeds_the_first_id_lands_everywhere_equally_often(size):
    epochs = Order(size, seed=0).ids(0, 5000 * size).reshape(5000, size)
    assert is_uniform(np.bincount(np.argmin(epochs, axis=1), minlength=size))
    seeds = [np.argmin(Order(size, seed).ids(0, size)) for seed in range(400)]
    assert is_uniform(np.bincount(seeds, minlength=size))


def test_all_six_orders_of_three_samples_occur_equally_often():
    _, counts = np.unique(Order(3, seed=0).ids(0, 9000).reshape(3000, 3), axis=0, return_counts=True)
    assert len(counts) == 6 and is_uniform(counts)


def test_neighbours_do_not_stay_together():
    ids = Order(100_000, seed=0).ids(0, 100_000)
    assert (np.abs(np.diff(ids)) == 1).sum() < 20  # a random order has 2 on average
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
    shards = [0, 1, 2, 3, 5, 6, 4, 7, 8, 0, 2, 1, 7, 4, 5, 8, 3, 6]
    assert ShardOrder([3, 5, 9], seed=0, together=2).ids(0, 18).tolist() == shards
    seeds = [4300454767375677452, 14012198960796351686]
    assert augmentation_seeds(3, np.array([0, 1]), np.array([5, 5])).tolist() == seeds


def test_augmentation_seeds_differ_by_seed_epoch_and_id():
    ids, epochs = np.arange(1000), np.zeros(1000, dtype=np.int64)
    seeds = [augmentation_seeds(seed, epochs + epoch, ids) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len(np.unique(np.concatenate(seeds))) == 3000


# Remote data: few shards at a time


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum), st.integers(1, 4), st.integers(0, 5), st.data()
)
def test_every_sample_comes_once_per_epoch_from_few_shards_at_a_time(sizes, together, seed, data):
    ends = np.cumsum(sizes)
    order, size = ShardOrder(ends, seed, together), int(ends[-1])
    ids = order.ids(0, 3 * size)
    assert all(is_permutation(epoch, size) for epoch in ids.reshape(3, size))
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
    ends = np.arange(1, 41) * 25
    epochs = ShardOrder(ends, seed=0, together=8).ids(0, 3000).reshape(3, 1000)
    other = ShardOrder(ends, seed=1, together=8).ids(0, 1000)
    for first, second in ((epochs[0], epochs[1]), (epochs[1], epochs[2]), (epochs[0], other)):
        assert (first == second).mean() < 0.05
        assert set((first[:200] // 25).tolist()) != set((second[:200] // 25).tolist())
    assert len(set((epochs[0][:200] // 25).tolist())) == 8  # as many shards as are mixed, in equal parts
    assert np.bincount(epochs[0][:100] // 25).max() <= 25


# Several sources


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=3), SEEDS, st.data())
def test_in_an_epoch_each_sample_appears_as_often_as_its_weight_says_and_never_twice_alike(sizes, seed, data):
    with tempfile.TemporaryDirectory() as folder:
        tables = {f"{k}.csv": "image,caption\n" + "a.png,x\n" * size for k, (size, _) in enumerate(sizes)}
        write_files(Path(folder), {"a.png": "", **tables})
        weighted = [f"{folder}/{k}.csv:{weight}" for k, (_, weight) in enumerate(sizes)]
        order = order_of(open_source(",".join(weighted)), seed)
    expected = np.repeat([weight for _, weight in sizes], [size for size, _ in sizes])
    assert order.size == expected.sum()
    for epoch in range(3):
        assert np.bincount(order.ids(epoch * order.size, order.size)).tolist() == expected.tolist()
    whole = 3 * order.size
    drawn = list(zip(order.ids(0, whole).tolist(), order.epochs(0, whole).tolist(), strict=True))
    assert len(set(drawn)) == whole  # each appearance has a crop and a caption of its own
    first = data.draw(st.integers(0, whole))
    last = data.draw(st.integers(first, whole))
    window = zip(order.ids(first, last - first).tolist(), order.epochs(first, last - first).tolist(), strict=True)
    assert list(window) == drawn[first:last]


def test_without_weights_the_order_is_the_plain_one(tmp_path):
    one, other = (write_shards(tmp_path / name, [size]) for name, size in (("a", 5), ("b", 7)))
    for address, size in ((f"{one},{other}", 12), (str(other), 7)):
        assert order_of(open_source(address), 5).ids(0, 40).tolist() == Order(size, 5).ids(0, 40).tolist()


def test_orders_of_other_shards_sources_and_weights_are_told_apart(tmp_path):
    """By what a checkpoint stores, so that no run continues in another order."""
    one, other = (write_shards(tmp_path / name, [size]) for name, size in (("a", 5), ("b", 7)))
    addresses = (f"{one}:2,{other}", f"{one},{other}:2", f"{one}:2", f"{one},{other}")
    orders = [order_of(open_source(address), 0) for address in addresses]
    orders += [ShardOrder(ends, 0) for ends in ([3, 9], [4, 9], [3, 6, 9])]
    assert len({(order.size, order.description) for order in orders}) == len(orders)
    assert ShardOrder([3, 9], 1).description == ShardOrder([3, 9], 0).description
