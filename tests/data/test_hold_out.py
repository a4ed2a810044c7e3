"""data.hold_out: pairs kept from training are the same whenever the data is opened, and never on both sides."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from neuclip.data.fingerprint import fingerprint
from neuclip.data.hold_out import Subset, split

from neuclip.data.open import data_name, open_source
from neuclip.data.order import ShardOrder
from neuclip.data.source import Source
from neuclip.errors import UserError
from tests.data.small_shards import contents, image_bytes, write_shards
from tests.misbehaving_server import QUICK


def captions(source: Source) -> list[str]:
    return [sample.captions[0] for sample in map(source.__getitem__, range(len(source)))]


def write_table(path: Path, rows: list[tuple[str, str]]) -> str:
    path.parent.mkdir(exist_ok=True)
    for name in {name for name, _ in rows}:
        (path.parent / name).write_bytes(image_bytes(0))
    path.write_text("image,caption\n" + "".join(f"{name},{caption}\n" for name, caption in rows))
    return str(path)


def test_both_sides_together_are_the_data_and_share_nothing(tmp_path):
    source = open_source(str(write_shards(tmp_path, [20, 5, 15])))
    training, held_out = split(source, 12, seed=0)
    assert (len(training), len(held_out)) == (28, 12)
    assert sorted(captions(training) + captions(held_out)) == sorted(captions(source))
    assert training.captions() == captions(training) and held_out.captions() == captions(held_out)
    assert {training.where(id) for id in range(28)}.isdisjoint(held_out.where(id) for id in range(12))
    assert training.name == source.name and held_out.name == f"{source.name}#held-out"
    assert contents(pickle.loads(pickle.dumps(training))) == contents(training)


def test_the_seed_alone_decides_wherever_the_files_lie(tmp_path):
    rows = [(f"{number % 30}.png", f"caption {number}") for number in range(60)]
    here, there = (open_source(write_table(tmp_path / name / "pairs.csv", rows)) for name in ("a", "b"))
    assert captions(split(here, 10, seed=3)[1]) == captions(split(there, 10, seed=3)[1])
    assert captions(split(here, 10, seed=3)[1]) != captions(split(here, 10, seed=4)[1])
    one, other = (fingerprint(split(source, 10, seed=3)[0]) for source in (here, there))
    assert one == other != fingerprint(split(here, 10, seed=4)[0])


def test_rows_of_one_image_stay_together_also_in_another_table(tmp_path):
    rows = [(f"{number // 5}.png", f"caption {number}") for number in range(100)]
    first = write_table(tmp_path / "a.csv", rows)
    second = write_table(tmp_path / "b.csv", [(f"./{name}", f"other {text}") for name, text in rows[:50]])
    training, held_out = split(open_source(first), 20, seed=0)
    assert len(held_out) == 20 and len({int(text.split()[1]) // 5 for text in captions(held_out)}) == 4
    training, held_out = split(open_source(f"{first}:2,{second}"), 30, seed=0)
    images = [{int(text.split()[-1]) // 5 for text in captions(side)} for side in (training, held_out)]
    assert images[0].isdisjoint(images[1]) and len(training) + len(held_out) == 150 and len(held_out) >= 30
    assert training.order(0).size == sum(
        weight * len(part) for weight, part in zip((2, 1), training.parts, strict=True)
    )


def test_remote_data_give_from_few_shards_and_are_read_shard_by_shard(server, cache):
    write_shards(server.folder, [10] * 6)
    source = open_source(f"{server.url}/{{00000..00005}}.tar", limits=QUICK)
    training, held_out = split(source, 15, seed=0)
    assert sorted(facts for facts in held_out.shard_facts().samples if facts) == [5, 10]
    order = training.order(0)
    assert isinstance(order, ShardOrder) and sorted(order.ids(0, 45).tolist()) == list(range(45))
    training.prefetch(order, 0, 8)
    assert sorted(captions(training) + captions(held_out)) == sorted(captions(source))
    assert training.cheap_ids() in (5, 10) and training.fetches


def test_a_large_set_is_told_by_its_own_hash_and_the_choice(tmp_path):
    source = open_source(str(write_shards(tmp_path, [9])))
    source.captions_sha256 = "0" * 64
    ids = np.array([1, 4])
    hashes = [Subset(source, ids, others=True), Subset(source, ids), Subset(source, np.array([1, 5]), others=True)]
    assert len({fingerprint(one)["sha256"] for one in hashes} | {"0" * 64}) == 4


def test_what_leaves_nothing_or_both_sides_with_the_same_is_refused(tmp_path):
    folder = write_shards(tmp_path / "shards", [5])
    source = open_source(str(folder))
    for count in (5, 6):
        with pytest.raises(UserError, match=r"data.hold_out is \d and shards has 5 samples; give a smaller"):
            split(source, count, seed=0)
    with pytest.raises(UserError, match=r"00000\.tar more than once"):
        split(open_source(f"{folder},{folder}/00000.tar:2"), 2, seed=0)
    table = write_table(tmp_path / "pairs.csv", [("a.png", "one"), ("a.png", "two")])
    with pytest.raises(UserError, match="leaves nothing of pairs"):
        split(open_source(table), 1, seed=0)


def test_the_name_of_data_is_known_before_they_are_opened(tmp_path):
    folder = write_shards(tmp_path / "shards", [2, 2])
    for address in (str(folder), f"{folder}/*.tar", f"{folder}/00000.tar:2,{folder}/00001.tar"):
        assert data_name(address) == open_source(address).name
