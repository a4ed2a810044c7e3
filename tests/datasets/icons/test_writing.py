from __future__ import annotations

from neuclip.datasets.icons.writing import TEMPLATES, LabelledImage, frequent_classes, write_task


def test_the_classes_of_a_task_are_those_that_occur_in_alphabetical_order(tmp_path):
    write_task(tmp_path, [LabelledImage(b"1", "objects"), LabelledImage(b"2", "animals and nature")])
    assert (tmp_path / "classnames.txt").read_text() == "animals and nature\nobjects\n"
    assert all("{c}" in template for template in TEMPLATES)


def test_a_task_may_ask_about_more_classes_than_occur(tmp_path):
    write_task(tmp_path, [LabelledImage(b"1", "key")], ["key", "anchor"])
    assert (tmp_path / "classnames.txt").read_text() == "anchor\nkey\n"


def test_classes_with_few_images_are_left_out():
    images = [LabelledImage(b"", "often")] * 5 + [LabelledImage(b"", "rare")] * 4
    assert {image.class_name for image in frequent_classes(images)} == {"often"}
