"""An index embeds each image once, follows the folder, and survives an interruption at any batch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from neuclip.errors import UserError
from neuclip.models.build import BuiltModel
from neuclip.search import index
from neuclip.search.folder import SearchedFolder
from neuclip.search.index import open_index
from neuclip.search.searcher import Searcher
from tests.builders.images import image_bytes


class Counting:
    """The model's own transform, which remembers how often it was used, and may fail."""

    def __init__(self, built: BuiltModel, fail_at: int = 0):
        self.transform, self.calls, self.fail_at = built.transform, 0, fail_at

    def __call__(self, image):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        return self.transform(image)


def opened(built: BuiltModel, folder: Path) -> tuple[index.Index, int, SearchedFolder]:
    """The index, how many images were embedded for it, and the folder."""
    counting = Counting(built)
    searched = SearchedFolder.open(folder)
    return open_index(replace(built, transform=counting), searched, "tiny"), counting.calls, searched


@torch.no_grad()
def expected(built: BuiltModel, folder: SearchedFolder) -> np.ndarray:
    """Image by image through open_clip's own transform."""
    built.towers.eval()
    images = [Image.open(folder.path / file.path) for file in folder.files]
    return torch.cat([built.towers.encode_image(built.float_transform(image)[None]) for image in images]).numpy()


def test_features_are_those_of_the_model_image_by_image(built, photos):
    found, calls, folder = opened(built, photos)
    assert calls == len(folder.files) == 12 and found.features.dtype == np.float32
    assert isinstance(found.features, np.memmap)
    np.testing.assert_allclose(found.features[found.row_of], expected(built, folder), atol=1e-5)


def test_a_second_search_embeds_nothing(built, photos):
    first, _, _ = opened(built, photos)
    second, calls, _ = opened(built, photos)
    assert calls == 0
    assert np.array_equal(first.features, second.features) and np.array_equal(first.row_of, second.row_of)


def test_only_what_is_new_or_changed_is_embedded_and_what_is_gone_is_not_found(built, photos):
    opened(built, photos)
    names = sorted(path.name for path in photos.glob("*.png"))
    (photos / names[0]).unlink()
    (photos / names[1]).write_bytes(image_bytes(40))
    os.utime(photos / names[1], ns=(1, 1))
    (photos / "new.png").write_bytes(image_bytes(41))
    found, calls, folder = opened(built, photos)
    assert calls == 2 and len(folder.files) == 12
    np.testing.assert_allclose(found.features[found.row_of], expected(built, folder), atol=1e-5)


def test_other_weights_and_another_folder_have_indexes_of_their_own(built, photos, tmp_path):
    opened(built, photos)
    other = tmp_path / "other"
    other.mkdir()
    for path in photos.glob("*.png"):
        (other / path.name).write_bytes(path.read_bytes())
    assert opened(built, other)[1] == 11
    weight = next(built.towers.model.visual.parameters())
    with torch.no_grad():
        weight += 1e-3
        try:
            assert opened(built, photos)[1] == 12
        finally:
            weight -= 1e-3


def test_an_interrupted_index_goes_on_where_it_was(built, photos, monkeypatch):
    monkeypatch.setattr(index, "BATCH", 4)
    folder = SearchedFolder.open(photos)
    with pytest.raises(KeyboardInterrupt):
        open_index(replace(built, transform=Counting(built, fail_at=11)), folder, "tiny")
    (features,), (files,) = cache_files("features-*.f32"), cache_files("files.jsonl")
    with features.open("ab") as file:
        file.write(b"half a row")  # as after a kill in the middle of a batch
    with files.open("a") as file:
        file.write('{"path": "half a li')
    found, calls, _ = opened(built, photos)
    assert 4 <= calls <= 8
    np.testing.assert_allclose(found.features[found.row_of], expected(built, folder), atol=1e-5)
    assert opened(built, photos)[1] == 0


