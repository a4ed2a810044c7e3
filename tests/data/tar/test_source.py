"""Reading tar shards: open files, failing disks, captions and faults."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from neuclip.data.captions import other_keys
from neuclip.data.sample import BadSample

from neuclip.cli.main import main
from neuclip.data.open import open_source
from neuclip.data.source import ShardFacts
from neuclip.data.tar import source as tar_source
from neuclip.data.tar.source import TarSource
from neuclip.errors import RunFailed
from tests.data.small_shards import contents, image_bytes, pair, write_shards, write_tar


@pytest.fixture
def few_files():
    """As `ulimit -n` with a small number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.dup(0) for _ in range(20)]  # the smallest free numbers
    for file in spare:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def folders_of_shards(folder: Path) -> str:
    return ",".join(str(write_shards(folder / name, [1] * 9)) for name in "abcd")


def test_many_sources_together_open_no_more_files_than_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_source, "OPEN_FILES", 5)
    source = open_source(folders_of_shards(tmp_path))
    for id in [*range(36), *range(0, 36, 5)]:
        assert source[id].captions == (f"image {id % 9}",)
        assert sum(tar_source.open_count(part._number) for part in source.sources) <= 5
    latest = source.sources[0]
    latest._file(0), source[35], source[34], source[33], latest._file(0), source[32], source[31]
    assert (latest._number, 0) in tar_source._open_files  # the last used stay


def test_no_sample_is_bad_because_the_system_allows_few_open_files(tmp_path, few_files):
    source = open_source(folders_of_shards(tmp_path))
    assert [source[id].captions for id in range(36)] == [(f"image {id % 9}",) for id in range(36)]


def test_files_of_a_source_that_is_gone_are_closed(tmp_path):
    source = open_source(str(write_shards(tmp_path, [1, 1])))
    contents(source)
    number = source._number
    assert tar_source.open_count(number) == 2
    del source
    assert tar_source.open_count(number) == 0


class Failing(TarSource):
    """The system's answer to opening a shard is this error."""

    error = 0

    def _open(self, shard: int) -> int:
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EIO", "ETIMEDOUT", "EACCES"])
def test_what_the_machine_cannot_read_now_ends_the_run_and_changes_no_image(tmp_path, name):
    source = Failing("x", [write_tar(tmp_path / "0.tar", pair(0))])
    source.error = getattr(errno, name)
    with pytest.raises(RunFailed, match=r"0\.tar: cannot be read \(.+\); .*--resume") as failure:
        source[0]
    assert "\n" not in str(failure.value) and os.strerror(source.error) in str(failure.value)


def test_a_shard_that_is_gone_since_it_was_indexed_ends_the_run_and_changes_no_image(tmp_path):
    source = open_source(str(write_shards(tmp_path, [1, 1])))
    (tmp_path / "00001.tar").unlink()
    assert source[0].captions == ("image 0",)
    with pytest.raises(
        RunFailed, match=r"00001\.tar: cannot be read \(No such file.+put it back, .*--resume"
    ) as failure:
        source[1]
    assert "\n" not in str(failure.value)


def test_a_json_member_without_the_caption_says_which_keys_it_has(tmp_path, capsys):
    about = b'{"url": "http://x", "text": "a cat", "width": 3}'
    members = [("0.png", image_bytes(0)), ("0.json", about), ("1.png", image_bytes(1)), ("1.json", b'{"caption": ""}')]
    shard = write_tar(tmp_path / "0.tar", members)
    with pytest.raises(BadSample) as caught:
        open_source(str(shard))[0]
    message = "0.json (its keys are url, text, width: name one with --data.caption_key text)"
    assert caught.value.reason == "caption is missing" and caught.value.where == f"{shard}: {message}"
    assert main(["data", "index", str(shard)]) == 0
    assert f"without a caption: 2 samples; first: caption is missing, {shard}: {message}" in capsys.readouterr().out
    assert open_source(str(shard), caption_key="text")[0].captions == ("a cat",)
    with pytest.raises(BadSample, match="caption is empty") as caught:
        open_source(str(shard))[1]
    assert "keys" not in caught.value.where
    assert other_keys(b"[1]") == other_keys(b'{"width": null}') == "no key of it holds a text"


