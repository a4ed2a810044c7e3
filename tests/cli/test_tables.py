from __future__ import annotations

from neuclip.cli.tables import figures_table, nested_table


def rows(figures):
    return [" ".join(line.split()) for line in figures_table(figures).splitlines()]


def test_a_median_rank_stands_beside_the_number_of_candidates():
    figures = {"a.images": 1144, "a.captions": 960}
    figures |= {"a.image_to_text_median_rank": 8, "a.text_to_image_median_rank": 9}
    assert rows(figures)[3:] == [
        "image to text median rank 8 of 960 captions",
        "text to image median rank 9 of 1,144 images",
    ]


def test_top1_stands_beside_chance_and_the_share_of_the_largest_class():
    figures = {"a.top1": 0.25, "a.mean_per_class": 0.2, "a.chance": 1 / 9, "a.largest_class": 0.302}
    assert rows(figures) == [
        "a",
        "top1 25.0 % chance 11.1 %, largest class 30.2 %",
        "mean per class 20.0 % chance 11.1 %",
    ]


def test_figures_of_earlier_versions_stand_beside_what_is_known():
    assert rows({"a.top1": 0.25, "a.chance": 1 / 9, "a.image_to_text_median_rank": 8})[1:] == [
        "top1 25.0 % chance 11.1 %",
        "image to text median rank 8",
    ]


def test_a_small_error_keeps_its_digits():
    table = nested_table({"method": {"mean": 0.0031}, "minibatch": {"mean": 0.00004}})
    assert [line.split()[-1] for line in table.splitlines()] == ["mean", "0.0031", "4e-5"]
