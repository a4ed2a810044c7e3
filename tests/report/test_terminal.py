"""The figures of an evaluation, and the end of a run, in a few lines."""

from __future__ import annotations

from typing import Any

from neuclip.report.terminal import headline_text, summary_text

FIGURES = {
    "icons.images": 1144,
    "icons.captions": 1150,
    "icons.different_captions": 960,
    "icons.image_to_text_recall_at_1": 0.205,
    "icons.image_to_text_chance_at_1": 0.001,
    "icons.image_to_text_recall_at_5": 0.419,
    "icons.image_to_text_recall_at_10": 0.538,
    "icons.image_to_text_median_rank": 8,
    "icons.text_to_image_recall_at_1": 0.19,
    "icons.text_to_image_chance_at_1": 0.001,
    "icons.text_to_image_median_rank": 1024,
    "icons.image_to_different_text_recall_at_1": 0.24,
    "icons.image_to_different_text_chance_at_1": 0.001,
    "icons.image_to_different_text_median_rank": 7,
    "icons.different_text_to_image_recall_at_1": 0.21,
    "groups.top1": 0.25,
    "groups.largest_class": 0.302,
    "groups.classes": 9,
    "groups.chance": 1 / 9,
}
SUMMARY = {
    "samples_seen": 96_000,
    "seconds": 252.0,
    "samples_per_second": 380.0,
    "peak_memory_bytes": 1.9e9,
    "skipped": {"image does not decode": 2, "caption is empty": 1},
    "skipped_share": 3 / 27_500,
    "lost_share": 0,
    "skipped_held_out": {},
    "not_measured": {},
    "truncated_captions": 0.01,
    "calibration": 1.07,
    "normalizer_error": {"estimators": {"method": {"mean": 0.46}, "minibatch": {"mean": 3.44}}},
    "evaluation": FIGURES,
}


def text(**changes: Any) -> str:
    return summary_text(SUMMARY | changes, batch_size=128)


def test_a_summary_has_cost_recall_against_chance_normalizer_and_skipped_samples() -> None:
    assert text().splitlines() == [
        "Trained on 96,000 samples in 4 min 12 s (380 per second, peak memory 1.9 GB).",
        "Retrieval:",
        "  held-out set  direction                          over chance  recall@1  recall@5  recall@10  median rank",
        "  icons         image to text                             205x    20.5 %    41.9 %     53.8 %            8",
        "  icons         text to image                             190x    19.0 %         –          –        1,024",
        "  icons         image to text, different captions         240x    24.0 %         –          –            7",
        "  icons         text to image, different captions            –    21.0 %         –          –            –",
        "  (Recall@k: an image is right if any of its captions is among the first k of all, a caption if its image is;",
        "  over different captions, equal ones count once and every image that has the text is right.)",
        "  (icons: 1,144 images, 1,150 captions, 1.01 per image)",
        "Zero-shot classification:",
        "  task     top-1  over chance  top-5  mean per class  chance  largest class  classes  images",
        "  groups  25.0 %         2.2x      –               –  11.1 %         30.2 %        9       –",
        "Normalizer:",
        "  squared error  0.46 of the log-normalizer, 7.5x smaller than a mini-batch's (3.44 with 128 pairs)",
        "  calibration    1.07, good (batch mean of true over predicted normalizer; 1 is right)",
        "Skipped samples, those of training in skipped.jsonl:",
        "  training data  3 (0.011 % of those read): 2 x image does not decode, 1 x caption is empty",
    ]


def test_a_run_without_evaluation_and_normalizer_says_only_what_it_knows() -> None:
    assert len(text(evaluation={}, calibration=None, skipped={}, normalizer_error={}).splitlines()) == 1


def test_a_small_error_keeps_its_digits_and_is_compared_with_a_batch() -> None:
    small = text(normalizer_error={"estimators": {"method": {"mean": 0.0031}, "minibatch": {"mean": 0.0012}}})
    assert "0.0031 of the log-normalizer, 2.6x larger than a mini-batch's (0.0012 with 128 pairs)" in small


def test_skipped_samples_of_held_out_sets_have_rows_of_their_own() -> None:
    figures = FIGURES | {"icons.images": 705, "icons.skipped": 16}
    lines = text(evaluation=figures, skipped_held_out={"icons": {"image does not decode": 9, "caption is empty": 7}})
    assert lines.splitlines()[-2].startswith("  training data  3 (0.011 % of those read): ")
    reasons = "9 x image does not decode, 7 x caption is empty"
    assert lines.splitlines()[-1] == f"  icons          16 of 721 samples could not be used: {reasons}"


def test_samples_that_could_not_be_indexed_are_counted_apart_from_those_read() -> None:
    lost = text(skipped={"shard is cut off": 2}, skipped_share=0, lost_share=0.04)
    assert "2 (4.0 % could not be indexed): 2 x shard is cut off" in lost


def test_a_set_that_is_not_measured_says_so() -> None:
    figures = {"icons.images": 840, "icons.skipped": 120}
    not_measured = {"icons": "120 of 960 samples cannot be used"}
    row = "Not measured:\n  icons  120 of 960 samples cannot be used\n"
    assert row in text(evaluation=figures, not_measured=not_measured)
    assert headline_text(figures, not_measured) == "icons not measured: 120 of 960 samples cannot be used"


def test_captions_that_fill_the_context_are_reported_where_there_are_many() -> None:
    assert "fill the context" not in text()
    assert "Captions that fill the context (possibly truncated): 12.3 %" in text(truncated_captions=0.123)
    remedy = "give --model.name small"
    named = [summary_text(SUMMARY | {"truncated_captions": x}, batch_size=8, longer_context=remedy) for x in (0, 0.1)]
    assert remedy not in named[0] and named[1].endswith(f"(possibly truncated): 10.0 %; {remedy}")


def test_the_headline_prefers_retrieval() -> None:
    assert headline_text(FIGURES, {}) == "recall@1 icons 20.5 %"
    assert headline_text({"groups.top1": 0.25}, {}) == "top-1 groups 25.0 %"
    assert headline_text({}, {}) == ""
