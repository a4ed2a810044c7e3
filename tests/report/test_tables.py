from __future__ import annotations

from neuclip.records import RunFolder, append_line, write_json
from neuclip.report.contents import read_contents
from neuclip.report.evaluations import DEFINITION, DIFFERENT_DEFINITION, parse_evaluation
from neuclip.report.page import TEMPLATES
from neuclip.report.tables import (
    Table,
    evaluation_tables,
    files_table,
    flatten,
    normalizer_note,
    normalizer_table,
    skipped_sentences,
    truncated_captions_sentence,
)


def test_text_and_numbers_have_columns_of_their_own_kind() -> None:
    table = Table("Sizes", ["file", "what", "bytes"], [["a", "<b>", "3"]], text_columns=2)
    page = TEMPLATES.get_template("tables.html").module.write(table)
    row = '<th scope="row" class="text">a</th><td class="text" data-head="what">&lt;b&gt;</td>'
    row += '<td class="number" data-head="bytes">3</td>'
    assert row in page and '<th scope="col" class="number">bytes</th>' in page


def test_every_figure_of_an_evaluation_is_in_the_tables() -> None:
    figures = {"a.text_to_image_recall_at_10": 0.12345, "a.text_to_image_chance_at_10": 0.0123, "a.captions": 77}
    figures |= {"a.images": 960, "a.skipped": 7, "c.error": 7.25, "b.images": 1301, "b.skipped": 16}
    figures |= {"a.text_to_image_median_rank": 42, "b.largest_class": 0.3021}
    figures |= {"b.top1": 0.4321, "b.top5": 0.8765, "b.mean_per_class": 0.3999, "b.chance": 0.0625, "b.classes": 18}
    retrieval, zero_shot, others = evaluation_tables(parse_evaluation(figures))
    assert retrieval.rows == [["a", "text to image", "10x", "12.3 % (1.2 %)", "42", "960", "77", "7"]]
    assert zero_shot.rows == [["b", "43.2 %", "6.9x", "87.6 %", "40.0 %", "6.2 %", "30.2 %", "18", "1,301", "16"]]
    assert others.rows == [["c.error", "7.25"]]
    assert all(len(table.head) == len(table.rows[0]) for table in (retrieval, zero_shot, others))


def test_recall_over_different_captions_has_rows_of_its_own_and_the_definitions_stand_below() -> None:
    figures = {"a.images": 100, "a.captions": 500, "a.different_captions": 480, "a.skipped": 0}
    figures |= {"a.image_to_text_recall_at_1": 0.5, "a.image_to_different_text_recall_at_1": 0.6}
    (retrieval,) = evaluation_tables(parse_evaluation(figures))
    shown = [(row[1], row[3], row[-2]) for row in retrieval.rows]
    assert shown == [
        ("image to text", "50.0 % (–)", "500"),
        ("image to text, different captions", "60.0 % (–)", "480"),
    ]
    assert retrieval.note == f"Recall@k: {DEFINITION}; {DIFFERENT_DEFINITION}."
    assert "any of its captions" in TEMPLATES.get_template("tables.html").module.write(retrieval)


def test_counts_alone_make_no_table() -> None:
    assert evaluation_tables(parse_evaluation({"refused.images": 32, "refused.skipped": 8, "a.captions": 7})) == []


def test_the_normalizer_table_names_the_estimators_and_how_they_were_measured(run: RunFolder) -> None:
    contents = read_contents(run)
    assert [row[0] for row in normalizer_table(contents).rows] == ["NeuCLIP, this run", "a mini-batch of 128"]
    note = "5,000 anchors of the training set; 1,200 of them with a caption that others share; temperature 0.0307; eps"
    assert normalizer_note(contents).startswith(note)


def test_nested_settings_become_dotted_names() -> None:
    assert flatten({"versions": {"torch": "2.13"}, "threads": 2, "name": ""}) == [
        ["versions.torch", "2.13"],
        ["threads", "2"],
        ["name", '""'],
    ]


def skipped(run: RunFolder, **figures: float) -> list[str]:
    return skipped_sentences(read_contents(run), parse_evaluation({"a.top1": 0.5} | figures))


def test_skipped_samples_are_counted_with_their_reasons_in_training_and_held_out_sets_apart(run: RunFolder) -> None:
    append_line(run.skipped, {"id": 18, "reason": "empty", "times": 2})
    append_line(run.skipped, {"id": 18, "reason": "cannot decode", "held_out": "a"})
    assert skipped(run) == [
        "3 samples of the training data skipped: empty 2, cannot decode 1.",
        "1 sample of the held-out a skipped: cannot decode 1.",
    ]
    run.skipped.unlink()
    append_line(run.skipped, {"id": 18, "reason": "cannot decode", "held_out": "a"})
    assert skipped(run)[0] == "No sample of the training data was skipped."


def test_only_what_was_counted_is_said_to_have_no_skipped_samples(run: RunFolder) -> None:
    run.skipped.unlink()
    assert skipped(run) == ["Samples were skipped, but skipped.jsonl, which listed them, is missing."]
    write_json(run.summary, {"skipped": {}})
    assert skipped(run) == ["No sample of the training data was skipped."]
    both = ["No sample of the training data was skipped.", "No held-out sample was skipped."]
    assert skipped(run, **{"a.skipped": 0}) == both
    assert skipped(run, **{"b.image_to_text_recall_at_1": 1, "b.skipped": 0}) == both
    run.skipped.write_bytes(b"\xff\xfe\n")
    assert skipped(run, **{"a.skipped": 0}) == []


def test_the_share_of_captions_that_fill_the_context_is_that_of_the_summary_or_of_the_last_record(
    run: RunFolder,
) -> None:
    assert truncated_captions_sentence(read_contents(run)) == ""
    write_json(run.summary, {"truncated_captions": 0.123})
    assert truncated_captions_sentence(read_contents(run)).startswith("12.3 % of the captions fill the context")
    run.summary.unlink()
    append_line(run.records, {"truncated_captions": 0.25})
    assert truncated_captions_sentence(read_contents(run)).startswith("25.0 % of")


def test_the_list_of_files_has_the_size_of_each_and_says_which_are_missing(run: RunFolder) -> None:
    run.checkpoints.mkdir()
    (run.checkpoints / "last.pt").write_bytes(b"x" * 2000)
    rows = {name: size for name, size, _ in files_table(read_contents(run)).rows}
    assert rows["checkpoints/"] == "2 kB" and rows["model"] == "missing"


def test_what_training_changed_stands_side_by_side_for_each_set_that_was_measured_before() -> None:
    before = {"new.image_to_text_recall_at_1": 0.121, "old.image_to_text_recall_at_1": 0.3, "task.top1": 0.5}
    after = {"new.image_to_text_recall_at_1": 0.195, "old.image_to_text_recall_at_1": 0.204, "task.top1": 0.5}
    after |= {"later.image_to_text_recall_at_1": 0.9, "new.text_to_image_recall_at_1": 0.9}
    table, *_ = evaluation_tables(parse_evaluation(after, 100.0), parse_evaluation(before, 0.0))
    assert table.caption == "Before and after training" and table.head[2:] == ["before", "after", "points"]
    assert table.rows == [
        ["new", "recall@1, image to text", "12.1 %", "19.5 %", "+7.4"],
        ["old", "recall@1, image to text", "30.0 %", "20.4 %", "−9.6"],
        ["task", "top-1", "50.0 %", "50.0 %", "+0.0"],
    ]
    assert "Before and after training" not in {one.caption for one in evaluation_tables(parse_evaluation(after, 100.0))}
