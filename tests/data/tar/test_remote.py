"""A remote that stalls, cuts off, fails or refuses is asked again or ends in one line; listing finds shards."""

from __future__ import annotations

import gzip
from dataclasses import replace

import fsspec
import numpy as np
import pytest

from neuclip.data.locations import PROTOCOLS, expand_braces, is_remote
from neuclip.data.open import open_source
from neuclip.data.tar.remote import Limits, file_system, remote_shards
from neuclip.errors import RunFailed, UserError
from tests.builders.server import QUICK
from tests.data.small_shards import contents, write_shards


@pytest.mark.parametrize("fault", ["cut", "short", "fail"])
def test_what_goes_wrong_twice_is_tried_a_third_time(server, fault, cache):
    write_shards(server.folder, [3])
    server.faults["00000.tar"] = [fault, fault]
    source = open_source(f"{server.url}/00000.tar", limits=QUICK)
    assert [captions for _, captions in contents(source)] == [("image 0",), ("image 1",), ("image 2",)]
    assert not list((cache / "shards").glob(".*"))


def test_a_remote_that_stalls_is_left_and_asked_again(server):
    write_shards(server.folder, [3])
    server.faults["00000.tar"] = ["stall"]
    source = open_source(f"{server.url}/00000.tar", limits=Limits(stall_seconds=1, attempts=5, first_wait=0))
    assert len(contents(source)) == 3 and server.got["00000.tar"] >= 2


@pytest.mark.parametrize(
    ("fault", "stall", "kind", "words"),
    [
        ("stall", 0.2, RunFailed, "in 3 tries"),
        ("cut", 20, RunFailed, "in 3 tries"),
        ("short", 20, RunFailed, "5,120 of 10,240 bytes came"),
        ("fail", 20, RunFailed, "503"),
        ("gone", 20, UserError, "there is no such file"),
        ("deny", 20, UserError, "access is denied"),
    ],
)
def test_a_remote_that_never_works_ends_in_one_line_with_its_url(server, cache, fault, stall, kind, words):
    write_shards(server.folder, [3])
    server.spoil_everything(fault)
    with pytest.raises(kind) as raised:
        open_source(f"{server.url}/00000.tar?signature=secret", limits=Limits(10**9, stall, attempts=3, first_wait=0))
    message = str(raised.value)
    assert f"{server.url}/00000.tar: " in message and words in message and "secret" not in message
    assert "\n" not in message and not list((cache / "shards").glob("*.tar"))


