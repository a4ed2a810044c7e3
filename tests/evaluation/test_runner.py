from __future__ import annotations

import pytest

from neuclip.data.held_out import HeldOutSets
from neuclip.errors import RunFailed, UserError
from neuclip.evaluation.runner import Evaluation, evaluate_held_out
from neuclip.settings.sections import EvaluationSettings, Settings
from tests.evaluation.colour_shards import colour_image, write_samples
from tests.evaluation.small_towers import colour_embedder

RED, BAD = {"png": colour_image("red"), "txt": b"red", "cls": b"0"}, {"png": b"bad", "txt": b"red", "cls": b"0"}


def pairs(folder, samples) -> str:
    """A data set for retrieval and, in its parent, for zero-shot."""
    write_samples(folder / "test" / "0.tar", samples)
    (folder / "classnames.txt").write_text("red\nblue\n")
    (folder / "zeroshot_classification_templates.txt").write_text("{c}\n")
    (folder / "test" / "nshards.txt").write_text("1\n")
    return str(folder / "test")


def evaluate(*folders, limit=0.05) -> Evaluation:
    """Each by its folder's name."""
    opened = HeldOutSets.open(
        Settings(
            evaluation=EvaluationSettings(
                retrieval=tuple(f"{folder}/test" for folder in folders), zero_shot=tuple(map(str, folders))
            )
        )
    )
    sets = HeldOutSets(
        {folder.name: source for folder, source in zip(folders, opened.retrieval.values(), strict=True)},
        {f"{folder.name}/classes": task for folder, task in zip(folders, opened.zero_shot.values(), strict=True)},
    )
    return evaluate_held_out(colour_embedder(batch_size=16, max_bad_share=limit), sets)


def test_every_set_tells_how_many_samples_were_left_out(tmp_path):
    pairs(tmp_path / "whole", [RED] * 4)
    pairs(tmp_path / "spoilt", [RED] * 3 + [BAD])
    measured = evaluate(tmp_path / "whole", tmp_path / "spoilt", limit=0.3)
    skipped = {key: value for key, value in measured.figures.items() if key.endswith(".skipped")}
    assert skipped == {
        "whole.skipped": 0,
        "whole/classes.skipped": 0,
        "spoilt.skipped": 1,
        "spoilt/classes.skipped": 1,
    }
    assert measured.skipped == {name: {"image does not decode": 1} for name in ("spoilt", "spoilt/classes")}
    assert [fault.id for fault in measured.faults["spoilt"]] == [3] and not measured.refused


def test_a_set_with_too_many_bad_samples_has_no_figure_and_the_others_have(tmp_path):
    pairs(tmp_path / "whole", [RED] * 4)
    pairs(tmp_path / "spoilt", [RED] * 3 + [BAD])
    measured = evaluate(tmp_path / "spoilt", tmp_path / "whole", limit=0.2)
    assert {key for key in measured.figures if key.startswith("spoilt")} == {
        "spoilt.images",
        "spoilt.skipped",
        "spoilt/classes.images",
        "spoilt/classes.skipped",
    }
    different = measured.figures["whole.image_to_different_text_recall_at_1"]
    assert different == measured.figures["whole/classes.top1"] == 1
    assert measured.refused.keys() == {"spoilt", "spoilt/classes"} and measured.embedded.keys() == {"whole"}
    with pytest.raises(RunFailed, match=r"^spoilt is not measured: 1 of 4 samples .*--max-bad-share$"):
        measured.raise_refused()


def test_more_bad_samples_in_a_row_than_training_would_pass_over_are_only_bad_samples(tmp_path):
    pairs(tmp_path / "broken", [BAD] * 150)
    pairs(tmp_path / "mostly", [BAD] * 120 + [RED])
    measured = evaluate(tmp_path / "broken", tmp_path / "mostly", limit=1.0)
    assert measured.refused.keys() == {"broken", "broken/classes"} and len(measured.faults["broken"]) == 150
    assert (measured.figures["mostly.images"], measured.figures["mostly.skipped"]) == (1, 120)


def test_what_never_became_a_sample_is_counted_as_bad(tmp_path):
    pairs(tmp_path / "some", [RED] * 3 + [{"txt": b"red"}] * 2)
    measured = evaluate(tmp_path / "some", limit=0.4)
    assert measured.figures["some.skipped"] == 2 and measured.skipped["some"] == {"no image": 2}
    assert measured.figures["some.images"] == 3 and not measured.refused


def test_a_set_that_is_mostly_lost_is_not_measured(tmp_path):
    pairs(tmp_path / "lost", [RED] * 10 + [{"txt": b"red"}] * 29 + [BAD])
    measured = evaluate(tmp_path / "lost", limit=0.5)
    assert measured.refused.keys() == {"lost", "lost/classes"} and not measured.embedded
    assert measured.refused["lost"].startswith("30 of 40 samples cannot be used (75.0%, ")
    assert measured.refused["lost"].endswith("most often: no image (29)")
    assert (measured.figures["lost.images"], measured.figures["lost.skipped"]) == (10, 30)


def test_a_table_whose_images_do_not_exist_is_refused_before_training(tmp_path):
    table = tmp_path / "pairs.csv"
    table.write_text("filepath,title\nnowhere/a.png,a\nnowhere/b.png,b\n")
    with pytest.raises(UserError, match=r"none of its first images exists"):
        HeldOutSets.open(Settings(evaluation=EvaluationSettings(retrieval=(str(table),), zero_shot=())))
