from __future__ import annotations

import pytest
import torch

from neuclip.data.open import open_source
from neuclip.data.sample import Fault
from neuclip.errors import RunFailed
from neuclip.evaluation.embedding import EmbeddedPairs, TooManyBad
from neuclip.evaluation.retrieval import recall
from tests.evaluation.colour_shards import colour_image, write_samples
from tests.evaluation.small_towers import ColourTowers, colour_embedder

PAIRS = ["red", "blue", "red", "lime", "blue", "red", "red"]  # lime is full green
CAPTIONS = ["red thing", "blue thing", "red thing", "green thing", "blue thing", "red sofa", "red thing"]


def source_of(folder, **changed):
    samples = [
        {"png": colour_image(colour), "txt": text.encode()} for colour, text in zip(PAIRS, CAPTIONS, strict=True)
    ]
    for number, members in changed.items():
        samples[int(number.removeprefix("sample_"))] |= members
    return open_source(str(write_samples(folder / "pairs.tar", samples)))


def embed(towers, source, workers=0) -> EmbeddedPairs:
    return colour_embedder(towers, workers=workers).embed_pairs(source, "embedding")


def test_every_different_caption_is_embedded_once_in_order_of_appearance(tmp_path):
    towers = ColourTowers()
    embedded = embed(towers, source_of(tmp_path))
    assert embedded.texts == ["red thing", "blue thing", "green thing", "red sofa"]
    assert embedded.caption_text.tolist() == [0, 1, 0, 2, 1, 3, 0] == embedded.first_text.tolist()
    assert towers.encoded_texts == len(embedded.text_features) == 4
    assert embedded.ids.tolist() == list(range(7))


def test_features_are_those_of_the_pair_they_stand_for(tmp_path):
    embedded = embed(ColourTowers(), source_of(tmp_path))
    assert (embedded.image_features * embedded.text_features[embedded.caption_text]).sum(dim=1).min() > 0.99
    assert recall(embedded)["image_to_text_recall_at_5"] == 1


def test_worker_processes_change_nothing(tmp_path):
    alone, helped = (embed(ColourTowers(), source_of(tmp_path), workers) for workers in (0, 2))
    assert torch.equal(alone.image_features, helped.image_features) and torch.equal(alone.ids, helped.ids)


def test_bad_images_are_left_out_and_named(tmp_path):
    embedded = embed(ColourTowers(), source_of(tmp_path, sample_3={"png": b"no image"}))
    assert embedded.ids.tolist() == [0, 1, 2, 4, 5, 6]
    assert [fault.id for fault in embedded.faults] == [3]
    assert "green thing" not in embedded.texts  # a caption whose image is bad is no query


def test_towers_embed_in_eval_mode_and_every_part_gets_its_mode_back(tmp_path):
    towers = ColourTowers()
    towers.locked.eval()
    embed(towers, source_of(tmp_path))
    assert towers.modes == [False] * 2  # the third batch has no image that the others did not have
    assert towers.training and towers.map.training and not towers.locked.training


def test_no_gradient_is_kept(tmp_path):
    embedded = embed(ColourTowers(), source_of(tmp_path))
    assert not embedded.image_features.requires_grad and not embedded.text_features.requires_grad


def test_towers_with_broken_weights_give_no_features(tmp_path):
    towers = ColourTowers()
    torch.nn.init.constant_(towers.map.weight, float("nan"))
    with pytest.raises(RunFailed, match="not finite"):
        embed(towers, source_of(tmp_path))


def faults(count):
    return [Fault(id, "image does not decode", f"a.tar: {id}.png") for id in range(count)]


@pytest.fixture
def twenty(tmp_path):
    return open_source(str(write_samples(tmp_path / "a.tar", [{"png": colour_image("red"), "txt": b"red"}] * 20)))


def test_the_share_is_exact(twenty):
    colour_embedder(max_bad_share=0.05).refuse_bad_set(twenty, faults(1))
    with pytest.raises(TooManyBad, match=r"^a: 2 of 20 samples cannot be used \(10.0%, data.max_bad_share is 5.0%\)"):
        colour_embedder(max_bad_share=0.05).refuse_bad_set(twenty, faults(2))


def test_a_set_of_which_nothing_is_left_is_refused_whatever_is_allowed(twenty):
    colour_embedder(max_bad_share=1.0).refuse_bad_set(twenty, faults(19))
    with pytest.raises(TooManyBad):
        colour_embedder(max_bad_share=1.0).refuse_bad_set(twenty, faults(20))