def test_a_server_that_is_not_there_ends_in_one_line(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(RunFailed, match=r"00000\.tar: could not be fetched in 2 tries .*Connect"):
        open_source(f"{server.url}/00000.tar", limits=Limits(attempts=2, first_wait=0))


def test_bad_addresses_are_refused_in_one_line(server):
    for address, words in (
        ("nowhere://bucket/0.tar", "nowhere"),
        ("memory://empty", "no tar shards"),
        (f"{server.url}/", "no tar shards"),
        (f"{server.url}/{{0..2}}.tar", "there is no such file"),
    ):
        with pytest.raises(UserError, match=words) as raised:
            open_source(address, limits=QUICK)
        assert "--resume" not in str(raised.value)  # no run has begun
    assert is_remote("s3://bucket/x") and not is_remote("C:/x") and not is_remote("shards/x.tar")


@pytest.mark.parametrize(
    "address",
    [
        "reference://0.tar::file:///tmp/references.json",
        "reference://0.tar::file:///tmp/references.json]",  # as if :: were part of a host
        "http://[::1]/0.tar::file:///tmp/references.json",
        "file:///tmp/{a,b::file:///tmp/c}.tar",
        "reference://0.tar",
        "simplecache::https://h/0.tar",
        "sftp://h/0.tar",
        "S3://h/0.tar",
    ],
)
def test_no_address_and_no_line_of_a_list_reaches_file_systems_that_are_not_meant(address, tmp_path):
    with pytest.raises(UserError, match=r"not opened|several sources stand between commas"):
        open_source(address, limits=QUICK)
    (tmp_path / "shards.txt").write_text(f"{address}\n")
    with pytest.raises(UserError, match=r"not opened|no such file|does not exist"):
        open_source(str(tmp_path / "shards.txt"), limits=QUICK)
    with pytest.raises(UserError, match=r"not opened|no such file"):
        file_system(expand_braces(address)[-1], QUICK)


def test_a_host_with_colons_is_no_chain():
    system, path = file_system("http://[::1]:80/0.tar", QUICK)
    assert path == "http://[::1]:80/0.tar" and system.protocol == ("http", "https")


def test_an_endless_shard_ends_at_its_size_or_at_that_of_the_cache(server, cache):
    write_shards(server.folder, [3])
    server.faults = {"00000.tar": ["endless"] * 9, "unknown.tar": ["endless"] * 9}
    limits = Limits(cache_size=10_000_000, stall_seconds=20, attempts=2, first_wait=0)
    with pytest.raises(RunFailed, match="more than 10,240 bytes came"):
        open_source(f"{server.url}/00000.tar?sign=1", limits=limits)
    with pytest.raises(RunFailed, match=r"data\.cache_size 10,000,000 is too small: .*/unknown\.tar has .* or more"):
        open_source(f"{server.url}/unknown.tar?sign=1", limits=limits)
    assert not [file for file in (cache / "shards").iterdir() if file.is_file()]
    assert server.got["unknown.tar"] <= 2  # once for its size; trying again would not help
    with pytest.raises(RunFailed, match=r"data\.cache_size 10,000 is too small: .* has 10,240 bytes or more"):
        open_source(f"{server.url}/00000.tar?sign=1", limits=replace(limits, cache_size=10_000))


def test_a_shard_that_unpacks_to_more_than_the_cache_is_refused(server, cache):
    server.folder.joinpath("0.tar.gz").write_bytes(gzip.compress(bytes(20_000_000)))
    with pytest.raises(RunFailed, match=r"it unpacks to more than the 10,000,000 bytes of data\.cache_size"):
        open_source(f"{server.url}/0.tar.gz", limits=replace(QUICK, cache_size=10_000_000))
    assert not [file for file in (cache / "shards").iterdir() if file.is_file()]


@pytest.mark.parametrize("content", ["endless", "bomb", "damaged"])
def test_an_index_larger_than_its_shard_is_not_read_and_the_shard_is_indexed_here(server, content, capsys):
    write_shards(server.folder, [3])
    index = server.folder / "00000.tar.index.npz"
    if content == "endless":
        server.faults["00000.tar.index.npz"] = ["endless"] * 9
        index.write_bytes(b"")
    elif content == "bomb":
        np.savez_compressed(index, stamp=np.zeros(3, np.int64), rows=np.zeros(100_000_000, np.uint8))
    else:
        np.save(index.open("wb"), np.zeros(3))
    assert len(contents(open_source(f"{server.url}/00000.tar", limits=QUICK))) == 3
    assert server.sent < 100_000_000
    expected = "its index was damaged" if content == "damaged" else "its index has more than 1,048,576 bytes"
    assert expected in capsys.readouterr().err


def test_a_page_of_links_without_end_is_not_kept_in_memory(server, monkeypatch):
    monkeypatch.setattr("neuclip.data.tar.remote.MOST_LISTED_BYTES", 1_000_000)
    server.faults[""] = ["endless"] * 9
    with pytest.raises(UserError, match="is no page of links, more than 1,000,000 bytes came; give a pattern"):
        open_source(f"{server.url}/", limits=QUICK)


def test_a_remote_that_sends_a_byte_now_and_then_is_given_up(server):
    write_shards(server.folder, [3])
    server.faults["00000.tar"] = ["trickle"] * 9
    with pytest.raises(RunFailed, match=r"in 2 tries \(TimeoutError: fewer than 10,000 bytes per second came\)"):
        open_source(f"{server.url}/00000.tar?sign=1", limits=Limits(stall_seconds=0.5, attempts=2, first_wait=0))


@pytest.mark.parametrize("fault", ["", "cut", "fail", "gone", "deny", "endless"])
def test_no_message_shows_user_or_password(server, capfd, fault):
    write_shards(server.folder, [3])
    server.faults["00000.tar"] = [fault] * 9 if fault else []
    url = server.url.replace("://", "://me:SECRET@")
    try:
        source = open_source(f"{url}/00000.tar", limits=Limits(attempts=2, first_wait=0))
        shown = f"{source.name} {source.where(0)} {source.places()} {source.faults} {source.changes}"
    except (RunFailed, UserError) as error:
        shown = str(error)
    printed = capfd.readouterr()
    assert "SECRET" not in shown + printed.out + printed.err and "http://***@127.0.0.1" in shown


def test_a_folder_is_listed_one_level_deep_without_hidden_files_and_packed_twins():
    memory = fsspec.filesystem("memory")
    for name in ("b.tar", "b.tar.gz", "b.tgz", "a/0.tar", "a/b/too-deep.tar", ".c.tar", "notes.txt", "b.tar.index.npz"):
        memory.pipe_file(f"/listed/{name}", b"x")
    found = remote_shards("memory://listed/", QUICK)
    assert [shard.url for shard in found] == ["memory:///listed/a/0.tar", "memory:///listed/b.tar"]
    assert [shard.index_beside for shard in found] == [False, True] and found[0].size == 1
    memory.rm("/listed", recursive=True)


class Refusing(fsspec.AbstractFileSystem):
    """Says what s3fs says: an error of Python's, whose cause is botocore's."""

    protocol = "refusing"
    cachable = False
    tries = 0

    def info(self, path, **options):
        Refusing.tries += 1
        kind = {"denied": PermissionError, "missing": FileNotFoundError}[path.strip("/").partition("/")[0]]
        raise kind("what was wrong") from RuntimeError("NoSuchBucket or AccessDenied")


@pytest.mark.parametrize(
    ("bucket", "words"), [("denied", "access is denied"), ("missing", "there is no such file")], ids=str
)
def test_a_bucket_that_is_missing_or_closed_is_asked_once(bucket, words, monkeypatch):
    monkeypatch.setattr("neuclip.data.locations.PROTOCOLS", ("refusing", *PROTOCOLS))
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    Refusing.tries = 0
    with pytest.raises(UserError, match=rf"refusing://{bucket}/0\.tar: {words}"):
        open_source(f"refusing://{bucket}/0.tar", limits=QUICK)
    assert Refusing.tries == 1
