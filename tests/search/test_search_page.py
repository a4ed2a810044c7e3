"""The page's server answers its own page, refuses everybody else, and has one clean answer to whatever comes."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import replace
from io import BytesIO

import pytest
from PIL import Image

from neuclip.errors import RunFailed
from tests.builders.images import image_bytes
from tests.search.conftest import draw_photos
from tests.search.serving import ask, page_of

JSON = "application/json"


FAILURES = {"full": RunFailed("the disk is full"), "bug": ZeroDivisionError("a bug")}


@pytest.fixture(scope="module")
def page(built, tmp_path_factory):
    """Of two models, over 12 good images and one that does not decode. Words of FAILURES make the second fail."""
    photos = draw_photos(tmp_path_factory.mktemp("page") / "photos")
    (photos / "zz broken.png").write_bytes(b"no image")

    def tokenize(texts):
        if texts[0] in FAILURES:
            raise FAILURES[texts[0]]
        return built.tokenize(texts)

    with page_of({"first": built, "second": replace(built, tokenize=tokenize)}, photos) as page:
        yield page


def search(page, **query):
    return ask(page, "search", json.dumps(query).encode(), content_type=JSON)


def test_text_image_and_more_like_this_are_answered_for_every_model(page):
    answer = search(page, text="a red circle")
    models = json.loads(answer.body)["models"]
    assert answer.status == 200 and [model["name"] for model in models] == ["first", "second"]
    best = page.searchers[0].by_text("a red circle", top=5)
    assert models[0]["matches"] == models[1]["matches"] == [match._asdict() for match in best]
    uploaded = json.loads(ask(page, "search", image_bytes(3), content_type="image/png").body)["models"][0]
    assert uploaded["matches"][0]["path"].startswith("03 ") and uploaded["matches"][0]["score"] > 0.999
    assert json.loads(search(page, like=uploaded["matches"][0]["id"]).body)["models"][0] == uploaded


def test_a_folder_and_files_whose_names_are_no_utf8_are_searched(built, tmp_path):
    folder = tmp_path / os.fsdecode(b"\xe9t\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(image_bytes(3))
    (folder / os.fsdecode(b"\xff.png")).write_bytes(b"no image")
    with page_of({os.fsdecode(b"mod\xe8le"): built}, folder) as page:
        shown = ask(page, "").body.decode()
        assert "<h1>\ufffdt\ufffd</h1>" in shown and "mod\ufffdle</h2>" in shown
        answer = search(page, text="caf\udce9")
        assert json.loads(answer.body)["models"][0]["matches"][0]["path"] == "caf\ufffd.png"
        assert search(page, like=1).body.decode().startswith("\ufffd.png cannot be opened (image does not decode)")
        assert ask(page, "image/small/0").status == 200


def test_images_are_sent_by_number_small_and_as_people_see_them(built, tmp_path):
    Image.new("RGB", (3000, 1000), "red").save(tmp_path / "a wide.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    Image.new("RGB", (40, 20), "red").save(tmp_path / "b turned.jpg", exif=exif)
    Image.new("RGBA", (9, 9), (0, 0, 0, 0)).save(tmp_path / "c clear.png")
    damaged = exif.tobytes()[:-3]
    Image.new("RGB", (40, 20), "red").save(tmp_path / "d damaged exif.jpg", exif=damaged)
    with page_of({"first": built}, tmp_path) as page:
        answers = [ask(page, f"image/{size}/{id}") for size, id in [("small", 0), ("large", 0), ("small", 1)]]
        assert [Image.open(BytesIO(answer.body)).size for answer in answers] == [(320, 107), (1600, 533), (20, 40)]
        assert answers[0].headers["content-type"] == "image/jpeg" and answers[0].body.startswith(b"\xff\xd8")
        assert Image.open(BytesIO(ask(page, "image/small/2").body)).getpixel((4, 4)) == (255, 255, 255)
        with warnings.catch_warnings(action="error"):  # none is for the terminal
            assert ask(page, "image/small/3").status == 200


NOT_THERE = ["/", "x", "search", "../notes.txt", "image/huge/0", "image/small/1.0", "image/small/..%2f..%2fnotes.txt"]
NO_IMAGES = ["12", "13", "-1", "9" * 5000]  # does not decode, is none, is none, more digits than Python reads


@pytest.mark.parametrize("path", [*NOT_THERE, *(f"image/small/{number}" for number in NO_IMAGES)])
def test_other_paths_are_not_found(page, path):
    answer = ask(page, path)
    assert answer.status == 404 and b"not an image" not in answer.body


def test_a_request_without_the_token_is_refused(page):
    token = page.token
    for path in (
        "/",
        "/search",
        "/image/small/0",
        f"/{token[:-1]}/",
        f"/x/{token}/",
        token,
        "x",
        "*",
        "?",
        "http://x/",
    ):
        for body in (None, b"{}"):
            answer = ask(page, f" {path}", body)
            assert answer.status == 403 and answer.body.startswith(b"refused; open the whole address"), path


def test_the_address_without_its_last_slash_leads_to_the_page(page):
    answer = ask(page, f" /{page.token}")
    assert answer.status == 308 and answer.headers["location"] == page.address
    assert ask(page, "?utm=1").status == 200


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "DELETE", "NONSENSE"])
def test_other_methods_get_a_plain_answer(page, method):
    for path in (" *", ""):
        answer = ask(page, path, method=method)
        assert answer.status == 501 and answer.headers["content-type"].startswith("text/plain")
    assert ask(page, "").status == 200


@pytest.mark.parametrize(
    "headers",
    [{"host": "elsewhere.example"}, {"host": "127.0.0.1"}, {"origin": "http://elsewhere.example"}, {"origin": "null"}],
)
def test_a_page_elsewhere_is_refused_even_with_the_token(page, headers):
    for path in ("", "image/small/0"):
        assert ask(page, path, **headers).status == 403
    assert ask(page, "search", b'{"text": "red"}', content_type=JSON, **headers).status == 403


def test_every_answer_lets_the_browser_load_nothing_from_elsewhere(page):
    for answer in (ask(page, ""), ask(page, "x"), ask(page, " /"), ask(page, "", method="PUT")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"  # the token is in the address
        assert answer.headers["x-content-type-options"] == "nosniff"
    shown = ask(page, "").body
    assert b"http://" not in shown and b"https://" not in shown
    assert b"12 images, 1 more could not be used" in shown and page.server_address[0] == "127.0.0.1"


BAD_QUERIES = {
    b'{"text": " "}': "the query is empty",
    b'{"text": 3}': "must be a text",
    b'{"like": 999}': "must be a text",
    b'{"like": true}': "must be a text",
    b'{"like": ' + b"9" * 5000 + b"}": "not a JSON object",
    b'{"like": 12}': "zz broken.png cannot be opened (image does not decode)",
    b"[1]": "not a JSON object",
    b"[" * 100_000: "not a JSON object",
    b"\xff": "not a JSON object",
    json.dumps({"text": "x" * 10_001}).encode(): "at most 10,000 characters",
}
BAD_IMAGES = {b"no image": "image does not decode; give a JPEG", b"": "image is empty"}


@pytest.mark.parametrize(("kind", "queries"), [(JSON, BAD_QUERIES), ("image/png", BAD_IMAGES)])
def test_a_query_that_cannot_be_answered_says_why(page, kind, queries):
    for body, words in queries.items():
        answer = ask(page, "search", body, content_type=kind)
        assert answer.status == 400 and words in answer.body.decode(), body[:20]


def test_an_upload_above_the_limit_gets_an_answer_whatever_its_size(page, monkeypatch):
    monkeypatch.setattr("neuclip.search.server.LARGEST_UPLOAD", 1 << 20)
    for size in ((1 << 20) + 1, 24 << 20):  # more than the connection buffers: who is cut off sees no answer
        answer = ask(page, "search", b"\0" * size, content_type="image/png")
        assert answer.status == 413 and b"larger than 1 MB" in answer.body
    assert ask(page, "search", b"", content_length="9" * 400).status == 400
    assert ask(page, "search", method="POST", transfer_encoding="chunked").status == 411


def test_embedded_images_are_found_after_their_folder_is_gone_and_opening_one_is_an_error(built, photos, capfd):
    with page_of({"first": built}, photos) as page:
        shutil.rmtree(photos)
        assert ask(page, "image/small/0").status == 404
        answer = search(page, like=0)
        assert answer.status == 400 and b"cannot be opened (image file cannot be read); if the folder" in answer.body
        assert search(page, text="red").status == ask(page, "").status == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("word", "status", "words"), [("full", 400, "the disk is full"), ("bug", 500, "the terminal shows it")]
)
def test_a_failure_is_answered_and_the_server_still_works(page, capfd, word, status, words):
    answer = search(page, text=word)
    assert answer.status == status and words in answer.body.decode()
    assert ("ZeroDivisionError: a bug" in capfd.readouterr().err) == (word == "bug")
    assert search(page, text="red").status == 200


def test_a_browser_that_goes_away_leaves_the_terminal_quiet(page, capfd):
    for error in (BrokenPipeError(), ConnectionResetError()):
        try:
            raise error
        except ConnectionError:
            page.handle_error(None, ("127.0.0.1", 1))
    assert capfd.readouterr() == ("", "")
