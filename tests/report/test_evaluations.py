from __future__ import annotations

from neuclip.records import RunFolder
from neuclip.report.contents import read_contents
from neuclip.report.evaluations import (
    DEFINITION,
    DIFFERENT_DEFINITION,
    HeldOutSet,
    all_evaluations,
    parse_evaluation,
)


def test_figures_are_grouped_by_data_set_even_if_its_name_has_dots() -> None:
    evaluation = parse_evaluation(
        {
            "icons/v1.2.image_to_text_recall_at_1": 0.12,
            "icons/v1.2.image_to_text_chance_at_1": 0.001,
            "icons/v1.2.images": 1143,
            "icons/v1.2.captions": 960,
            "icons/v1.2.image_to_text_median_rank": 8,
            "icons/v1.2.image_to_text_recall_at_10": 0.5,
            "refused.images": 3,
            "refused.skipped": 40,
            "groups.top1": 0.4,
            "depth.distance": 7.0,
        }
    )
    [icons], [groups] = evaluation.retrieval, evaluation.zero_shot
    assert icons.name == "icons/v1.2" and icons["images"] == 1143
    assert icons.recall_and_chance("image_to_text") == (0.12, 0.001)
    assert icons.recall_and_chance("text_to_image") == (None, None)
    assert groups["top1"] == 0.4 and groups["top5"] is None
    assert icons.depths("image_to_text") == [1, 10] and icons.depths("text_to_image") == []
    assert icons.median_rank("image_to_text") == "8 of 960" and icons.median_rank("text_to_image") == ""
    assert evaluation.others == {"depth.distance": 7.0}  # counts are no figures


def test_a_set_tells_its_size_and_by_which_definitions_it_was_measured() -> None:
    def measured(**metrics: float) -> HeldOutSet:
        return HeldOutSet("a", {"image_to_text_recall_at_1": 0.5, **metrics})

    assert measured(images=1000, captions=5000).size == "1,000 images, 5,000 captions, 5 per image"
    assert measured(images=1000, captions=5000).definitions == [DEFINITION]
    both = measured(images=9, captions=9, image_to_different_text_recall_at_1=0.6)
    assert both.definitions == [DEFINITION, DIFFERENT_DEFINITION]
    # Fewer captions than images: a run of an earlier version, which merged equal ones.
    assert measured(images=1144, captions=960).definitions == [DIFFERENT_DEFINITION]


def test_the_final_evaluation_is_not_counted_twice(run: RunFolder) -> None:
    contents = read_contents(run)
    assert [evaluation.samples for evaluation in all_evaluations(contents)] == [64_000 * index for index in range(1, 9)]
