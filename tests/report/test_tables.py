from __future__ import annotations

from neuclip.records import RunFolder, append_line, write_json
from neuclip.report.contents import read_contents
from neuclip.report.evaluations import all_evaluations, parse_evaluation
from neuclip.report.tables import (
    evaluation_tables,
    files_table,
    flatten,
    full_captions_sentence,
    normalizer_table,
    settings_tables,
    skipped_sentences,
)


def test_figures_are_gathered_by_data_set_even_if_its_name_has_dots() -> None:
    found = parse_evaluation(
        {
            "icons/v1.2.image_to_text_recall_at_1": 0.12,
            "icons/v1.2.image_to_text_chance_at_1": 0.001,
            "icons/v1.2.images": 1143,
            "groups.top1": 0.4,
            "depth.distance": 7.0,
        }
    )
    assert [retrieval.dataset for retrieval in found.retrieval] == ["icons/v1.2"]
    assert found.retrieval[0].recall == {("image_to_text", 1): 0.12}
    assert found.retrieval[0].chance == {("image_to_text", 1): 0.001}
    assert found.retrieval[0].images == 1143
    assert found.zero_shot[0]["top1"] == 0.4 and found.zero_shot[0]["top5"] is None
    assert found.others == {"depth.distance": 7.0}


def test_the_final_evaluation_is_not_counted_twice(run: RunFolder) -> None:
    contents = read_contents(run)
    assert [found.samples for found in all_evaluations(contents)] == [64_000 * index for index in range(1, 9)]


def test_no_evaluation_figure_is_left_out_of_the_tables() -> None:
    figures = {"a.text_to_image_recall_at_10": 0.12345, "a.text_to_image_chance_at_10": 0.0123, "a.captions": 77}
    figures |= {"b.top1": 0.4321, "b.top5": 0.8765, "b.mean_per_class": 0.3999, "b.chance": 0.0625, "b.classes": 16}
    tables = evaluation_tables(parse_evaluation(figures | {"b.images": 1301, "c.error": 7.25}))
    for cell in ("12.3 %", "1.2 %", "77", "43.2 %", "87.6 %", "40.0 %", "6.2 %", "16", "1,301", "7.25"):
        assert f">{cell}</td>" in tables


def test_a_direction_that_was_not_measured_has_no_row() -> None:
    tables = evaluation_tables(parse_evaluation({"a.text_to_image_recall_at_1": 0.5}))
    assert "text to image" in tables and "image to text" not in tables


def test_the_normalizer_table_names_the_estimators_and_explains_the_figure(run: RunFolder) -> None:
    page = normalizer_table(read_contents(run))
    assert "NeuCLIP, this run" in page and "a mini-batch of 128" in page
    assert "Mean squared difference between the estimated and the exact log-normalizer" in page
    assert "5,000 anchors of the training set; 1,200 of them with a caption that others share" in page


def test_nested_settings_become_dotted_names() -> None:
    assert list(flatten({"versions": {"torch": "2.13"}, "threads": 2, "name": ""})) == [
        ["versions.torch", "2.13"],
        ["threads", "2"],
        ["name", '""'],
    ]
    assert "<caption>optimizer</caption>" in settings_tables({"optimizer": {"beta1": 0.9}})


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


def test_that_nothing_was_skipped_is_said_only_of_what_was_counted(run: RunFolder) -> None:
    run.skipped.unlink()
    assert skipped(run) == ["Samples were skipped; skipped.jsonl, which listed them, is gone."]
    write_json(run.summary, {"skipped": {}})
    assert skipped(run) == ["No sample of the training data was skipped."]
    both = ["No sample of the training data was skipped.", "No held-out sample was skipped."]
    assert (
        skipped(run, **{"a.skipped": 0}) == both == skipped(run, **{"b.image_to_text_recall_at_1": 1, "b.skipped": 0})
    )
    run.skipped.write_bytes(b"\xff\xfe\n")
    assert skipped(run, **{"a.skipped": 0}) == []


def test_skipped_images_stand_beside_those_measured() -> None:
    figures = {"a.top1": 0.5, "a.images": 705, "a.skipped": 16}
    figures |= {"b.image_to_text_recall_at_1": 0.5, "b.images": 960, "b.skipped": 7}
    page = evaluation_tables(parse_evaluation(figures))
    assert '>705</td><td class="figures">16</td>' in page and '>960</td><td class="figures">7</td>' in page


def test_captions_that_fill_the_context_are_told_of_the_summary_or_the_last_record(run: RunFolder) -> None:
    assert full_captions_sentence(read_contents(run)) == ""
    write_json(run.summary, {"truncated_captions": 0.123})
    assert full_captions_sentence(read_contents(run)).startswith("12.3 % of the captions fill the model's context")
    run.summary.unlink()
    append_line(run.records, {"truncated_captions": 0.25})
    assert full_captions_sentence(read_contents(run)).startswith("25.0 % of")


def test_the_list_of_files_tells_what_is_there_and_what_is_not(run: RunFolder) -> None:
    run.checkpoints.mkdir()
    (run.checkpoints / "last.pt").write_bytes(b"x" * 2000)
    page = files_table(read_contents(run))
    assert '>checkpoints/</th><td class="words">2 kB</td>' in page
    assert '>model</th><td class="words">not there</td>' in page
