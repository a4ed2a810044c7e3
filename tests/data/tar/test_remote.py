"""A remote that stalls, cuts off, fails or refuses is asked again or ends in one line; listing finds shards."""

from __future__ import annotations

import fsspec
import pytest

from neuclip.data.locations import is_remote
from neuclip.data.open import open_source
from neuclip.data.tar.remote import Limits, remote_shards
from neuclip.errors import RunFailed, UserError
from tests.data.small_shards import contents, write_shards
from tests.misbehaving_server import QUICK


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
def test_a_bucket_that_is_missing_or_closed_is_asked_once(bucket, words):
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    Refusing.tries = 0
    with pytest.raises(UserError, match=rf"refusing://{bucket}/0\.tar: {words}"):
        open_source(f"refusing://{bucket}/0.tar", limits=QUICK)
    assert Refusing.tries == 1
