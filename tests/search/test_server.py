"""The page's server answers its own page and refuses everybody else."""

from __future__ import annotations

import json
import os
from io import BytesIO
from urllib.parse import urlsplit

import pytest
from PIL import Image

from tests.builders.images import image_bytes
from tests.search.serving import ask, page_of

JSON = "application/json"


@pytest.fixture
def address(built, photos):
    (photos / "zz broken.png").write_bytes(b"no image")
    with page_of({"first": built, "second": built}, photos) as address:
        yield address


def test_text_image_and_more_like_this_are_answered_for_every_model(address):
    status, body, _ = ask(f"{address}search", json.dumps({"text": "a red circle"}).encode(), content_type=JSON)
    models = json.loads(body)["models"]
    assert status == 200 and [model["name"] for model in models] == ["first", "second"]
    assert len(models[0]["matches"]) == 5 and models[0]["matches"] == models[1]["matches"]
    assert set(models[0]["matches"][0]) == {"id", "path", "score"}
    uploaded = json.loads(ask(f"{address}search", image_bytes(3), content_type="image/png")[1])["models"][0]
    assert uploaded["matches"][0]["path"].startswith("03 ") and uploaded["matches"][0]["score"] > 0.999
    like = json.dumps({"like": uploaded["matches"][0]["id"]}).encode()
    assert json.loads(ask(f"{address}search", like, content_type=JSON)[1])["models"][0] == uploaded


def test_a_folder_and_files_whose_names_are_not_text_are_searched(built, photos):
    folder = photos.parent / os.fsdecode(b"\xe9t\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(image_bytes(3))
    with page_of({"first": built}, folder) as address:
        assert "<h1>\ufffdt\ufffd</h1>" in ask(address)[1].decode()
        status, body, _ = ask(f"{address}search", json.dumps({"text": "a red circle"}).encode(), content_type=JSON)
    assert status == 200 and json.loads(body)["models"][0]["matches"][0]["path"] == "caf\ufffd.png"


def test_images_are_sent_by_number_re_encoded_and_small(address, photos):
    Image.new("RGB", (3000, 1000), "red").save(photos / "00 a red circle.png")  # changed after it was listed
    status, body, headers = ask(f"{address}image/small/0")
    image = Image.open(BytesIO(body))
    assert status == 200 and headers["content-type"] == "image/jpeg" and image.format == "JPEG"
    assert image.size == (320, 107)
    assert Image.open(BytesIO(ask(f"{address}image/large/0")[1])).size == (1600, 533)


@pytest.mark.parametrize(
    "path",
    ["image/small/13", "image/small/-1", "image/small/12", "image/huge/0", "image/small/..%2f..%2fnotes.txt", "x"],
)
def test_nothing_else_can_be_asked_for(address, path):
    status, body, _ = ask(address + path)
    assert status == 404 and b"not an image" not in body


def test_a_request_without_the_token_is_refused(address):
    place = urlsplit(address)
    root = f"{place.scheme}://{place.netloc}"
    for path in ("/", "/search", "/image/small/0", address[:-2].removeprefix(root) + "/", "//" + place.path):
        status, body, _ = ask(root + path)
        assert status == 403 and body.startswith(b"refused")


@pytest.mark.parametrize("headers", [{"host": "elsewhere.example"}, {"origin": "http://elsewhere.example"}])
def test_a_page_elsewhere_is_refused_even_with_the_token(address, headers):
    for path in ("", "image/small/0"):
        assert ask(address + path, **headers)[0] == 403
    assert ask(f"{address}search", b"{}", content_type=JSON, **headers)[0] == 403


def test_the_page_lets_the_browser_load_nothing_from_elsewhere(address):
    status, body, headers = ask(address)
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"  # the token is in the address
    assert b"http://" not in body and b"https://" not in body
    assert b"12 images, 1 more could not be used" in body


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"no image", "image/png", "does not decode"),
        (b"", "image/png", "image is empty"),
        (b'{"text": " "}', JSON, "the query is empty"),
        (b'{"text": 3}', JSON, "not a text"),
        (b'{"like": 999}', JSON, "not a text"),
        (b'{"like": 12}', JSON, "does not decode"),
        (b"[1]", JSON, "not a JSON object"),
        (b"{", JSON, "not a JSON object"),
        (json.dumps({"text": "x" * 10_001}).encode(), JSON, "at most 10,000 letters"),
    ],
)
def test_a_query_that_cannot_be_answered_says_why(address, body, kind, words):
    status, answer, _ = ask(f"{address}search", body, content_type=kind)
    assert status == 400 and words in json.loads(answer)["error"]


def test_an_upload_without_end_is_cut_off(address, monkeypatch):
    monkeypatch.setattr("neuclip.search.server.LARGEST_UPLOAD", 1 << 20)
    status, answer, _ = ask(f"{address}search", b"\0" * (2 << 20), content_type="image/png")
    assert status == 400 and "larger than 1 MB" in json.loads(answer)["error"]
