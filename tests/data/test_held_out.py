from __future__ import annotations

from pathlib import Path

import pytest

from neuclip.data.held_out import HeldOutSets, held_out_addresses, named
from neuclip.data.open import open_training_data
from neuclip.errors import RunFailed, UserError
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import EvaluationSettings, Settings
from tests.builders.images import write_csv
from tests.data.small_shards import image_bytes, write_shards, write_tar


def evaluated_on(*retrieval: str) -> Settings:
    return Settings(evaluation=EvaluationSettings(retrieval=retrieval, zero_shot=()))


def test_sets_whose_addresses_differ_only_in_the_query_are_refused_before_one_hides_the_other(server):
    write_shards(server.folder, [1, 1])
    one, two = f"{server.url}/00000.tar?id=1", f"{server.url}/00000.tar?id=2"
    with pytest.raises(UserError, match=r"/00000\.tar: several held-out sets differ only in query or password"):
        HeldOutSets.open(evaluated_on(one, two))
    opened = HeldOutSets.open(evaluated_on(one, one, f"{server.url}/00001.tar?id=1"))
    assert list(opened.retrieval) == [f"{server.url}/00000.tar", f"{server.url}/00001.tar"]


@pytest.fixture
def odd_table(tmp_path):
    """A table whose columns only the user can name."""
    path = write_csv(tmp_path / "pairs", 8)
    path.write_text(path.read_text().replace(path.read_text().splitlines()[0], "number_of_photo,words", 1))
    return str(path)


def test_held_out_tables_are_read_with_the_columns_of_the_run_unless_evaluation_names_others(odd_table, tmp_path):
    flags = ["--evaluation.zero_shot", "none", "--data.train", odd_table, "--evaluation.retrieval", odd_table]
    with pytest.raises(UserError, match=r"no column looks like the image.*--evaluation\.image_column"):
        HeldOutSets.open(read_settings(None, flags))
    columns = ["image_column", "number_of_photo", "caption_column", "words"]
    for section in ("data", "evaluation"):
        own = [f"--{section}.{word}" if number % 2 == 0 else word for number, word in enumerate(columns)]
        assert len(HeldOutSets.open(read_settings(None, [*flags, *own])).retrieval[odd_table]) == 8
    usual = str(write_csv(tmp_path / "usual", 8))
    own = ["--data.image_column", "number_of_photo", "--evaluation.image_column", "filepath", "--data.caption_column",
           "words", "--evaluation.caption_column", "title"]  # fmt: skip
    flags = [*flags[:-1], usual]
    assert len(HeldOutSets.open(read_settings(None, [*flags, *own])).retrieval[usual]) == 8


def test_held_out_shards_are_read_with_the_caption_key_of_the_run_and_sets_by_name_without_it(tmp_path):
    write_tar(tmp_path / "0.tar", [("0.png", image_bytes(0)), ("0.json", b'{"alt": "a dog"}')])
    flags = ["--data.train", "icons-30k", "--evaluation.retrieval", f"{tmp_path}/0.tar", "--data.caption_key", "alt"]
    (source,) = HeldOutSets.open(read_settings(None, [*flags, "--evaluation.zero_shot", "none"])).retrieval.values()
    assert source.captions() == ["a dog"]
    with pytest.raises(UserError, match=r"no sample has a caption .*name one with --evaluation\.caption_key alt"):
        HeldOutSets.open(read_settings(None, [*flags[:-2], "--evaluation.zero_shot", "none"]))


def test_limits_of_remote_data_hold_for_held_out_data(server):
    write_shards(server.folder, [3])
    flags = ["--evaluation.retrieval", f"{server.url}/00000.tar", "--evaluation.zero_shot", "none"]
    with pytest.raises(RunFailed, match=r"data\.cache_size 10,000 is too small"):
        HeldOutSets.open(read_settings(None, [*flags, "--data.cache_size", "10k"]))


def test_what_is_kept_from_training_is_measured_beside_what_is_named(tmp_path):
    table = str(write_csv(tmp_path / "pairs", 20))
    name = f"{Path(table).stem}#held-out"
    held_out = ["--data.train", table, "--data.hold_out", "5", "--evaluation.zero_shot", "none"]
    for flags, expected in (
        ([], (name,)),
        (["--evaluation.retrieval", "other.csv"], ("other.csv", name)),
        (["--evaluation.retrieval", f"other.csv,{name}"], ("other.csv", name)),
        (["--evaluation.retrieval", "none"], ()),
    ):
        assert held_out_addresses(read_settings(None, [*held_out, *flags]))[0] == expected
    settings = read_settings(None, [*held_out, "--evaluation.retrieval", name])
    (source,) = HeldOutSets.open(settings).retrieval.values()
    assert len(source) == 5 and len(open_training_data(settings)) == 15
    for flags, message in (
        (["--data.hold_out", "0"], "give --data.hold_out 1000 when you train"),
        (["--evaluation.retrieval", "b#held-out"], f"give {name}"),
    ):
        with pytest.raises(UserError, match=message):
            HeldOutSets.open(read_settings(None, [*held_out, "--evaluation.retrieval", name, *flags]))


def test_a_name_before_the_address_is_that_of_the_figures(tmp_path, monkeypatch):
    assert named("flickr 30k=/data/x.csv") == ("flickr 30k", "/data/x.csv")
    url = "https://host/x.tar?id=1&sig=2"
    assert named(url) == ("https://host/x.tar", url) and named(f"mine={url}") == ("mine", url)
    table = write_csv(tmp_path / "a=b", 4)
    monkeypatch.chdir(tmp_path)
    for whole in (str(table), f"a=b/{table.name}", "a=b", "a=b/*.csv", f"a=b/{table.name},c.csv"):
        assert named(whole) == (whole, whole)
    settings = evaluated_on(f"mine=a=b/{table.name}", f"a=b/{table.name}")
    assert {name: len(source) for name, source in HeldOutSets.open(settings).retrieval.items()} == {
        "mine": 4,
        f"a=b/{table.name}": 4,
    }


def test_names_that_are_empty_or_given_twice_are_refused(tmp_path):
    one, two = (write_csv(tmp_path / name, 4) for name in "ab")
    for addresses, message in (
        ((f"={one}",), "no name before '='; give NAME=ADDRESS"),
        (("mine=",), "mine=: no address behind '='"),
        ((f"mine={one}", f"mine={two}"), f"mine: is the name of two held-out sets, {one} and {two}; give each a name"),
        ((f"{two}={one}",), "no such file"),  # an address is no name
    ):
        with pytest.raises(UserError, match=message) as caught:
            HeldOutSets.open(evaluated_on(*addresses))
        assert "\n" not in str(caught.value)
    settings = Settings(evaluation=EvaluationSettings(retrieval=(f"mine={one}",), zero_shot=("mine=photos",)))
    with pytest.raises(UserError, match="is the name of two held-out sets"):
        HeldOutSets.open(settings)
