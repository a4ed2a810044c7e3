"""Batches are the same to the bit however many workers or ranks make them."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.data import (
    batches,
    captions,
    content,
    failing,
    failure,
    image_bytes,
    noisy,
    open_source,
    pair,
    read_images,
    refusal,
    spawned,
    write_shards,
    write_tar,
)


def ids_of(batches) -> list[int]:
    return [id for batch in batches for id in batch.ids.tolist()]


def same(first, second) -> bool:
    return all(
        torch.equal(a.images, b.images) and torch.equal(a.tokens, b.tokens) and torch.equal(a.ids, b.ids)
        and a.faults == b.faults
        for a, b in zip(first, second, strict=True)
    )  # fmt: skip


@pytest.fixture
def source(tmp_path):
    return open_source(str(write_shards(tmp_path / "shards", [5, 1, 9])))


def test_batches_are_equal_to_the_bit_for_any_number_of_workers(source):
    expected = list(batches(source, transform=noisy, first=4, steps=7))
    assert same(expected, batches(source, transform=noisy, first=4, steps=7, workers=2))


@pytest.mark.slow
def test_a_spawned_worker_gives_the_same_batches(source):
    expected = list(batches(source, transform=noisy, steps=3))
    assert same(expected, batches(source, transform=spawned, workers=1, start_method="spawn", steps=3))


def test_the_rows_of_all_ranks_are_the_global_batch(source):
    options = {"batch_size": 8, "transform": noisy, "first": 3, "steps": 4}
    whole = list(batches(source, **options))
    shares = [list(batches(source, rank=rank, ranks=4, **options)) for rank in range(4)]
    for step, batch in enumerate(whole):
        assert torch.equal(batch.images, torch.cat([share[step].images for share in shares]))
        assert torch.equal(batch.ids, torch.cat([share[step].ids for share in shares]))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 40), st.integers(1, 7), st.integers(0, 5), st.integers(0, 5))
def test_a_resumed_run_continues_the_same_batches(first_sample, batch_size, done, left):
    with tempfile.TemporaryDirectory() as folder:
        source = open_source(str(write_shards(Path(folder), [3, 4])))
        options = {"batch_size": batch_size, "transform": noisy}
        whole = list(batches(source, first=first_sample, steps=done + left, **options))
        resumed = batches(source, first=first_sample + done * batch_size, steps=left, **options)
        assert same(whole[done:], list(resumed))


def test_augmentation_differs_between_epochs_and_seeds(source):
    count = len(source)

    def image_of_zero(seed, epoch):
        batch = next(batches(source, batch_size=count, transform=noisy, seed=seed, first=epoch * count))
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
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    chosen = [batch.tokens.item() for batch in batches(source, batch_size=1, steps=40)]
    assert set(chosen) == {1, 2, 3}
    (batch,) = read_images(source)
    assert batch.captions == (("is 1", "is 2", "is 3"),)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_id_once_in_order(source, workers):
    found = list(read_images(source, workers=workers))
    assert ids_of(found) == list(range(15)) and [len(batch.ids) for batch in found] == [4, 4, 4, 3]
    assert [texts for batch in found for texts in batch.captions] == captions(source)
    digests = [hashlib.blake2b(image, digest_size=16).digest() for image, _ in content(source)]
    assert [digest for batch in found for digest in batch.digests] == digests


def test_evaluation_of_a_share_of_the_ids_is_that_part_of_the_whole(source):
    found = read_images(source, ids=range(4, 11))
    assert [batch.ids.tolist() for batch in found] == [[4, 5, 6, 7], [8, 9, 10]]
    assert list(read_images(source, workers=2, ids=range(8, 8))) == []


def test_evaluation_leaves_bad_samples_out(tmp_path):
    images = [image_bytes(0), b"not an image", image_bytes(2), b""]
    members = [m for k, image in enumerate(images) for m in ((f"{k}.png", image), (f"{k}.txt", b"is 1"))]
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    first, second, third, last = read_images(source, batch_size=1)
    assert first.ids.tolist() == [0] and third.ids.tolist() == [2]
    assert not len(second.ids) and not len(second.images) and not second.captions and not second.digests
    assert [fault.id for batch in (second, last) for fault in batch.faults] == [1, 3]


def test_evaluation_takes_labelled_images_without_captions_and_training_does_not(tmp_path):
    members = [m for k in range(3) for m in ((f"{k}.png", image_bytes(k)), (f"{k}.cls", str(k).encode()))]
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    (batch,) = read_images(source)
    assert len(batch.images) == 3 and not batch.faults
    assert "caption is missing" in failure(lambda: next(batches(source, batch_size=1)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_keeps_its_place_and_the_next_readable_one_replaces_it(tmp_path, workers):
    broken = {1: b"", 2: b"not an image", 4: image_bytes(4)[:60]}  # 5 is the last, so 0 replaces 4 and 5
    members = [
        m for k in range(5) for m in ((f"{k}.png", broken.get(k, image_bytes(k))), (f"{k}.txt", f"pair {k}".encode()))
    ]
    members += [("5.png", image_bytes(5)), ("5.txt", b"\xff")]
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    batch = next(batches(source, workers=workers))
    shown = dict(zip(batch.ids.tolist(), batch.tokens[:, 0].tolist(), strict=True))
    assert shown == {0: 0, 1: 3, 2: 3, 3: 3, 4: 0, 5: 0}
    found = {fault.id: (fault.reason, Path(fault.where).name) for fault in batch.faults}
    assert found == {
        1: ("image is empty", "0.tar: 1.png"),
        2: ("image does not decode", "0.tar: 2.png"),
        4: ("image is cut off", "0.tar: 4.png"),
        5: ("caption is not UTF-8", "0.tar: 5.txt"),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_data_without_one_readable_sample_ends_in_one_line(source, workers):
    message = failure(lambda: next(batches(source, transform=failing, workers=workers)))
    assert "image cannot be transformed" in message


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(source):
    assert "batch_size 6 or 9" in refusal(lambda: batches(source, batch_size=8, ranks=3))


def test_a_single_sample_fills_a_batch_of_many_epochs(tmp_path):
    source = open_source(str(write_tar(tmp_path / "0.tar", pair(0))))
    assert ids_of(batches(source, batch_size=5, first=2, steps=2)) == [0] * 10


def test_a_killed_worker_is_one_line_where_the_batch_is_read_and_nowhere_else(source):
    running = batches(source, workers=1, steps=50)
    next(running)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    wait([worker.sentinel])  # torch would raise here, or wherever else the main process is
    assert "ended from outside" in failure(lambda: list(running))
