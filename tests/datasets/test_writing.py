from __future__ import annotations

import tarfile

from neuclip.data.convert import write_shards
from neuclip.datasets.collection import Collection
from neuclip.datasets.drawn import Names
from neuclip.datasets.splitting import Pair
from neuclip.datasets.writing import shuffle, write_zero_shot_folder

SAMPLES = [(("png", bytes([number] * number)), ("txt", f"ñ {number}".encode())) for number in range(10)]


def test_the_same_samples_give_the_same_bytes(tmp_path):
    for folder in ("first", "second"):
        assert write_shards(tmp_path / folder, SAMPLES, shard_samples=4) == 3
    for shard in ("00000.tar", "00001.tar", "00002.tar"):
        assert (tmp_path / "first" / shard).read_bytes() == (tmp_path / "second" / shard).read_bytes()


def test_members_carry_no_time_no_owner_and_running_keys(tmp_path):
    write_shards(tmp_path, SAMPLES, shard_samples=4)
    names = []
    for shard in sorted(tmp_path.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                names.append(member.name)
                owner = (member.mtime, member.uid, member.gid, member.mode, member.uname, member.gname)
                assert owner == (0, 0, 0, 0o644, "", "")
                content = tar.extractfile(member)
                assert content is not None
                number, extension = member.name.split(".")
                assert content.read() == dict(SAMPLES[int(number)])[extension]
    assert names == [f"{number:08d}.{extension}" for number in range(10) for extension in ("png", "txt")]


def test_pairs_stand_in_an_order_that_depends_on_their_ids_alone():
    collection = Collection(name="set", family="set", licence="MIT", expected=50)
    pairs = [Pair(collection, Names(str(number), ("",))) for number in range(50)]
    assert shuffle(pairs) == shuffle(pairs[::-1]) != pairs


def test_a_label_is_the_line_number_of_its_class_name(tmp_path):
    write_zero_shot_folder(tmp_path, [(b"1", 1), (b"2", 0), (b"3", 1)], ["animals", "objects"], ["{c}", "a {c}"])
    assert (tmp_path / "classnames.txt").read_text() == "animals\nobjects\n"
    with tarfile.open(tmp_path / "test" / "0.tar") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    assert [contents[f"{key:08d}.cls"] for key in range(3)] == [b"1", b"0", b"1"]
    assert [contents[f"{key:08d}.png"] for key in range(3)] == [b"1", b"2", b"3"]
    assert (tmp_path / "test" / "nshards.txt").read_text().strip() == "1"
    assert (tmp_path / "zeroshot_classification_templates.txt").read_text() == "{c}\na {c}\n"
