"""Every image and every different text is embedded once, in eval mode; what cannot be used is left out and named."""

from __future__ import annotations

import json

import pytest
import torch

from neuclip.data.open import open_source
from neuclip.errors import RunFailed
from neuclip.evaluation.embedding import EmbeddedPairs, Embedder
from neuclip.models.build import build_model
from tests.builders.processes import threads
from tests.evaluation.colour_shards import colour_image, write_samples
from tests.evaluation.small_towers import ColourTowers, colour_embedder

PAIRS = ["red", "blue", "red", "lime", "blue", "red", "red"]  # lime is full green
CAPTIONS = ["red thing", "blue thing", "red thing", "green thing", "blue thing", "red sofa", "red thing"]


def source_of(folder):
    pairs = zip(PAIRS, CAPTIONS, strict=True)
    samples = [{"png": colour_image(colour), "txt": text.encode()} for colour, text in pairs]
    return open_source(str(write_samples(folder / "pairs.tar", samples)))


def several(folder):
    """Three images, the third equal to the first; five captions, the texts of two are equal."""
    captions = [["red thing", "red sofa"], ["blue thing"], ["red sofa", "a red dress"]]
    samples = [
        {"png": colour_image(colour), "json": json.dumps({"caption": texts}).encode()}
        for colour, texts in zip(["red", "blue", "red"], captions, strict=True)
    ]
    return open_source(str(write_samples(folder / "several.tar", samples)))


def embed(towers, source, workers=0) -> EmbeddedPairs:
    return colour_embedder(towers, workers=workers).embed_pairs(source, "embedding")


def test_every_different_caption_is_embedded_once_and_belongs_to_its_image(tmp_path):
    towers = ColourTowers()
    embedded = embed(towers, source_of(tmp_path))
    assert embedded.texts == ["red thing", "blue thing", "green thing", "red sofa"]
    assert embedded.caption_text.tolist() == [0, 1, 0, 2, 1, 3, 0] == embedded.first_text.tolist()
    assert towers.encoded_texts == len(embedded.text_features) == 4 and embedded.ids.tolist() == list(range(7))
    assert (embedded.image_features * embedded.text_features[embedded.caption_text]).sum(dim=1).min() > 0.99
    assert not embedded.image_features.requires_grad and not embedded.text_features.requires_grad


@pytest.mark.parametrize("ranks", [2, 4])  # of four, one has nothing to embed
def test_worker_processes_and_ranks_change_nothing(ranks, tmp_path):
    source = source_of(tmp_path)
    alone = embed(ColourTowers(), source)
    others = threads(ranks, lambda _: embed(ColourTowers(), source))
    for found in [embed(ColourTowers(), source, workers=2), *others] if ranks == 2 else others:
        assert torch.equal(found.image_features, alone.image_features) and torch.equal(found.ids, alone.ids)
        assert torch.equal(found.text_features, alone.text_features) and found.texts == alone.texts


def test_bad_images_and_images_without_a_caption_are_left_out_and_named(tmp_path):
    bare = {"png": colour_image("red"), "cls": b"0"}
    spoilt = {"png": b"no image", "txt": b"green thing"}
    sound = {"png": colour_image("blue"), "txt": b"blue"}
    embedded = embed(ColourTowers(), open_source(str(write_samples(tmp_path / "a.tar", [bare, sound, spoilt, sound]))))
    assert embedded.ids.tolist() == [1, 3] and embedded.caption_image.tolist() == [0, 1]
    assert embedded.texts == ["blue"]  # a caption whose image is bad is no query
    reasons = {fault.id: fault.reason for fault in embedded.faults}
    assert reasons == {0: "caption is missing", 2: "image does not decode"}


def test_an_image_comes_with_all_its_captions_or_with_the_first(tmp_path):
    embedded = embed(ColourTowers(), several(tmp_path))
    assert embedded.texts == ["red thing", "red sofa", "blue thing", "a red dress"]
    assert embedded.caption_image.tolist() == [0, 0, 1, 2, 2] and embedded.caption_text.tolist() == [0, 1, 2, 1, 3]
    assert embedded.first_text.tolist() == [0, 2, 1]
    first = colour_embedder().embed_pairs(several(tmp_path), "embedding", first_caption_only=True)
    assert first.texts == ["red thing", "blue thing", "red sofa"]
    assert first.caption_image.tolist() == first.caption_text.tolist() == first.first_text.tolist() == [0, 1, 2]


def test_towers_embed_in_eval_mode_and_every_part_gets_its_mode_back(tmp_path):
    towers = ColourTowers()
    towers.locked.eval()
    embed(towers, source_of(tmp_path))
    assert towers.modes == [False] * 2  # the third batch has no image that the others did not have
    assert towers.training and towers.map.training and not towers.locked.training


def test_towers_with_broken_weights_give_no_features(tmp_path):
    towers = ColourTowers()
    torch.nn.init.constant_(towers.map.weight, float("nan"))
    with pytest.raises(RunFailed, match="image features on pairs: 3 of 3 rows are not finite, the first is row 0"):
        embed(towers, source_of(tmp_path))


def test_cached_images_and_texts_are_not_embedded_again(tmp_path):
    towers = ColourTowers()
    embedder = colour_embedder(towers)
    first = embedder.embed_pairs(several(tmp_path), "embedding")
    assert (towers.encoded_images, towers.encoded_texts) == (2, 4)
    images = embedder.embed_images(source_of(tmp_path), "embedding")  # red, blue, and lime, which is new
    texts = embedder.embed_texts(["blue thing", "green", "red thing", "green"], "embedding")
    assert (towers.encoded_images, towers.encoded_texts) == (3, 5)
    alone = colour_embedder()
    assert torch.equal(images.features, alone.embed_images(source_of(tmp_path), "embedding").features)
    assert torch.equal(texts, alone.embed_texts(["blue thing", "green", "red thing", "green"], "embedding"))
    again = embedder.embed_pairs(several(tmp_path), "embedding")
    assert torch.equal(first.image_features, again.image_features)
    assert torch.equal(first.text_features, again.text_features)
    assert embedder.embed_texts([], "embedding").shape == (0, 3)


def test_memory_is_bounded_by_the_features_of_a_set(monkeypatch):
    monkeypatch.setattr("neuclip.evaluation.embedding.MOST_KNOWN", 3)
    towers = ColourTowers()
    embedder = colour_embedder(towers)
    embedder.embed_texts(["red", "blue", "green", "red blue"], "embedding")
    embedder.embed_texts(["red"], "embedding")
    assert towers.encoded_texts == 5  # four were too many to keep


def test_texts_come_back_in_their_order_whatever_their_length(monkeypatch):
    monkeypatch.setattr("neuclip.evaluation.embedding.SORTED_TOGETHER", 5)
    built = build_model("tiny")
    texts = [f"{'very ' * (number * 7 % 5)}small thing number {number}" for number in range(13)]
    embedded = Embedder(built, batch_size=3, workers=0).embed_texts(texts, "embedding")
    with torch.no_grad():
        for text, features in zip(texts, embedded, strict=True):
            alone = built.towers.model.eval().encode_text(built.tokenize([text]), normalize=True)[0]
            assert torch.allclose(features, alone, atol=1e-5)
