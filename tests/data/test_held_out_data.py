"""What a run is measured on: names and addresses, what is kept from training, and one sample per image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuclip.data.held_out import HeldOutSets, held_out_addresses, named
from neuclip.data.mixture import group_by_image, order_of, split
from neuclip.data.order import Order
from neuclip.data.source import Source
from neuclip.errors import RunFailed
from tests.builders.data import Pair, image_bytes, several, write, write_files, write_images, write_shards, write_tar
from tests.builders.reading import (
    batches,
    caption_counts,
    captions,
    content,
    fault_of,
    fingerprint,
    ids_of,
    open_source,
    outcomes,
    refusal,
    retrieval,
    settings,
    training_data,
    travelled,
)


def measured_on(*addresses: str, more: tuple[str, ...] = ()) -> dict[str, Source]:
    flags = ("--evaluation.retrieval", ",".join(addresses), "--evaluation.zero_shot", "none", *more)
    return HeldOutSets.open(settings(*flags)).retrieval


def write_table(folder: Path, count: int) -> str:
    return write("csv", folder, several([[f"text {number}"] for number in range(count)]))


def listing(path: Path, rows: list[tuple[str, str]]) -> str:
    rows_ = "".join(f"{name},{caption}\n" for name, caption in rows)
    write_files(path.parent, {**dict.fromkeys((name for name, _ in rows), ""), path.name: f"image,caption\n{rows_}"})
    return str(path)


# Names, columns and limits


def test_held_out_tables_are_read_with_the_columns_of_the_run_unless_evaluation_names_others(tmp_path):
    path = Path(write_table(tmp_path / "pairs", 8))
    path.write_text(path.read_text().replace("path,text", "number_of_photo,words", 1))  # only the user can name these
    odd, usual = str(path), write_table(tmp_path / "usual", 8)
    train = ("--data.train", odd)
    assert "--evaluation.image_column" in refusal(lambda: measured_on(odd, more=train))
    for section in ("data", "evaluation"):
        own = (f"--{section}.image_column", "number_of_photo", f"--{section}.caption_column", "words")
        assert len(measured_on(odd, more=(*train, *own))[odd]) == 8
    of_the_run = ("--data.image_column", "number_of_photo", "--data.caption_column", "words")
    own = ("--evaluation.image_column", "path", "--evaluation.caption_column", "text")
    assert len(measured_on(usual, more=(*train, *of_the_run, *own))[usual]) == 8


def test_held_out_shards_are_read_with_the_caption_key_and_the_limits_of_the_run(tmp_path, server):
    shard = write_tar(tmp_path / "0.tar", [("0.png", image_bytes(0)), ("0.json", b'{"alt": "a dog"}')])
    assert captions(retrieval(shard, "--data.caption_key", "alt")) == [("a dog",)]
    message = refusal(lambda: retrieval(shard))
    assert "no sample has a caption" in message and "--evaluation.caption_key alt" in message
    write_shards(server.folder, [3])
    action = lambda: retrieval(f"{server.url}/00000.tar", "--data.cache_size", "10k")  # noqa: E731
    assert "cache_size" in refusal(action, RunFailed)


def test_a_name_before_the_address_is_that_of_the_figures(tmp_path, monkeypatch):
    assert named("flickr 30k=/data/x.csv") == ("flickr 30k", "/data/x.csv")
    url = "https://host/x.tar?id=1&sig=2"
    assert named(url) == ("https://host/x.tar", url) and named(f"mine={url}") == ("mine", url)
    table = Path(write_table(tmp_path / "a=b", 4))
    monkeypatch.chdir(tmp_path)
    for whole in (str(table), f"a=b/{table.name}", "a=b", "a=b/*.csv", f"a=b/{table.name},c.csv"):
        assert named(whole) == (whole, whole)
    found = measured_on(f"mine=a=b/{table.name}", f"a=b/{table.name}")
    assert {name: len(source) for name, source in found.items()} == {"mine": 4, f"a=b/{table.name}": 4}


def test_names_that_are_empty_or_given_twice_are_refused(tmp_path, server):
    one, two = (write_table(tmp_path / name, 4) for name in "ab")
    write_shards(server.folder, [1])
    remote = f"{server.url}/00000.tar"
    for addresses, words in (
        ((f"={one}",), "no name before '='; give NAME=DATA"),
        (("mine=",), "mine=: no data path after '='"),
        ((f"mine={one}", f"mine={two}"), "mine: is the name of two held-out sets"),
        ((f"{two}={one}",), "no such file"),  # an address is no name
        ((f"{remote}?id=1", f"{remote}?id=2"), f"{remote}: "),  # no figure shows a query
    ):
        assert words in refusal(lambda addresses=addresses: measured_on(*addresses))
    twice = ("--evaluation.zero_shot", "mine=photos")
    assert "is the name of two held-out sets" in refusal(lambda: measured_on(f"mine={one}", more=twice))


def test_images_without_a_caption_are_told_and_stay_bad_samples(tmp_path, capsys):
    members = [("0.png", image_bytes(0)), ("0.txt", b"a"), ("1.png", image_bytes(1)), ("2.png", image_bytes(2))]
    source = retrieval(write_tar(tmp_path / "0.tar", [*members, ("2.txt", b" \n\n")]))
    assert "2 of 3 images have no caption and are skipped; add captions" in capsys.readouterr().err
    assert outcomes(source) == ["a", "caption is missing", "caption is empty"]


# data.hold_out


def test_what_is_kept_from_training_is_measured_beside_what_is_named(tmp_path):
    train = ("--data.train", write_table(tmp_path / "pairs", 20), "--data.hold_out", "5")
    for named_too, expected in (
        ((), ("pairs#held-out",)),
        (("other.csv",), ("other.csv", "pairs#held-out")),
        (("other.csv,pairs#held-out",), ("other.csv", "pairs#held-out")),
        (("none",), ()),
    ):
        flags = ("--evaluation.retrieval", *named_too) if named_too else ()
        found = held_out_addresses(settings(*train, "--evaluation.zero_shot", "photos", *flags))
        assert found == (expected, ("photos",))
    (source,) = measured_on("pairs#held-out", more=train).values()
    training = training_data(*train[1:])
    assert len(source) == 5 and len(training) == 15 and not set(captions(source)) & set(captions(training))
    message = refusal(lambda: measured_on("pairs#held-out", more=(*train, "--data.hold_out", "0")))
    assert "give --data.hold_out 1000" in message
    assert "give pairs#held-out" in refusal(lambda: measured_on("b#held-out", more=train))


def test_both_sides_together_are_the_data_and_share_nothing(tmp_path):
    source = open_source(write_shards(tmp_path, [20, 5, 15]))
    training, held_out = split(source, 12, seed=0)
    assert (len(training), len(held_out)) == (28, 12)
    assert sorted(content(training) + content(held_out)) == sorted(content(source))
    places = {training.where(id) for id in range(28)} | {held_out.where(id) for id in range(12)}
    assert len(places) == 40 and captions(training) == sorted(captions(training), key=lambda one: int(one[0][6:]))
    assert training.name == source.name and held_out.name == f"{source.name}#held-out"
    for number, side in enumerate((training, held_out)):
        assert content(travelled(side)) == content(side)
        with pytest.raises(IndexError):
            side[len(side)]
        own = [Pair(f"{id:03d}.png", image, texts) for id, (image, texts) in enumerate(content(side))]
        assert fingerprint(side) == fingerprint(open_source(write("jsonl", tmp_path / str(number), own)))
    assert ids_of(batches(training, batch_size=28)) == Order(28, 0).ids(0, 28).tolist()


def test_the_seed_alone_decides_wherever_the_files_lie(tmp_path):
    rows = [(f"{number % 30}.png", f"caption {number}") for number in range(60)]
    here, there = (open_source(listing(tmp_path / name / "pairs.csv", rows)) for name in ("a", "b"))
    assert captions(split(here, 10, seed=3)[1]) == captions(split(there, 10, seed=3)[1])
    assert captions(split(here, 10, seed=3)[1]) != captions(split(here, 10, seed=4)[1])
    one, other = (fingerprint(split(source, 10, seed=3)[0]) for source in (here, there))
    assert one == other != fingerprint(split(here, 10, seed=4)[0])
    chosen = [int(texts[0].split()[1]) for texts in captions(split(here, 10, seed=3)[1])]
    assert chosen == [14, 15, 16, 19, 26, 44, 45, 46, 49, 56]  # a run that continues must hold out what it held out


def test_rows_of_one_image_stay_together_also_in_another_table(tmp_path):
    rows = [(f"{number // 5}.png", f"caption {number}") for number in range(100)]
    first = listing(tmp_path / "a.csv", rows)
    second = listing(tmp_path / "b.csv", [(f"./{name}", f"other {text}") for name, text in rows[:50]])
    held_out = split(open_source(first), 20, seed=0)[1]
    assert len(held_out) == 20 and len({int(texts[0].split()[1]) // 5 for texts in captions(held_out)}) == 4
    training, held_out = split(open_source(f"{first}:2,{second}"), 30, seed=0)
    images = [{int(texts[0].split()[-1]) // 5 for texts in captions(side)} for side in (training, held_out)]
    assert images[0].isdisjoint(images[1]) and len(training) + len(held_out) == 150 and len(held_out) >= 30
    others = sum("other" in texts[0] for texts in captions(training))
    assert order_of(training, 0).size == 2 * (len(training) - others) + others  # the weights hold for what is left


def test_what_would_leave_nothing_is_refused(tmp_path):
    source = open_source(write_shards(tmp_path / "shards", [5]))
    for count in (5, 6):
        message = refusal(lambda count=count: split(source, count, seed=0))
        assert f"data.hold_out is {count} and shards has 5 samples; give a smaller" in message
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
    assert group_by_image(source) is source  # one that has an image per sample stays itself


def test_lists_in_rows_of_one_image_are_joined(tmp_path):
    rows = [("000.png", ["a", "b"]), ("./001.png", ["c"]), ("./000.png", ["d", "e"])]
    lines = "\n".join(json.dumps({"image": name, "caption": texts}) for name, texts in rows)
    source = retrieval(write_files(write_images(tmp_path, ROWS[:2]), {"x.jsonl": lines}) / "x.jsonl")
    assert captions(source) == [("a", "b", "d", "e"), ("c",)]
    assert caption_counts(source) == "2 samples with 5 captions (1 to 4 each)"
    assert source.where(1).endswith("x.jsonl row 2")


def test_a_row_without_a_caption_is_left_out_and_only_an_image_without_any_is_a_bad_sample(tmp_path):
    rows = "image,caption\n000.png,\n000.png,one\n001.png,\n001.png, \ngone.png,two\ngone.png,three\n"
    source = retrieval(write_files(write_images(tmp_path, ROWS[:2]), {"x.csv": rows}) / "x.csv")
    assert outcomes(source) == ["one", "caption is empty", "image file cannot be read"]
    assert source.faults == ()  # these count as bad samples, of which there may be few
    assert "row 3" in fault_of(source, 1).where


def test_held_out_rows_are_one_sample_per_image_and_training_keeps_its_rows(tmp_path):
    flags = ["--data.train", write("csv", tmp_path, ROWS), "--data.hold_out", "25", "--evaluation.zero_shot", "none"]
    held_out, training = retrieval("pairs#held-out", *flags), training_data(*flags[1:])
    assert (len(held_out), len(training)) == (5, 75) and held_out.name == "pairs#held-out"
    assert all(texts in EXPECTED for texts in captions(held_out))


def test_an_image_that_two_tables_name_is_one_sample_and_samples_of_shards_stay_apart(tmp_path):
    address = write("csv", tmp_path, ROWS)
    write_files(tmp_path, {"more.csv": "image,caption\n007.png,another caption\n"})
    members = [("0.png", image_bytes(0)), ("0.txt", b"x"), ("1.png", image_bytes(0)), ("1.txt", b"y")]
    shard = write_tar(tmp_path / "0.tar", members)
    source = retrieval(f"{address},{shard},{tmp_path}/more.csv")
    assert captions(source)[7] == (*EXPECTED[7], "another caption") and len(source) == IMAGES + 2
    assert captions(source)[IMAGES:] == [("x",), ("y",)]
