from __future__ import annotations

import json

from neuclip.records import RunFolder, write_json
from neuclip.report.contents import read_contents
from neuclip.report.gallery import Direction, read_gallery, read_query
from neuclip.report.page import TEMPLATES
from tests.report.sample_run import gallery


def render(run: RunFolder) -> str:
    show = TEMPLATES.get_template("gallery.html").module.show
    return "".join(show(direction) for direction in read_gallery(read_contents(run)))


def test_a_right_answer_is_marked_by_a_sign_and_a_word_and_a_wrong_one_is_not(run: RunFolder) -> None:
    content = gallery()
    rights = sum(
        match["right"] for query in content["image_to_text"] + content["text_to_image"] for match in query["matches"]
    )
    page = render(run)
    assert 0 < rights < 120
    assert page.count('<b class="mark">✓ right</b>') == rights == page.count('<li class="right">')


def test_the_sentence_counts_the_right_answers_shown() -> None:
    rights = [[True, False], [False, True], [False, False], [], [True, True]]
    queries = [read_query({"matches": [{"right": right} for right in row]}) for row in rights]
    sentence = "2 of the 5 shown have the right answer first, 3 have it among the captions shown."
    assert Direction("Image to text", "captions", queries).how_many_right == sentence


def test_every_query_has_the_rank_of_its_right_answer(run: RunFolder) -> None:
    content = gallery()
    content["image_to_text"][0]["rank"] = 1234
    content["image_to_text"][1]["rank"] = None
    write_json(run.gallery, content)
    page = render(run)
    assert page.count("Right answer at rank <strong>") == 23
    assert "<strong>1,234</strong>" in page
    assert page.count("The rank of the right answer was not recorded.") == 1


def test_one_direction_alone_is_shown_alone(run: RunFolder) -> None:
    content = json.loads(run.gallery.read_text())
    write_json(run.gallery, {"dataset": "x", "text_to_image": content["text_to_image"]})
    assert [direction.title for direction in read_gallery(read_contents(run))] == ["Text to image"]
