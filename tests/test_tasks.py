from __future__ import annotations

from collections import Counter

import pytest

from neuclip.errors import UserError
from neuclip.tasks import GROUPS, choose_tasks, find_task, tasks


def test_the_table_has_the_counts_of_datacomps_list():
    assert len(tasks()) == 38 and sum(task.size for task in tasks()) == 697_369
    metrics = Counter(task.metric for task in tasks())
    assert metrics["acc1"] == 27 and metrics["mean_per_class_recall"] == 4 and metrics["mean_recall@1"] == 2
    assert sorted(metrics.values()) == [1, 1, 1, 1, 1, 2, 4, 27]
    assert Counter(task.kind for task in tasks()) == {"classification": 35, "retrieval": 2, "puzzles": 1}


@pytest.mark.parametrize(
    ("group", "members"),
    [("datacomp", 38), ("imagenet", 7), ("retrieval", 2), ("vtab", 13), ("imagenet_shifts", 6)],
)
def test_groups_have_their_published_number_of_tasks(group, members):
    assert len(choose_tasks(group)) == members


def test_every_group_of_a_task_has_a_title_and_every_word_means_one_task():
    assert {group for task in tasks() for group in task.groups} == set(GROUPS)
    for task in tasks():
        for word in (task.key, task.name, task.name.lower(), *task.folders):
            assert find_task(word) is task
    assert not {word.lower() for task in tasks() for word in (task.key, task.name, *task.folders)} & set(GROUPS)


def test_a_folder_is_found_under_the_name_of_a_clone(tmp_path):
    textures = find_task("dtd")
    assert textures.find_folder(tmp_path) is None
    (tmp_path / "wds_vtab-dtd").mkdir()
    assert textures.find_folder(tmp_path) == tmp_path / "wds_vtab-dtd"
    (tmp_path / "wds_vtab-dtd_test").mkdir()
    assert textures.find_folder(tmp_path) == tmp_path / "wds_vtab-dtd_test"


def test_tasks_and_groups_are_chosen_once_and_in_the_order_of_the_list():
    names = [task.name for task in choose_tasks("retrieval, Stanford Cars,Flickr")]
    assert names == ["Stanford Cars", "Flickr", "MSCOCO"]


def test_an_unknown_task_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="no task 'imagenet-v2'; did you mean imagenetv2"):
        find_task("imagenet-v2")
    with pytest.raises(UserError, match="no task 'xyz'; neuclip data get --list"):
        choose_tasks("dtd,xyz")