def test_features_that_are_cut_off_are_made_again(built, photos):
    opened(built, photos)
    (features,) = cache_files("features-*.f32")
    os.truncate(features, features.stat().st_size // 2 + 3)
    found, calls, folder = opened(built, photos)
    assert calls == 6
    np.testing.assert_allclose(found.features[found.row_of], expected(built, folder), atol=1e-5)


@pytest.mark.parametrize("damage", ["", "nonsense\n", '{"features": "gone.f32", "width": 128}\n', "[]\n"])
def test_a_damaged_index_is_made_again(built, photos, damage):
    opened(built, photos)
    (files,) = cache_files("files.jsonl")
    files.write_text(damage)
    found, calls, folder = opened(built, photos)
    assert calls == 12
    np.testing.assert_allclose(found.features[found.row_of], expected(built, folder), atol=1e-5)


def test_an_index_of_mostly_removed_images_shrinks(built, photos):
    opened(built, photos)
    (before,) = cache_files("features-*.f32")
    for path in sorted(photos.glob("*.png"))[:8]:
        path.unlink()
    (photos / "bad.png").write_bytes(b"broken")
    found, calls, folder = opened(built, photos)
    (after,) = cache_files("features-*.f32")
    assert calls == 0 and after != before and after.stat().st_size == 4 * 4 * built.embed_dim
    good = replace(folder, files=tuple(file for file in folder.files if file.path != "bad.png"))
    np.testing.assert_allclose(found.features[found.row_of[found.row_of >= 0]], expected(built, good), atol=1e-5)
    assert found.usable == 4 and [fault.reason for fault in found.faults] == ["image does not decode"]
    assert opened(built, photos)[1] == 0


def test_bad_images_are_named_never_found_and_not_read_again(built, photos):
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff no jpeg")
    (photos / "empty.png").write_bytes(b"")
    (photos / "phone.heic").write_bytes(b"of a kind that is not read")
    (photos / "gone.png").symlink_to(photos / "nowhere.png")
    for _ in range(2):
        found, _, folder = opened(built, photos)
        faults = {Path(fault.where).name: fault.reason for fault in found.faults}
        assert faults == {
            "broken.jpg": "image does not decode",
            "empty.png": "image is empty",
            "gone.png": "image file cannot be read",
            "phone.heic": "kind of image is not read",
        }
    shown = Searcher("tiny", built, folder, found).by_text("a red circle", top=100)
    assert len(shown) == found.usable == 12 and not {match.path for match in shown} & faults.keys()


def test_the_best_matches_come_first_by_brute_force(built, photos):
    found, _, folder = opened(built, photos)
    searcher = Searcher("tiny", built, folder, found)
    with torch.no_grad():
        query = built.towers.encode_text(built.tokenize(["a blue bar"]))[0].double().numpy()
    cosines = expected(built, folder).astype(np.float64) @ query
    matches = searcher.by_text("a blue bar", top=5)
    assert [match.id for match in matches] == np.argsort(-cosines)[:5].tolist()
    np.testing.assert_allclose([match.score for match in matches], np.sort(cosines)[::-1][:5], atol=1e-5)
    assert [folder.files[match.id].path for match in matches] == [match.path for match in matches]
    own = searcher.by_image(folder.read(7), top=1)
    assert own[0].id == 7 and own[0].score == pytest.approx(1, abs=1e-5)


def test_a_query_without_words_and_a_folder_without_images_are_one_line(built, photos, tmp_path):
    found, _, folder = opened(built, photos)
    with pytest.raises(UserError, match="the query is empty"):
        Searcher("tiny", built, folder, found).by_text("  ", top=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no images in it or below"):
        SearchedFolder.open(tmp_path / "empty")


def cache_files(pattern: str) -> list[Path]:
    return sorted(Path(os.environ["NEUCLIP_CACHE"], "search").glob(f"*/{pattern}"))
