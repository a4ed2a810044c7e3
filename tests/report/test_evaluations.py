from __future__ import annotations

from neuclip.records import RunFolder
from neuclip.report.contents import read_contents
from neuclip.report.evaluations import all_evaluations, parse_evaluation


def test_figures_are_grouped_by_data_set_even_if_its_name_has_dots() -> None:
    evaluation = parse_evaluation(
        {
            "icons/v1.2.image_to_text_recall_at_1": 0.12,
            "icons/v1.2.image_to_text_chance_at_1": 0.001,
            "icons/v1.2.images": 1143,
            "icons/v1.2.captions": 960,
            "groups.top1": 0.4,
            "depth.distance": 7.0,
        }
    )
    [icons], [groups] = evaluation.retrieval, evaluation.zero_shot
    assert icons.name == "icons/v1.2" and icons["images"] == 1143
    assert icons.recall_and_chance("image_to_text") == (0.12, 0.001)
    assert icons.recall_and_chance("text_to_image") == (None, None)
    assert groups["top1"] == 0.4 and groups["top5"] is None
    assert evaluation.others == {"icons/v1.2.captions": 960, "depth.distance": 7.0}


def test_the_final_evaluation_is_not_counted_twice(run: RunFolder) -> None:
    contents = read_contents(run)
    assert [evaluation.samples for evaluation in all_evaluations(contents)] == [64_000 * index for index in range(1, 9)]
