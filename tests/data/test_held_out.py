"""What a run is measured on: names and addresses, columns and keys of its own, and what was kept from training."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip.errors import RunFailed
from tests.builders.data import (
    captions,
    held_out_addresses,
    held_out_sets,
    image_bytes,
    named,
    outcomes,
    refusal,
    retrieval,
    several,
    training_data,
    write,
    write_shards,
    write_tar,
)


def measured_on(*addresses: str, more: tuple[str, ...] = ()):
    return held_out_sets("--evaluation.retrieval", ",".join(addresses), *more)


def write_table(folder: Path, count: int) -> str:
    return write("csv", folder, several([[f"text {number}"] for number in range(count)]))


@pytest.fixture
def odd_table(tmp_path):
    """A table whose columns only the user can name."""
    path = Path(write_table(tmp_path / "pairs", 8))
    path.write_text(path.read_text().replace("path,text", "number_of_photo,words", 1))
    return str(path)


def test_held_out_tables_are_read_with_the_columns_of_the_run_unless_evaluation_names_others(odd_table, tmp_path):
    train = ("--data.train", odd_table)
    assert "--evaluation.image_column" in refusal(lambda: measured_on(odd_table, more=train))
    for section in ("data", "evaluation"):
        own = (f"--{section}.image_column", "number_of_photo", f"--{section}.caption_column", "words")
        assert len(measured_on(odd_table, more=(*train, *own))[odd_table]) == 8
    usual = write_table(tmp_path / "usual", 8)
    odd = ("--data.image_column", "number_of_photo", "--data.caption_column", "words")
    own = ("--evaluation.image_column", "path", "--evaluation.caption_column", "text")
    assert len(measured_on(usual, more=(*train, *odd, *own))[usual]) == 8


def test_held_out_shards_are_read_with_the_caption_key_of_the_run(tmp_path):
    shard = write_tar(tmp_path / "0.tar", [("0.png", image_bytes(0)), ("0.json", b'{"alt": "a dog"}')])
    train = ("--data.train", "icons-30k")
    (source,) = measured_on(str(shard), more=(*train, "--data.caption_key", "alt")).values()
    assert captions(source) == [("a dog",)]
    message = refusal(lambda: measured_on(str(shard), more=train))
    assert "no sample has a caption" in message and "--evaluation.caption_key alt" in message


def test_limits_of_remote_data_hold_for_held_out_data(server):
    write_shards(server.folder, [3])
    flags = ("--data.cache_size", "10k")
    assert "cache_size" in refusal(lambda: measured_on(f"{server.url}/00000.tar", more=flags), RunFailed)


def test_what_is_kept_from_training_is_measured_beside_what_is_named(tmp_path):
    table = write_table(tmp_path / "pairs", 20)
    train = ("--data.train", table, "--data.hold_out", "5", "--evaluation.zero_shot", "none")
    for flags, expected in (
        ((), ("pairs#held-out",)),
        (("--evaluation.retrieval", "other.csv"), ("other.csv", "pairs#held-out")),
        (("--evaluation.retrieval", "other.csv,pairs#held-out"), ("other.csv", "pairs#held-out")),
        (("--evaluation.retrieval", "none"), ()),
    ):
        assert held_out_addresses(*train, *flags) == expected
    (source,) = measured_on("pairs#held-out", more=train).values()
    training = training_data(*train)
    assert len(source) == 5 and len(training) == 15 and not set(captions(source)) & set(captions(training))
    assert "give --data.hold_out 1000" in refusal(
        lambda: measured_on("pairs#held-out", more=(*train, "--data.hold_out", "0"))
    )
    assert "give pairs#held-out" in refusal(lambda: measured_on("b#held-out", more=train))


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
        ((f"={one}",), "no name before '='; give NAME=ADDRESS"),
        (("mine=",), "mine=: no address behind '='"),
        ((f"mine={one}", f"mine={two}"), "mine: is the name of two held-out sets"),
        ((f"{two}={one}",), "no such file"),  # an address is no name
        ((f"{remote}?id=1", f"{remote}?id=2"), f"{remote}: "),  # no figure shows a query
    ):
        assert words in refusal(lambda addresses=addresses: measured_on(*addresses))
    flags = ("--evaluation.retrieval", f"mine={one}", "--evaluation.zero_shot", "mine=photos")
    assert "is the name of two held-out sets" in refusal(lambda: held_out_sets(*flags))


def test_images_without_a_caption_are_told_and_stay_bad_samples(tmp_path, capsys):
    members = [("0.png", image_bytes(0)), ("0.txt", b"a"), ("1.png", image_bytes(1)), ("2.png", image_bytes(2))]
    source = retrieval(write_tar(tmp_path / "0.tar", [*members, ("2.txt", b" \n\n")]))
    assert "2 of 3 images have no caption and are skipped; give each of them one" in capsys.readouterr().err
    assert outcomes(source) == ["a", "caption is missing", "caption is empty"]
