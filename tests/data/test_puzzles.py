from __future__ import annotations

import csv
import json

import pytest
from neuclip.data.puzzles import Puzzle, read_puzzles

from neuclip.errors import UserError
from tests.data.small_shards import image_bytes

ROWS = [
    ("winter", ["snow", "hot dog", "Sun", "ice", "car"], ["snow", "ice"]),
    ("food", ["hot dog", "car", "apple", "snow", "ice", "Sun"], ["apple", "hot dog"]),
]


def write_images(folder, names=("snow", "hot_dog", "sun", "ice", "car", "apple")):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        ending = "jpg" if number % 2 else "png"
        (folder / f"{name}.{ending}").write_bytes(image_bytes(number, ending))


def write_table(path, rows=ROWS, spell=json.dumps):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(["ID", "cue", "associations", "candidates"])
        for number, (cue, candidates, associations) in enumerate(rows):
            writer.writerow([number, cue, spell(associations), spell(candidates)])


def refusal(folder) -> str:
    with pytest.raises(UserError) as caught:
        read_puzzles(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "tsv", "python lists", "jsonl"])
def test_every_spelling_of_the_table_gives_the_same_puzzles(tmp_path, kind):
    write_images(tmp_path / "images")
    if kind == "jsonl":
        lines = [{"cue": cue, "candidates": all_, "associations": right} for cue, all_, right in ROWS]
        (tmp_path / "puzzles.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        write_table(
            tmp_path / f"x.{'csv' if kind == 'python lists' else kind}", spell=repr if "p" in kind else json.dumps
        )
    got = read_puzzles(tmp_path)
    assert got.puzzles == [
        Puzzle("winter", (0, 1, 2, 3, 4), (0, 3)),
        Puzzle("food", (1, 4, 5, 0, 3, 2), (1, 5)),
    ]
    assert len(got.source) == 6 and got.source[1].image == image_bytes(1, "jpg")  # hot_dog.jpg, in both puzzles


def test_an_image_in_the_folder_itself_goes_before_one_in_images(tmp_path):
    write_images(tmp_path / "images")
    (tmp_path / "snow.png").write_bytes(image_bytes(77))
    write_table(tmp_path / "x.csv")
    assert read_puzzles(tmp_path).source[0].image == image_bytes(77)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "x.csv: holds no puzzles"),
        ([("cue", ["snow", "moon"], ["snow"])], "x.csv row 1: no image of 'moon'"),
        ([("cue", ["snow", "ice"], ["car"])], "x.csv row 1: association 'car' is not among the candidates"),
        ([("cue", ["snow", "ice"], [])], "x.csv row 1: its associations are not a list of names"),
        ([("", ["snow", "ice"], ["ice"])], "x.csv row 1: has no cue"),
        ([("cue", "snow", ["ice"])], "x.csv row 1: its candidates are not a list of names"),
    ],
)
def test_a_wrong_row_is_one_line_with_its_place(tmp_path, rows, expected):
    write_images(tmp_path)
    write_table(tmp_path / "x.csv", rows)
    assert expected in refusal(tmp_path)


def test_a_folder_without_one_table_is_refused(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")
    write_images(tmp_path)
    (tmp_path / "other.csv").write_text("image,caption\n")
    assert "no .csv, .tsv or .jsonl file with the columns cue, candidates, associations" in refusal(tmp_path)
    write_table(tmp_path / "x.csv")
    write_table(tmp_path / "y.tsv")
    assert "has x.csv and y.tsv" in refusal(tmp_path)
