from __future__ import annotations

from neuclip.cli.tables import figures_table, nested_table
from neuclip.report.measures import DEFINITION


def test_the_tables_of_an_evaluation_stand_below_their_names_with_their_notes():
    figures = {"a.images": 1000, "a.captions": 5000, "a.image_to_text_recall_at_1": 0.5, "b.top1": 0.25}
    assert [" ".join(line.split()) for line in figures_table(figures).splitlines()] == [
        "Retrieval",
        "held-out set direction over chance recall@1 median rank",
        "a image to text – 50.0 % –",
        f"{DEFINITION}.",
        "a: 1,000 images, 5,000 captions, 5 per image",
        "",
        "Zero-shot classification",
        "task top-1 over chance top-5 mean per class chance largest class classes images",
        "b 25.0 % – – – – – – –",
    ]


def test_a_small_error_keeps_its_digits():
    table = nested_table({"method": {"mean": 0.0031}, "minibatch": {"mean": 0.00004}})
    assert [line.split()[-1] for line in table.splitlines()] == ["mean", "0.0031", "4e-5"]
