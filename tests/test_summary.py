"""The last words of a run."""

from __future__ import annotations

from neuclip.summary import headline_text, summary_text

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
    "skipped": {"picture does not decode": 2},
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
        2 x picture does not decode"""
    assert [phrase for phrase in map(str.strip, wanted.splitlines()) if phrase not in text] == []
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_run_without_evaluation_and_normalizer_says_only_what_it_knows():
    bare = SUMMARY | {"evaluation": {}, "calibration": None, "skipped": {}}
    del bare["normalizer_error"]
    assert len(summary_text(bare, batch_size=128).splitlines()) == 1


def test_the_headline_prefers_retrieval():
    assert headline_text(FIGURES) == "recall@1 icons 20.5%"
    assert headline_text({"groups.top1": 0.25}) == "top-1 groups 25.0%"
    assert headline_text({}) == ""
