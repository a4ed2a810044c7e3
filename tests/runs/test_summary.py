"""The last words of a run."""

from __future__ import annotations

from neuclip.runs.summary import headline_text, summary_text

FIGURES = {
    "icons.captions": 960,
    "icons.image_to_text_recall_at_1": 0.205,
    "icons.image_to_text_chance_at_1": 0.001,
    "icons.text_to_image_recall_at_1": 0.19,
    "icons.text_to_image_chance_at_1": 0.001,
    "groups.top1": 0.25,
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


def test_a_person_reads_recall_against_chance_the_normalizer_and_the_time():
    text = summary_text(SUMMARY, batch_size=128)
    wanted = """4 min 12 s
        20.5% (205 x chance)
        25.0% of 9 classes (chance 11%)
        0.46 (a batch of 128 alone: 3.44)
        calibration 1.07 (batch mean of true over predicted
        3 (0.011% of those read): 2 x image does not decode, 1 x caption is empty"""
    assert [phrase for phrase in map(str.strip, wanted.splitlines()) if phrase not in text] == []
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_run_without_evaluation_and_normalizer_says_only_what_it_knows():
    bare = SUMMARY | {"evaluation": {}, "calibration": None, "skipped": {}}
    del bare["normalizer_error"]
    assert len(summary_text(bare, batch_size=128).splitlines()) == 1


def test_skipped_samples_have_a_heading_of_their_own_with_held_out_sets_apart():
    figures = FIGURES | {"icons.images": 705, "icons.skipped": 16}
    held_out = {"icons": {"image does not decode": 9, "caption is empty": 7}}
    lines = summary_text(SUMMARY | {"evaluation": figures, "skipped_held_out": held_out}, batch_size=128).splitlines()
    heading = lines.index("Skipped samples, listed in skipped.jsonl:")
    assert lines[heading + 1].startswith("  training data  3 (0.011% of those read): ") and len(lines) == heading + 3
    lost = SUMMARY | {"skipped": {"shard is cut off": 2}, "skipped_share": 0, "lost_share": 0.04}
    assert "2 (4% never became samples): 2 x shard is cut off" in summary_text(lost, batch_size=128)
    reasons = "9 x image does not decode, 7 x caption is empty"
    assert lines[heading + 2] == f"  icons          16 of 721 samples could not be used: {reasons}"


def test_a_set_that_is_not_measured_says_so_in_the_place_of_its_figure():
    figures = {"icons.images": 840, "icons.skipped": 120}
    not_measured = {"icons": "120 of 960 samples cannot be used"}
    text = summary_text(SUMMARY | {"evaluation": figures, "not_measured": not_measured}, batch_size=128)
    assert "held-out images:\n  icons  not measured: 120 of 960 samples cannot be used\n" in text
    assert headline_text(figures, not_measured) == "icons not measured: 120 of 960 samples cannot be used"


def test_many_captions_that_fill_the_context_are_told():
    assert "fill the model's context" not in summary_text(SUMMARY, batch_size=128)
    assert "cut off: 12.3%" in summary_text(SUMMARY | {"truncated_captions": 0.123}, batch_size=128)


def test_the_headline_prefers_retrieval():
    assert headline_text(FIGURES, {}) == "recall@1 icons 20.5%"
    assert headline_text({"groups.top1": 0.25}, {}) == "top-1 groups 25.0%"
    assert headline_text({}, {}) == ""
