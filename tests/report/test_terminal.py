"""The figures of an evaluation, and the end of a run, in a few lines."""

from __future__ import annotations

from typing import Any

from neuclip.report.terminal import headline_text, summary_text

FIGURES = {
    "a/icons.csv.images": 1144,
    "a/icons.csv.captions": 1150,
    "a/icons.csv.different_captions": 960,
    "a/icons.csv.image_to_text_recall_at_1": 0.205,
    "a/icons.csv.image_to_text_chance_at_1": 0.001,
    "a/icons.csv.image_to_text_recall_at_5": 0.419,
    "a/icons.csv.image_to_text_recall_at_10": 0.538,
    "a/icons.csv.image_to_text_median_rank": 8,
    "a/icons.csv.text_to_image_recall_at_1": 0.19,
    "a/icons.csv.text_to_image_chance_at_1": 0.001,
    "a/icons.csv.text_to_image_median_rank": 1024,
    "a/icons.csv.image_to_different_text_recall_at_1": 0.24,
    "a/icons.csv.image_to_different_text_chance_at_1": 0.001,
    "a/icons.csv.image_to_different_text_median_rank": 7,
    "a/icons.csv.different_text_to_image_recall_at_1": 0.21,
    "groups.top1": 0.25,
    "groups.largest_class": 0.302,
    "groups.classes": 9,
    "groups.chance": 1 / 9,
    "groups.skipped": 2,
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
WHOLE = """\
Trained on 96,000 samples in 4 min 12 s (380 per second, peak memory 1.9 GB).
Retrieval:
  held-out set  direction                          over chance  recall@1  recall@5  recall@10  median rank
  a/icons.csv   image to text                             205x    20.5 %    41.9 %     53.8 %            8
  a/icons.csv   text to image                             190x    19.0 %         –          –        1,024
  a/icons.csv   image to text, different captions         240x    24.0 %         –          –            7
  a/icons.csv   text to image, different captions            –    21.0 %         –          –            –
  (Recall@k: share of images with one of their captions among the k nearest captions, and share of captions with
  their image among the k nearest images; different captions: equal captions count once, and every image with
  the caption is right.)
  (a/icons.csv: 1,144 images, 1,150 captions, 1.01 per image)
Zero-shot classification:
  task     top-1  over chance  top-5  mean per class  chance  largest class  classes  images
  groups  25.0 %         2.2x      –               –  11.1 %         30.2 %        9       –
  (groups: 2 skipped)
Normalizer:
  squared error  0.46 of the log-normalizer, 7.5x smaller than a mini-batch's (3.44 with 128 pairs)
  calibration    1.07, good (mean ratio of true to predicted normalizers in a batch, ideally 1)
Skipped samples (training data: listed in skipped.jsonl):
  training data  3 (0.011 % of those read): 2 x image does not decode, 1 x caption is empty"""


def text(longer_context: str = "", **changes: Any) -> str:
    return summary_text(SUMMARY | changes, batch_size=128, longer_context=longer_context)


def test_a_summary_has_cost_recall_against_chance_normalizer_and_skipped_samples() -> None:
    assert text() == WHOLE


def test_a_summary_without_evaluation_and_normalizer_is_one_line() -> None:
    assert len(text(evaluation={}, calibration=None, skipped={}, normalizer_error={}).splitlines()) == 1
    odd = {"a.images": 840, "samples": 3, "a.top1": None, "b.top1": "x"}  # counts alone, and what is no number
    assert "Zero-shot" not in text(evaluation=odd)


def test_skipped_samples_of_held_out_sets_and_those_that_were_never_indexed_are_counted_apart() -> None:
    figures = FIGURES | {"groups.images": 705, "groups.skipped": 16}
    shown = text(evaluation=figures, skipped_held_out={"groups": {"image does not decode": 9, "caption is empty": 7}})
    reasons = "9 x image does not decode, 7 x caption is empty"
    assert shown.splitlines()[-1] == f"  groups         16 of 721 samples could not be used: {reasons}"
    lost = text(skipped={"shard is cut off": 2}, skipped_share=0, lost_share=0.04)
    assert "2 (4.0 % could not be indexed): 2 x shard is cut off" in lost


def test_the_headline_and_the_summary_name_sets_that_were_not_measured() -> None:
    figures, reason = {"icons.images": 840, "icons.skipped": 120}, {"icons": "120 of 960 samples cannot be used"}
    assert f"Not measured:\n  icons  {reason['icons']}\n" in text(evaluation=figures, not_measured=reason)
    assert headline_text(figures, reason) == f"icons not measured: {reason['icons']}"


def test_many_truncated_captions_are_reported_with_a_remedy() -> None:
    remedy = "give --model.name small"
    assert "fill the context" not in text(remedy)
    truncated = text(remedy, truncated_captions=0.1)
    assert truncated.endswith(f"Captions that fill the context (possibly truncated): 10.0 %; {remedy}")


def test_a_summary_has_the_figures_before_training_and_the_stored_features() -> None:
    lines = text(evaluation_at_start={"groups.top1": 0.1}, stored_features=["image", "text"]).splitlines()
    assert lines[1:4] == [
        "Read stored image and text features.",
        "Before training:",
        "  at 0 samples  top-1 groups 10.0 %",
    ]


def test_the_headline_prefers_retrieval() -> None:
    assert headline_text(FIGURES, {}) == "recall@1 a/icons.csv 20.5 %"
    assert headline_text({"groups.top1": 0.25}, {}) == "top-1 groups 25.0 %"
    assert headline_text({}, {}) == ""