def test_a_tar_without_an_end_mark_is_reported_only_where_others_have_it(tmp_path):
    write_shards(tmp_path, [4, 4, 2, 3])
    marked = {path: path.read_bytes() for path in sorted(tmp_path.glob("*.tar"))}
    for path, content in marked.items():
        path.write_bytes(content[: -(-len(content.rstrip(b"\0")) // 512) * 512])
    assert open_source(str(tmp_path)).faults == ()  # as their writer leaves them
    last, content = marked.popitem()
    last.write_bytes(content[:2000])
    assert [fault.reason for fault in open_source(str(tmp_path)).faults] == ["shard is cut off"]
    last.write_bytes(content)
    assert [fault.reason for fault in open_source(str(tmp_path)).faults] == ["shard has no end mark"] * 3


def test_a_tail_of_zeros_is_no_padding(tmp_path):
    shard = write_shards(tmp_path, [60]) / "00000.tar"
    content = shard.read_bytes()
    shard.write_bytes(content + bytes(50_000))  # a large record
    assert open_source(str(tmp_path)).faults == ()
    shard.write_bytes(content[:20_480] + bytes(len(content) - 20_480))
    source = open_source(str(tmp_path))
    assert len(source) < 30 and [fault.reason for fault in source.faults] == ["shard ends in zeros"]


def test_faults_name_their_shard_as_it_is_called_now(tmp_path, monkeypatch):
    write_tar(tmp_path / "a" / "0.tar", [*pair(0), ("x.txt", b"alone")])
    first = open_source(str(tmp_path / "a")).faults[0].where
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert (first, open_source("b").faults[0].where) == (f"{tmp_path}/a/0.tar: x", "b/0.tar: x")


def test_members_are_images_by_their_bytes_where_their_name_says_nothing(tmp_path):
    members = [("a.dat", image_bytes(0)), ("a.txt", b"a"), ("b.heic", image_bytes(1, "jpg")), ("b.txt", b"b")]
    members += [("c.depth", image_bytes(2)), ("c.webp", image_bytes(3, "webp")), ("c.txt", b"c")]  # the name goes first
    members += [
        ("d.wav", b"RIFF\x00\x00\x00\x00WAVEfmt "),
        ("d.txt", b"d"),
        ("e.HEIC", b"\0\0\0\x18ftyp"),
        ("e.txt", b"e"),
    ]
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    assert contents(source) == [
        (image_bytes(0), ("a",)),
        (image_bytes(1, "jpg"), ("b",)),
        (image_bytes(3, "webp"), ("c",)),
    ]
    assert [fault[1:3] for fault in source.faults] == [
        ("no image", f"{tmp_path}/0.tar: d"),
        ("kind of image is not read", f"{tmp_path}/0.tar: e"),
    ]


def test_one_and_several_shards_that_have_changed_are_counted_in_words(tmp_path, capsys):
    for changed, message in ((1, ""), (2, " and 1 more shard has changed"), (3, " and 2 more shards have changed")):
        folder = write_shards(tmp_path / str(changed), [1] * 3)
        open_source(str(folder))
        capsys.readouterr()
        for shard in range(changed):
            write_tar(folder / f"{shard:05d}.tar", pair(7) + pair(8) + pair(9))
        open_source(str(folder))
        assert (
            f"00000.tar: it was written again since it was indexed{message}; indexed again" in capsys.readouterr().err
        )


def test_a_process_with_open_shards_ends_without_a_word(tmp_path):
    write_shards(tmp_path / "shards", [1, 1])
    program = (
        "import sys\n"
        "from neuclip.data.open import open_source\n"
        f"source = open_source({str(tmp_path / 'shards')!r})\n"
        "source[0]; source[1]\n"
        "sys.excepthook = source.where\n"  # held until Python has taken its modules apart
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""


def test_a_caption_above_a_megabyte_is_a_counted_fault_and_not_in_the_index(tmp_path):
    long = b"a" * ((1 << 20) + 1)
    members = [("a.png", image_bytes(0)), ("a.txt", long), ("b.png", image_bytes(1)), ("b.txt", long[:-1])]
    source = open_source(str(write_tar(tmp_path / "0.tar", members)))
    assert [len(caption) for caption in source.captions()] == [0, 1 << 20]
    with pytest.raises(BadSample, match="caption is too long"):
        source[0]
    assert len(source[1].captions[0]) == 1 << 20


def test_a_source_of_shards_says_what_it_is_made_of(tmp_path):
    source = open_source(str(write_shards(tmp_path / "shards", [2, 0, 3])))
    shards = sorted((tmp_path / "shards").glob("*.tar"))
    assert source.kind == "tar" and not source.fetches and source.parts == (source,)
    assert source.describe_files() == (3, sum(shard.stat().st_size for shard in shards))
    assert source.places() == {str(shard.resolve()) for shard in shards}
    assert source.shard_facts() == ShardFacts([2, 0, 3]) and source.cheap_ids() is None
