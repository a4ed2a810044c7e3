"""Held-out sets through colour towers: flat figures, and nothing is left out silently."""

from __future__ import annotations

import pytest

from neuclip.data.held_out import HeldOutSets
from neuclip.errors import RunFailed
from neuclip.evaluation.held_out import Evaluation, evaluate_held_out
from neuclip.settings.sections import EvaluationSettings, Settings
from tests.evaluation.colour_shards import colour_image, write_samples
from tests.evaluation.small_towers import colour_embedder

RED, BAD = {"png": colour_image("red"), "txt": b"red", "cls": b"0"}, {"png": b"bad", "txt": b"red", "cls": b"0"}
NO_IMAGE = {"txt": b"red"}


def evaluate(folder, limit=0.05, **sets) -> Evaluation:
    """Each set of samples by its name for retrieval, and as NAME-classes for zero-shot."""
    for name, samples in sets.items():
        write_samples(folder / name / "test" / "0.tar", samples)
        (folder / name / "classnames.txt").write_text("red\ngreen\nblue\n")
        (folder / name / "zeroshot_classification_templates.txt").write_text("a {c} thing\n{c} {c}\n")
        (folder / name / "test" / "nshards.txt").write_text("1\n")
    asked = EvaluationSettings(
        retrieval=tuple(f"{name}={folder}/{name}/test" for name in sets),
        zero_shot=tuple(f"{name}-classes={folder}/{name}" for name in sets),
    )
    opened = HeldOutSets.open(Settings(evaluation=asked))
    return evaluate_held_out(colour_embedder(batch_size=16, max_bad_share=limit), opened)


def test_a_zero_shot_set_is_scored_by_its_labels_beside_chance_and_the_largest_class(tmp_path):
    drawn = zip(["red", "lime", "blue", "red", "blue"], b"01200", strict=True)  # the last one's label says red
    samples = [{"png": colour_image(colour), "txt": b"x", "cls": bytes([label])} for colour, label in drawn]
    figures = evaluate(tmp_path, shapes=samples).figures
    found = {key.removeprefix("shapes-classes."): x for key, x in figures.items() if "-classes." in key}
    assert found == pytest.approx(
        {
            "top1": 4 / 5,
            "mean_per_class": (2 / 3 + 1 + 1) / 3,
            "chance": 1 / 3,
            "largest_class": 3 / 5,  # always saying red is right for three of five
            "images": 5,
            "classes": 3,
            "skipped": 0,
        }
    )


def test_every_set_tells_how_many_samples_were_left_out(tmp_path):
    measured = evaluate(tmp_path, limit=0.3, whole=[RED] * 4, spoilt=[RED] * 3 + [BAD])
    skipped = {key.removesuffix(".skipped"): x for key, x in measured.figures.items() if key.endswith(".skipped")}
    assert skipped == {"whole": 0, "whole-classes": 0, "spoilt": 1, "spoilt-classes": 1}
    assert measured.skipped == {name: {"image does not decode": 1} for name in ("spoilt", "spoilt-classes")}
    assert [fault.id for fault in measured.faults["spoilt"]] == [3] and not measured.refused
    assert (measured.figures["spoilt.images"], measured.figures["spoilt-classes.images"]) == (3, 3)


def test_a_set_with_too_many_bad_samples_has_no_figure_and_the_others_have(tmp_path):
    measured = evaluate(tmp_path, limit=0.2, spoilt=[RED] * 3 + [BAD], whole=[RED] * 4)
    named = {f"{name}.{key}" for name in ("spoilt", "spoilt-classes") for key in ("images", "skipped")}
    assert {key for key in measured.figures if key.startswith("spoilt")} == named
    different = measured.figures["whole.image_to_different_text_recall_at_1"]
    assert different == measured.figures["whole-classes.top1"] == 1
    assert measured.refused.keys() == {"spoilt", "spoilt-classes"} and measured.embedded.keys() == {"whole"}
    with pytest.raises(RunFailed, match=r"^spoilt is not measured: 1 of 4 samples .*--max-bad-share$"):
        measured.raise_refused()


@pytest.mark.parametrize(
    ("samples", "limit", "refused"),
    [
        ([RED] * 19 + [BAD], 0.05, ""),  # just the share that is allowed
        ([RED] * 18 + [BAD] * 2, 0.05, "2 of 20 samples cannot be used (10.0%, data.max_bad_share is 5.0%), most"),
        ([RED] + [BAD] * 120, 1.0, ""),  # more in a row than training would pass over
        ([BAD] * 150, 1.0, "150 of 150 samples cannot be used (100.0%"),  # nothing is left
        ([RED] * 3 + [NO_IMAGE] * 2, 0.4, ""),  # what never became a sample is counted as bad
        ([RED] * 10 + [NO_IMAGE] * 29 + [BAD], 0.5, "30 of 40 samples cannot be used (75.0%"),
    ],
)
def test_the_share_of_bad_samples_is_exact(tmp_path, samples, limit, refused):
    measured = evaluate(tmp_path, limit=limit, one=samples)
    bad = sum(sample is not RED for sample in samples)
    assert (measured.figures["one.images"], measured.figures["one.skipped"]) == (len(samples) - bad, bad)
    assert all(measured.refused.get(name, "").startswith(refused) for name in ("one", "one-classes"))
    assert bool(refused) == bool(measured.refused) == (not measured.embedded)
    reasons = {"no image" if sample is NO_IMAGE else "image does not decode" for sample in samples if sample is not RED}
    assert measured.skipped["one"].keys() == reasons
