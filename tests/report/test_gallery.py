from __future__ import annotations

import json
from typing import Any

from neuclip.records import RunFolder, write_json
from neuclip.report.contents import read_contents
from neuclip.report.gallery import gallery_section, how_many_right
from tests.report.sample_run import gallery


def shown(run: RunFolder) -> str:
    return gallery_section(read_contents(run))


def queries(*rights: list[bool]) -> list[dict[str, Any]]:
    return [{"matches": [{"right": right} for right in row]} for row in rights]


def test_a_right_answer_is_marked_by_a_sign_and_a_word_and_a_wrong_one_is_not(run: RunFolder) -> None:
    content = gallery()
    rights = sum(
        match["right"] for query in content["image_to_text"] + content["text_to_image"] for match in query["matches"]
    )
    assert 0 < rights < 120
    assert shown(run).count('<b class="mark">✓ right</b>') == rights == shown(run).count('<li class="right">')


def test_the_line_counts_what_is_shown() -> None:
    several = queries([True, False], [False, True], [False, False], [], [True, True])
    sentence = how_many_right(several, "captions")
    assert sentence == "2 of the 5 shown have the right answer first, 3 have it among the captions shown."


def test_readers_learn_that_nobody_chose_the_queries(run: RunFolder) -> None:
    assert "From icons-30k/new-drawings. The queries are drawn at random with the run's seed, not chosen." in shown(run)


def test_every_query_tells_the_rank_of_its_right_answer(run: RunFolder) -> None:
    content = gallery()
    content["image_to_text"][0]["rank"] = 1234
    content["image_to_text"][1]["rank"] = None
    write_json(run.gallery, content)
    page = shown(run)
    assert page.count("Right answer at rank <strong>") == 23
    assert "<strong>1,234</strong>" in page
    assert page.count("The rank of the right answer was not recorded.") == 1


def test_one_direction_alone_is_shown_alone(run: RunFolder) -> None:
    content = json.loads(run.gallery.read_text())
    write_json(run.gallery, {"dataset": "x", "text_to_image": content["text_to_image"]})
    assert "<h3>Text to image</h3>" in shown(run) and "<h3>Image to text</h3>" not in shown(run)


def test_without_queries_a_sentence_says_so(run: RunFolder) -> None:
    run.gallery.unlink()
    assert "No queries were kept" in shown(run)
