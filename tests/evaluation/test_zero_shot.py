from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuclip.data.task_sets import ZeroShotTask
from neuclip.errors import UserError
from neuclip.evaluation.zero_shot import accuracy, classifier, evaluate_task
from tests.evaluation.colour_shards import colour_image, write_samples
from tests.evaluation.small_towers import ColourTowers, colour_embedder, count_colours


def make_task(folder, *, labels=(0, 1, 2, 0, 0), classnames="red\ngreen\nblue\n", templates="a {c} thing\n{c} {c}\n"):
    colours = ["red", "lime", "blue", "red", "blue"]  # the last one's label says red: one wrong answer
    samples = [
        {"png": colour_image(c)} | ({} if label is None else {"cls": str(label).encode()})
        for c, label in zip(colours, labels, strict=True)
    ]
    write_samples(folder / "test" / "0.tar", samples)
    (folder / "classnames.txt").write_text(classnames)
    (folder / "zeroshot_classification_templates.txt").write_text(templates)
    (folder / "test" / "nshards.txt").write_text("1\n")
    return folder


def evaluate(folder):
    return evaluate_task(colour_embedder(batch_size=2), ZeroShotTask.open(folder))


def test_a_folder_is_scored_by_its_labels(tmp_path):
    figures, faults = evaluate(make_task(tmp_path))
    assert figures["top1"] == 4 / 5
    assert figures["mean_per_class"] == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert (figures["images"], figures["classes"], figures["chance"]) == (5, 3, 1 / 3)
    assert not faults and "top5" not in figures


def test_the_share_of_the_largest_class_is_given_where_chance_would_flatter(tmp_path):
    figures, _ = evaluate(make_task(tmp_path))
    assert figures["largest_class"] == 3 / 5  # labels 0, 1, 2, 0, 0: always saying red is right for three of five


def test_images_that_cannot_be_read_are_not_scored(tmp_path):
    make_task(tmp_path)
    samples = [{"png": colour_image("red"), "cls": b"0"}, {"png": b"no image", "cls": b"1"}]
    write_samples(tmp_path / "test" / "0.tar", samples)
    figures, faults = evaluate(tmp_path)
    assert (figures["images"], figures["top1"]) == (1, 1.0)
    assert [(fault.id, fault.reason) for fault in faults] == [(1, "image does not decode")]


def test_class_rows_are_the_normalized_mean_of_unit_rows():
    towers, templates = ColourTowers(), ["{c}", "{c} and red", "blue {c} {c}"]
    got = classifier(colour_embedder(towers, batch_size=4), ["red", "blue"], templates)
    for row, name in zip(got, ["red", "blue"], strict=True):
        sentences = [template.replace("{c}", name) for template in templates]
        mean = sum(towers.encode_text(count_colours([sentence]))[0] for sentence in sentences)
        assert torch.allclose(row, F.normalize(mean, dim=0), atol=1e-6)


def test_accuracy_matches_the_double_loop():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    weights = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(8, (60,), generator=generator)  # class 8 has no image
    figures = accuracy(images, weights, labels)
    orders = [sorted(range(9), key=lambda c: -float(image @ weights[c])) for image in images]
    right = [order[0] == label for order, label in zip(orders, labels.tolist(), strict=True)]
    by_class = [[r for r, label in zip(right, labels.tolist(), strict=True) if label == c] for c in range(8)]
    assert figures["top1"] == pytest.approx(sum(right) / 60)
    assert figures["top5"] == pytest.approx(sum(label in o[:5] for o, label in zip(orders, labels, strict=True)) / 60)
    assert figures["mean_per_class"] == pytest.approx(sum(sum(r) / len(r) for r in by_class) / 8)


def test_equal_class_names_go_to_the_lower_label():
    weights = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert accuracy(torch.tensor([[1.0, 0.0]] * 2), weights, torch.tensor([0, 1]))["top1"] == 0.5


def test_a_blank_class_name_keeps_its_line(tmp_path):
    task = ZeroShotTask.open(make_task(tmp_path, classnames="red\n\nblue\n"))
    assert task.classnames == ["red", "", "blue"]


@pytest.mark.parametrize("file", ["classnames.txt", "test"])
def test_a_missing_file_is_named(tmp_path, file):
    make_task(tmp_path)
    (tmp_path / file).rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=file):
        ZeroShotTask.open(tmp_path)


def test_a_label_without_a_class_name_is_named(tmp_path):
    with pytest.raises(UserError, match="label 3"):
        ZeroShotTask.open(make_task(tmp_path, labels=(0, 1, 3, 0, 0)))


def test_a_folder_without_labels_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"\.cls"):
        ZeroShotTask.open(make_task(tmp_path, labels=(0, 1, None, 0, 0)))


def test_a_template_without_the_placeholder_is_refused(tmp_path):
    with pytest.raises(UserError, match="line 2"):
        ZeroShotTask.open(make_task(tmp_path, templates="a {c}\na thing\n"))


def test_a_shard_that_the_folder_promises_must_be_there(tmp_path):
    make_task(tmp_path)
    (tmp_path / "test" / "nshards.txt").write_text("2\n")
    with pytest.raises(UserError, match=r"1\.tar"):
        ZeroShotTask.open(tmp_path)
