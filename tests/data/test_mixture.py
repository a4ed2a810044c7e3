"""Several sources as one: dense ids over all, and weights that mean appearances per epoch."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neuclip.data.fingerprint import fingerprint

from neuclip.data import mixture
from neuclip.data.loader import Batches
from neuclip.data.mixture import MixtureOrder
from neuclip.data.open import open_source
from neuclip.data.order import Order
from neuclip.errors import UserError
from tests.data.small_transforms import noisy
from tests.images import write_csv, write_shards

WEIGHTS = st.fractions(min_value=Fraction(1, 10), max_value=3, max_denominator=10)
PARTS = st.lists(st.tuples(st.integers(1, 40), WEIGHTS), min_size=1, max_size=4)


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption)] for caption in captions])


def rounded(size: int, weight: Fraction) -> int:
    """The definition, in other words: the nearest whole number of appearances, halves upwards."""
    return int(weight * size * 2 + 1) // 2


def mixed(parts: list[tuple[int, Fraction]], seed: int) -> MixtureOrder:
    return MixtureOrder([Order(size, seed + n) for n, (size, _) in enumerate(parts)], [w for _, w in parts], seed)


@pytest.fixture(params=[3, mixture.STRETCH], ids=["short stretches", "long stretches"])
def stretch(request, monkeypatch):
    monkeypatch.setattr(mixture, "STRETCH", request.param)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARTS, st.integers(0, 2**40))
def test_an_epoch_holds_each_source_as_often_as_its_weight_says(stretch, parts, seed):
    appearances = [rounded(size, weight) for size, weight in parts]
    if sum(appearances) == 0:
        return
    order = mixed(parts, seed)
    assert order.size == sum(appearances)
    owner = np.repeat(np.arange(len(parts)), [size for size, _ in parts])
    total = np.zeros(len(owner), dtype=int)
    for epoch in range(5):
        ids = order.ids(epoch * order.size, order.size)
        assert np.bincount(owner[ids], minlength=len(parts)).tolist() == appearances
        counts = np.bincount(ids, minlength=len(owner))
        total += counts
        for number, (_, weight) in enumerate(parts):
            if weight.denominator == 1:
                assert set(counts[owner == number]) == {int(weight)}
            assert np.ptp(total[owner == number]) <= 1  # nobody is ever more than one appearance ahead


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARTS, st.integers(0, 100), st.integers(0, 300), st.integers(1, 40))
def test_a_window_is_the_same_however_it_is_cut(stretch, parts, seed, start, count):
    if sum(rounded(size, weight) for size, weight in parts) == 0:
        return
    order, again = mixed(parts, seed), mixed(parts, seed)
    positions = range(start, start + count)
    assert order.ids(start, count).tolist() == [int(again.ids(position, 1)[0]) for position in positions]
    assert order.epochs(start, count).tolist() == [int(again.epochs(position, 1)[0]) for position in positions]


def test_in_any_stretch_each_source_has_its_share_in_no_fixed_pattern():
    sizes = [200_000, 50_000, 1_000]
    order = mixed([(size, Fraction(1)) for size in sizes], seed=2)
    owner = np.repeat(np.arange(3), sizes)[order.ids(0, order.size)]
    for begin in range(0, order.size - 20_000, 20_000):
        found = np.bincount(owner[begin : begin + 20_000], minlength=3)
        assert np.abs(found - 20_000 * np.array(sizes) / order.size).max() < 120  # of a shuffle of all: within 200
    runs = np.diff(np.flatnonzero(np.diff(owner[:4000])))
    assert {1, 2, 3, 4, 5} <= set(runs.tolist())


def test_sixty_sources_of_one_large_and_many_small_ones_still_add_up():
    order = mixed([(20_000, Fraction(1)), *[(7, Fraction(1))] * 60], seed=0)
    assert sorted(order.ids(0, order.size).tolist()) == list(range(20_420))


def test_sources_of_equal_size_are_not_shuffled_alike(tmp_path):
    first, second = write_csv(tmp_path / "a", 50), write_csv(tmp_path / "b", 50)
    ids = open_source(f"{first}:2,{second}:2").order(0).ids(0, 200)
    assert (ids[ids < 50][:50] == ids[ids >= 50][:50] - 50).mean() < 0.2


def test_weight_one_half_shows_every_sample_once_in_two_epochs():
    order = mixed([(30, Fraction(1, 2))], seed=3)
    assert sorted(order.ids(0, 30).tolist()) == list(range(30))
    assert set(order.ids(0, 15).tolist()) != set(mixed([(30, Fraction(1, 2))], 4).ids(0, 15).tolist())


def test_each_appearance_of_a_sample_is_augmented_differently():
    order = mixed([(4, Fraction(5, 2)), (3, Fraction(1))], seed=0)
    visits = list(zip(order.ids(0, 3 * order.size).tolist(), order.epochs(0, 3 * order.size).tolist(), strict=True))
    assert len(set(visits)) == len(visits)
    plain = [epoch for id, epoch in visits if id >= 4]
    assert plain == sorted(plain) and set(plain) == {0, 1, 2}  # weight 1: the epoch itself


def test_a_mixture_has_dense_ids_over_sources_of_any_kind(tmp_path):
    shards, table = write_shards(tmp_path / "shards", 5), write_csv(tmp_path / "table", 7)
    source = open_source(f"{table}:2,{shards}")
    assert len(source) == 12 and source.order(0).size == 19
    assert source.captions() == open_source(str(table)).captions() + open_source(str(shards)).captions()
    assert [source[id].captions[0] for id in range(12)] == source.captions()
    assert "pairs.csv row 7" in source.where(6) and "00000.tar: 000000.png" in source.where(7)
    assert fingerprint(pickle.loads(pickle.dumps(source))) == fingerprint(source)
    with pytest.raises(IndexError):
        source[12]


@pytest.mark.parametrize("kept", [0, 20, 1 << 20])
def test_the_fingerprint_is_that_of_all_captions_at_once_however_many_are_held(tmp_path, monkeypatch, kept):
    monkeypatch.setattr("neuclip.data.fingerprint.KEPT_BYTES", kept)
    shards, table = write_shards(tmp_path / "shards", 5), write_csv(tmp_path / "table", 7)
    odd = tmp_path / "odd.tar"
    with tarfile.open(odd, "w") as tar:
        for name, content in (
            ("a.png", b"x"),
            ("a.txt", b"\0 zeros \0"),
            ("b.png", b"x"),
            ("b.txt", b"gr\xc3\xb6\xc3\x9fe"),
        ):
            information = tarfile.TarInfo(name)
            information.size = len(content)
            tar.addfile(information, io.BytesIO(content))
    for address in (str(odd), f"{table}:2,{shards},{odd}"):
        source = open_source(address)
        captions = [caption.encode() for caption in source.captions()]
        lengths = np.array([len(caption) for caption in captions], dtype="<i8").tobytes()
        expected = hashlib.sha256(lengths + b"".join(captions)).hexdigest()
        assert fingerprint(source) == {"count": len(captions), "sha256": expected}


def test_the_fingerprint_of_shards_makes_no_list_of_all_captions(tmp_path, monkeypatch):
    shards, table = write_shards(tmp_path / "shards", 5), write_shards(tmp_path / "more", 3)
    source = open_source(f"{shards}:2,{table}")
    monkeypatch.setattr("neuclip.data.tar.source.TarSource.captions", None)
    assert fingerprint(source)["count"] == 8


def test_without_weights_the_order_is_the_plain_one(tmp_path):
    shards, table = write_shards(tmp_path / "shards", 5), write_csv(tmp_path / "table", 7)
    for address in (f"{table},{shards}", str(table)):
        order = open_source(address).order(5)
        assert order.ids(0, 40).tolist() == Order(order.size, 5).ids(0, 40).tolist()


def test_a_weight_too_small_for_a_single_sample_is_refused(tmp_path):
    with pytest.raises(UserError, match="larger weights"):
        open_source(f"{write_csv(tmp_path, 7)}:0.01").order(0)


def test_batches_of_a_mixture_carry_the_samples_own_ids(tmp_path):
    shards, table = write_shards(tmp_path / "shards", 5), write_csv(tmp_path / "table", 7)
    source = open_source(f"{table}:2,{shards}:1")
    batches = Batches(source, source.order(0), batch_size=19, transform=noisy, tokenize=lengths, seed=0, workers=0)
    ids = [id for batch in batches.steps(first_sample=0, count=2) for id in batch.ids.tolist()]
    assert Counter(ids[:19]) == Counter({id: 2 if id < 7 else 1 for id in range(12)}) and ids[:19] != ids[19:]
