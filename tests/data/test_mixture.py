"""Several sources as one, what is held out of them, and rows of one image as one sample."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.data import (
    BadSample,
    Order,
    Pair,
    ShardOrder,
    batches,
    caption_counts,
    captions,
    content,
    description,
    fault_of,
    fingerprint,
    group_by_image,
    image_bytes,
    lengths,
    noisy,
    open_source,
    order_of,
    outcomes,
    parts,
    refusal,
    retrieval,
    several,
    split,
    training_data,
    travelled,
    write,
    write_images,
    write_shards,
    write_tar,
)

PARTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=3)


def listing(path: Path, rows: list[tuple[str, str]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in {name for name, _ in rows}:
        (path.parent / name).write_bytes(image_bytes(0))
    path.write_text("image,caption\n" + "".join(f"{name},{caption}\n" for name, caption in rows))
    return str(path)


@settings(max_examples=25)
@given(PARTS, st.integers(0, 2**40), st.data())
def test_in_an_epoch_each_sample_appears_as_often_as_its_weight_says_and_never_twice_alike(sizes, seed, data):
    with tempfile.TemporaryDirectory() as folder:
        made = [listing(Path(folder) / f"{k}.csv", [("a.png", "x")] * size) for k, (size, _) in enumerate(sizes)]
        weighted = [f"{path}:{weight}" for path, (_, weight) in zip(made, sizes, strict=True)]
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


def test_a_mixture_has_dense_ids_over_sources_of_any_kind(tmp_path):
    table = write("csv", tmp_path / "table", several([["seven"]] * 7))
    shards = write_shards(tmp_path / "shards", [5])
    source = open_source(f"{table}:2,{shards}")
    assert len(source) == 12 and order_of(source, 0).size == 19 and len(parts(source)) == 2
    assert content(source) == content(open_source(table)) + content(open_source(shards))
    assert "pairs.csv row 7" in source.where(6) and "00000.tar: 00000.png" in source.where(7)
    assert content(travelled(source)) == content(source) and fingerprint(travelled(source)) == fingerprint(source)
    for id in (12, -1):
        with pytest.raises(IndexError):
            source[id]


def test_orders_of_other_shards_are_told_apart():
    described = [description(ShardOrder(ends, 0)) for ends in ([3, 9], [4, 9], [3, 6, 9])]
    assert len(set(described)) == 3 and description(ShardOrder([3, 9], 1)) == described[0]


def test_the_order_of_sources_and_their_weights_tell_runs_apart(tmp_path):
    one, other = (write_shards(tmp_path / name, [size]) for name, size in (("a", 5), ("b", 7)))
    mixed = [order_of(open_source(address), 0) for address in (f"{one}:2,{other}", f"{one},{other}:2", f"{one}:2")]
    assert len({description(order) for order in mixed}) == 3


def test_without_weights_the_order_is_the_plain_one(tmp_path):
    one, other = (write_shards(tmp_path / name, [size]) for name, size in (("a", 5), ("b", 7)))
    for address, size in ((f"{one},{other}", 12), (str(other), 7)):
        assert order_of(open_source(address), 5).ids(0, 40).tolist() == Order(size, 5).ids(0, 40).tolist()


def test_batches_of_a_mixture_carry_the_samples_own_ids(tmp_path):
    table, shards = write("csv", tmp_path / "t", several([["a"]] * 7)), write_shards(tmp_path / "shards", [5])
    source = open_source(f"{table}:2,{shards}:1")
    options = {"batch_size": 19, "transform": noisy, "tokens": lengths, "steps": 2}
    found = list(batches(source, order=order_of(source, 0), **options))
    ids = [batch.ids.tolist() for batch in found]
    assert Counter(ids[0]) == Counter({id: 2 if id < 7 else 1 for id in range(12)}) and ids[0] != ids[1]
    twice = [found[0].images[place] for place, id in enumerate(ids[0]) if id == 0]
    assert not twice[0].equal(twice[1])  # the two appearances are cropped differently


# data.hold_out


def test_both_sides_together_are_the_data_and_share_nothing(tmp_path):
    source = open_source(write_shards(tmp_path, [20, 5, 15]))
    training, held_out = split(source, 12, seed=0)
    assert (len(training), len(held_out)) == (28, 12)
    assert sorted(content(training) + content(held_out)) == sorted(content(source))
    places = {training.where(id) for id in range(28)} | {held_out.where(id) for id in range(12)}
    assert len(places) == 40 and captions(training) == sorted(captions(training), key=lambda one: int(one[0][6:]))
    assert training.name == source.name and held_out.name == f"{source.name}#held-out"
    for side in (training, held_out):
        assert content(travelled(side)) == content(side)
        with pytest.raises(IndexError):
            side[len(side)]
    assert [list(batch.ids) for batch in batches(training, batch_size=28)] == [Order(28, 0).ids(0, 28).tolist()]


def test_the_seed_alone_decides_wherever_the_files_lie(tmp_path):
    rows = [(f"{number % 30}.png", f"caption {number}") for number in range(60)]
    here, there = (open_source(listing(tmp_path / name / "pairs.csv", rows)) for name in ("a", "b"))
    assert captions(split(here, 10, seed=3)[1]) == captions(split(there, 10, seed=3)[1])
    assert captions(split(here, 10, seed=3)[1]) != captions(split(here, 10, seed=4)[1])
    one, other = (fingerprint(split(source, 10, seed=3)[0]) for source in (here, there))
    assert one == other != fingerprint(split(here, 10, seed=4)[0])
    chosen = [int(texts[0].split()[1]) for texts in captions(split(here, 10, seed=3)[1])]
    assert chosen == [14, 15, 16, 19, 26, 44, 45, 46, 49, 56]  # a run that continues must hold out what it held out


def test_what_remains_has_the_fingerprint_of_the_same_pairs_in_a_file_of_their_own(tmp_path):
    source = open_source(write("jsonl", tmp_path / "all", several([[f"text {k}", "more"] for k in range(30)])))
    for side in split(source, 7, seed=1):
        own = [Pair(f"{id:03d}.png", image, texts) for id, (image, texts) in enumerate(content(side))]
        other = open_source(write("tar", tmp_path / f"{len(side)}", own))
        assert fingerprint(side) == fingerprint(other) and len(side) == len(other)


def test_rows_of_one_image_stay_together_also_in_another_table(tmp_path):
    rows = [(f"{number // 5}.png", f"caption {number}") for number in range(100)]
    first = listing(tmp_path / "a.csv", rows)
    second = listing(tmp_path / "b.csv", [(f"./{name}", f"other {text}") for name, text in rows[:50]])
    held_out = split(open_source(first), 20, seed=0)[1]
    assert len(held_out) == 20 and len({int(texts[0].split()[1]) // 5 for texts in captions(held_out)}) == 4
    training, held_out = split(open_source(f"{first}:2,{second}"), 30, seed=0)
    images = [{int(texts[0].split()[-1]) // 5 for texts in captions(side)} for side in (training, held_out)]
    assert images[0].isdisjoint(images[1]) and len(training) + len(held_out) == 150 and len(held_out) >= 30
    left = [sum("other" in texts[0] for texts in captions(training)), len(training)]
    assert order_of(training, 0).size == 2 * (left[1] - left[0]) + left[0]  # the weights hold for what is left


def test_what_would_leave_nothing_is_refused(tmp_path):
    source = open_source(write_shards(tmp_path / "shards", [5]))
    for count in (5, 6):
        assert f"data.hold_out is {count} and shards has 5 samples; give a smaller" in refusal(
            lambda count=count: split(source, count, seed=0)
        )
    table = open_source(listing(tmp_path / "pairs.csv", [("a.png", "one"), ("a.png", "two")]))
    assert "leaves nothing of pairs" in refusal(lambda: split(table, 1, seed=0))


# One sample per image, for retrieval: else the other captions of an image count as wrong

IMAGES, EACH = 20, 5
# Captions of one image are not consecutive: every image has its first, then every image its second ...
ROWS = [
    Pair(f"{n:03d}.png", image_bytes(n), (f"caption {turn} of {n}",)) for turn in range(EACH) for n in range(IMAGES)
]
EXPECTED = [tuple(f"caption {turn} of {number}" for turn in range(EACH)) for number in range(IMAGES)]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "parquet of paths"])
def test_rows_of_one_image_are_one_sample_with_all_captions_in_order(tmp_path, kind):
    address = write(kind, tmp_path, ROWS)
    assert len(open_source(address)) == IMAGES * EACH  # training draws its samples from the rows, as ever
    source = travelled(retrieval(address))
    assert captions(source) == EXPECTED and [source[id].image for id in (0, 19)] == [image_bytes(0), image_bytes(19)]
    assert caption_counts(source) == "20 samples with 100 captions (5 each)"
    assert content(group_by_image(source)) == content(source)


def test_lists_in_rows_of_one_image_are_joined(tmp_path):
    write_images(tmp_path, ROWS[:2])
    rows = [("000.png", ["a", "b"]), ("./001.png", ["c"]), ("./000.png", ["d", "e"])]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"image": name, "caption": texts}) for name, texts in rows))
    source = retrieval(tmp_path / "x.jsonl")
    assert captions(source) == [("a", "b", "d", "e"), ("c",)]
    assert caption_counts(source) == "2 samples with 5 captions (1 to 4 each)"
    assert source.where(1).endswith("x.jsonl row 2")


def test_a_row_without_a_caption_is_left_out_and_only_an_image_without_any_is_a_bad_sample(tmp_path):
    write_images(tmp_path, ROWS[:2])
    rows = "image,caption\n000.png,\n000.png,one\n001.png,\n001.png, \ngone.png,two\ngone.png,three\n"
    (tmp_path / "x.csv").write_text(rows)
    source = retrieval(tmp_path / "x.csv")
    assert outcomes(source) == ["one", "caption is empty", "image file cannot be read"]
    assert source.faults == ()  # these count as bad samples, of which there may be few
    assert "row 3" in fault_of(source, 1).where


def test_held_out_rows_are_one_sample_per_image_and_training_keeps_its_rows(tmp_path):
    flags = ["--data.train", write("csv", tmp_path, ROWS), "--data.hold_out", "25", "--evaluation.zero_shot", "none"]
    held_out, training = retrieval("pairs#held-out", *flags), training_data(*flags)
    assert (len(held_out), len(training)) == (5, 75) and held_out.name == "pairs#held-out"
    assert all(texts in EXPECTED for texts in captions(held_out))


def test_an_image_that_two_tables_name_is_one_sample_and_samples_of_shards_stay_apart(tmp_path):
    address = write("csv", tmp_path, ROWS)
    (tmp_path / "more.csv").write_text("image,caption\n007.png,another caption\n")
    members = [("0.png", image_bytes(0)), ("0.txt", b"x"), ("1.png", image_bytes(0)), ("1.txt", b"y")]
    shard = write_tar(tmp_path / "0.tar", members)
    source = retrieval(f"{address},{shard},{tmp_path}/more.csv")
    assert captions(source)[7] == (*EXPECTED[7], "another caption") and len(source) == IMAGES + 2
    assert captions(source)[IMAGES:] == [("x",), ("y",)]


def test_a_source_with_an_image_per_sample_stays_itself(tmp_path):
    source = open_source(write("csv", tmp_path, ROWS[:5]))
    assert group_by_image(source) is source
    with pytest.raises(BadSample):
        open_source(listing(tmp_path / "y.csv", [("a.png", "")]))[0]
