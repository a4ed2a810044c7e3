from __future__ import annotations

import base64
import io
import json

import torch
import torch.nn.functional as F
from PIL import Image

from neuclip.data.open import open_source
from neuclip.evaluation.embedding import EmbeddedPairs
from neuclip.evaluation.gallery import gallery, thumbnail
from tests.evaluation.colour_shards import colour_image, write_samples

CAPTION_OF = torch.tensor([0, 0, 1, 2, 3, 4, 4, 5])
CAPTIONS = [f"caption {c}" for c in range(6)]


def make_gallery(folder, *, ids=None, **changes):
    samples = [{"png": colour_image("red", (16, 16 + i)), "txt": b"x"} for i in range(9)]
    source = open_source(str(write_samples(folder / "held-out.tar", samples)))
    generator = torch.Generator().manual_seed(2)
    image, text = (F.normalize(torch.randn(n, 4, generator=generator), dim=1) for n in (8, 6))
    ids = torch.arange(8) if ids is None else ids
    pairs = EmbeddedPairs(image, text, CAPTIONS, torch.arange(8), CAPTION_OF, ids, faults=())
    return gallery(pairs, source, **{"count": 5, "top": 3, "seed": 1} | changes), image, text


def image_height(uri: str) -> int:
    return open_uri(uri).height


def open_uri(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.split("base64,")[1])))


def test_matches_are_the_highest_scores_and_right_where_the_caption_is_the_own(tmp_path):
    shown, image, text = make_gallery(tmp_path)
    for query in shown["image_to_text"]:
        row = image_height(query["image"]) - 16
        scores = image[row] @ text.T
        order = scores.argsort(descending=True).tolist()
        assert query["caption"] == CAPTIONS[CAPTION_OF[row]]
        assert [match["caption"] for match in query["matches"]] == [CAPTIONS[c] for c in order[:3]]
        assert query["rank"] == order.index(int(CAPTION_OF[row])) + 1
        assert [match["right"] for match in query["matches"]] == [query["rank"] == place for place in (1, 2, 3)]


def test_a_caption_is_right_with_any_of_its_images(tmp_path):
    shown, image, text = make_gallery(tmp_path, count=6, top=8)
    for query in shown["text_to_image"]:
        caption = CAPTIONS.index(query["caption"])
        order = (text[caption] @ image.T).argsort(descending=True).tolist()
        assert [image_height(match["image"]) - 16 for match in query["matches"]] == order
        right = [int(CAPTION_OF[row]) == caption for row in order]
        assert [match["right"] for match in query["matches"]] == right
        assert query["rank"] == right.index(True) + 1


def test_queries_are_the_same_for_the_same_seed_and_differ_within(tmp_path):
    first, second, other = (make_gallery(tmp_path, seed=seed)[0] for seed in (1, 1, 5))
    assert first == second != other
    assert len({query["caption"] for query in first["text_to_image"]}) == 5


def test_images_are_looked_up_by_the_ids_of_the_source(tmp_path):
    shown, _, _ = make_gallery(tmp_path, ids=torch.arange(8) + 1, count=8)
    assert {image_height(query["image"]) - 16 for query in shown["image_to_text"]} == set(range(1, 9))


def test_it_is_plain_json_and_shows_at_most_all_queries(tmp_path):
    shown, _, _ = make_gallery(tmp_path, count=100)
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown and shown["dataset"] == "held-out"
    assert (len(shown["image_to_text"]), len(shown["text_to_image"])) == (8, 6)


def test_thumbnails_are_small_and_keep_their_proportions():
    assert open_uri(thumbnail(colour_image("red", (400, 200)))).size == (96, 48)


def test_a_transparent_ground_becomes_white():
    file = io.BytesIO()
    Image.new("RGBA", (20, 20), (0, 0, 0, 0)).save(file, "PNG")
    assert min(open_uri(thumbnail(file.getvalue())).convert("RGB").getpixel((10, 10))) > 250
