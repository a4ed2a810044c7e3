"""Flat keys in words, and as tables."""

from __future__ import annotations

import pytest

from neuclip.formatting import format_count, percent
from neuclip.report.measures import (
    NORMALIZER_ERROR,
    Measure,
    chance,
    evaluation_tables,
    measured,
    short_names,
    size,
)
from neuclip.report.page import Table, text_table
from tests.report.sample_runs import FIGURES_AT_END

# A set whose captions repeat, with a dot in its name, and a task.
FIGURES = {
    "a/pairs.csv.images": 1000,
    "a/pairs.csv.captions": 5000,
    "a/pairs.csv.different_captions": 4990,
    "a/pairs.csv.skipped": 3,
    "a/pairs.csv.image_to_text_recall_at_1": 0.5,
    "a/pairs.csv.image_to_text_chance_at_1": 0.001,
    "a/pairs.csv.image_to_text_recall_at_10": 0.9,
    "a/pairs.csv.image_to_text_median_rank": 2,
    "a/pairs.csv.different_text_to_image_recall_at_1": 0.4,
    "kinds.top1": 0.25,
    "kinds.top5": 0.75,
    "kinds.chance": 1 / 9,
    "kinds.classes": 9,
    "kinds.images": 261,
    "normalizer_error.method": 0.12,
    "normalizer_error.minibatch": 1.9,
}


def rows(table: Table) -> list[str]:
    return [" ".join(line.split()) for line in text_table(table).splitlines()]


def test_a_figure_has_words_and_only_the_first_ones_are_main() -> None:
    assert [(one.dataset, one.words, one.main) for one in measured(FIGURES)] == [
        ("a/pairs.csv", "image to text recall@1", True),
        ("a/pairs.csv", "image to text recall@10", False),
        ("a/pairs.csv", "text to image recall@1, different captions", True),
        ("kinds", "top-1 accuracy", True),
        ("kinds", "top-5 accuracy", False),
        ("training data", "normalizer error", True),
    ]
    assert all(FIGURES[one.key] == value for one, value in measured(FIGURES).items())
    assert measured(FIGURES)[NORMALIZER_ERROR] == 0.12


def test_chance_is_that_of_the_same_k_and_unknown_where_nothing_was_counted() -> None:
    known = {one.words: chance(one, FIGURES) for one in measured(FIGURES)}
    assert known["image to text recall@1"] == 0.001 and known["top-1 accuracy"] == 1 / 9
    assert known["image to text recall@10"] is None and known["normalizer error"] is None
    assert chance(Measure("kinds", "top5", ""), FIGURES) is None


def test_the_size_of_a_set_leaves_out_what_is_not_known() -> None:
    assert size("a/pairs.csv", FIGURES) == "1,000 images, 5,000 captions, 5 per image, 3 skipped"
    assert size("kinds", FIGURES) == "261 images, 9 classes"
    assert size("other", FIGURES) == ""


@pytest.mark.parametrize(
    ("names", "short"),
    [(["a/b", "a/c"], ["b", "c"]), (["a/b", "c"], ["a/b", "c"]), (["a/b"], ["a/b"]), ([], [])],
)
def test_a_folder_that_all_names_share_is_left_out(names: list[str], short: list[str]) -> None:
    assert list(short_names(names).values()) == short


def test_retrieval_has_a_row_per_direction_and_definitions_and_sizes_below() -> None:
    table = evaluation_tables(FIGURES)[0]
    assert rows(table) == [
        "held-out set direction over chance recall@1 recall@10 median rank",
        "a/pairs.csv image to text 500x 50.0 % 90.0 % 2",
        "a/pairs.csv text to image, different captions – 40.0 % – –",
    ]
    assert [str(cell) for cell in table.rows[0][3:]] == ["50.0 % (chance 0.10 %)", "90.0 %", "2 (of 5,000)"]
    definition, sizes = table.notes
    assert definition.endswith("equal ones count once and every image that has the text is right.")
    assert sizes == "a/pairs.csv: 1,000 images, 5,000 captions, 5 per image, 3 skipped"
    assert "different" not in evaluation_tables(FIGURES_AT_END)[0].notes[0]


def test_classification_has_a_row_per_task() -> None:
    assert rows(evaluation_tables(FIGURES | {"kinds.skipped": 2})[1]) == [
        "task top-1 over chance top-5 mean per class chance largest class classes images",
        "kinds 25.0 % 2.2x 75.0 % – 11.1 % – 9 261",
    ]
    assert evaluation_tables(FIGURES | {"kinds.skipped": 2})[1].notes == ["kinds: 2 skipped"]


def test_every_figure_of_an_evaluation_is_in_the_tables() -> None:
    tables = evaluation_tables(FIGURES_AT_END)
    text = " ".join(str(cell) for table in tables for row in table.rows for cell in row) + str(
        [t.notes for t in tables]
    )
    for key, value in FIGURES_AT_END.items():
        shown = format_count(value) if value > 1 else percent(value)
        assert shown in text, key


def test_tables_fit_a_terminal_of_120_columns() -> None:
    lines = [line for table in evaluation_tables(FIGURES_AT_END) for line in text_table(table).splitlines()]
    assert max(map(len, lines)) <= 120


def test_what_training_changed_stands_side_by_side_where_it_was_measured_before() -> None:
    before = {"a/pairs.csv.image_to_text_recall_at_1": 0.62, "other.top1": 0.1}
    change, *_ = evaluation_tables(FIGURES, before)
    assert change.caption == "Before and after training"
    assert rows(change)[1:] == ["a/pairs.csv image to text recall@1 62.0 % 50.0 % −12.0"]
    assert evaluation_tables(FIGURES, {})[0].caption == "Retrieval"


def test_counts_alone_and_what_is_no_number_make_no_table() -> None:
    assert evaluation_tables({"a.images": 840, "a.skipped": 120, "samples": 3, "a.top1": None, "b.top1": "x"}) == []
