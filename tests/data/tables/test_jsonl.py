"""JSON lines: bad lines are bad alone."""

from __future__ import annotations

from neuclip.data.open import open_source
from tests.builders.images import photo
from tests.data.small_tables import outcomes


def test_bad_lines_of_a_json_lines_file_are_bad_alone(tmp_path):
    (tmp_path / "0.jpg").write_bytes(photo(0))
    rows = [
        b'{"image": "0.jpg", "text": "good"}', b'{"image": "0.jpg", "text"', b"[1]", b'{"text": "x"}',
        b'{"image": "0.jpg"}', b'{"image": "1.jpg", "text": "x"}', b'{"image": "0.jpg", "text": "caf\xe9"}',
        b'{"image": "a\\ud800", "text": "x"}', b'{"image": "0.jpg", "text": "last"}',
    ]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_bytes(b"\n".join(rows))
    assert outcomes(open_source(str(tmp_path / "pairs.jsonl"))) == [
        "good", "line is not a JSON object", "line is not a JSON object", "no image", "caption is missing",
        "image file cannot be read", "line is not a JSON object", "image file cannot be read", "last",
    ]  # fmt: skip
