from __future__ import annotations

from neuclip.cli.tables import figures_table, nested_table
from neuclip.report.evaluations import DEFINITION, DIFFERENT_DEFINITION


def rows(figures):
    return [" ".join(line.split()) for line in figures_table(figures).splitlines()]


def test_a_median_rank_stands_beside_the_number_of_candidates():
    figures = {"a.images": 1144, "a.captions": 1200, "a.different_captions": 960}
    figures |= {"a.image_to_text_median_rank": 8, "a.text_to_image_median_rank": 9}
    figures |= {"a.image_to_different_text_median_rank": 7, "a.different_text_to_image_median_rank": 6}
    assert rows(figures)[4:8] == [
        "image to text median rank 8 of 1,200 captions",
        "text to image median rank 9 of 1,144 images",
        "image to different text median rank 7 of 960 different captions",
        "different text to image median rank 6 of 1,144 images",
    ]


def test_when_a_query_is_right_stands_below_the_figures():
    figures = {"a.images": 1000, "a.captions": 5000, "a.image_to_text_recall_at_1": 0.5, "b.top1": 0.25}
    assert rows(figures)[-1] == f"recall at k: {DEFINITION}"
    figures |= {"a.different_captions": 4990, "a.image_to_different_text_recall_at_1": 0.6}
    assert rows(figures)[-2:] == [f"recall at k: {DEFINITION}", f"recall at k: {DIFFERENT_DEFINITION}"]
    assert not any("recall" in row for row in rows({"b.top1": 0.25}))


def test_top1_stands_beside_chance_and_the_share_of_the_largest_class():
    figures = {"a.top1": 0.25, "a.mean_per_class": 0.2, "a.chance": 1 / 9, "a.largest_class": 0.302}
    assert rows(figures) == [
        "a",
        "top1 25.0 % chance 11.1 %, largest class 30.2 %",
        "mean per class 20.0 % chance 11.1 %",
    ]


def test_figures_of_earlier_versions_stand_beside_what_is_known():
    assert rows({"a.top1": 0.25, "a.chance": 1 / 9, "a.image_to_text_median_rank": 8})[1:3] == [
        "top1 25.0 % chance 11.1 %",
        "image to text median rank 8",
    ]


def test_a_small_error_keeps_its_digits():
    table = nested_table({"method": {"mean": 0.0031}, "minibatch": {"mean": 0.00004}})
    assert [line.split()[-1] for line in table.splitlines()] == ["mean", "0.0031", "4e-5"]
