"""Folders that hold a test part beside the training part: read as one, they would train on the test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from neuclip.errors import UserError

BUILD_NOTES = "BUILD.json"  # in the folder of a set that `neuclip data prepare` has made: each folder in it is a part
NAMES = r"train(?:ing)?|val(?:id(?:ation)?)?|test|dev|held[-_]?out"
FOLDER = re.compile(rf"(?:{NAMES})\d*", re.IGNORECASE)  # COCO's are train2017, val2017
FILE = re.compile(rf"(?<![a-z])(?:{NAMES})(?![a-z])", re.IGNORECASE)  # cc3m-train-0000.tar; latest.tar is no test
OF_A_HUB = re.compile(r"\w+(?=-\d+-of-\d+)")  # Hugging Face's files, whatever their split is called


def refuse_several_parts(folder: str, files: Iterable[str], *, built: bool = False) -> None:
    """Raises UserError where files (their paths from the folder, with slashes) are of several parts and one of these
    is not training. With `built`, all folders are parts, whatever their names.

    >>> refuse_several_parts("spl", ["train/0.tar", "test/0.tar"])                        # doctest: +SKIP
    neuclip.errors.UserError: spl: holds the parts test, train; give one of them, such as spl/train
    """
    addresses: dict[str, str] = {}
    for file in files:
        part, pattern = _part(PurePosixPath(file), built)
        addresses[part] = file if "*" in pattern and part not in addresses else pattern
    named = sorted(addresses.keys() - {""})
    held_out = [part for part in named if not part.lower().startswith("train")]
    if not held_out or len(addresses) == 1:
        return
    chosen = next((part for part in named if part not in held_out), held_out[0])
    example = f"{folder.rstrip('/')}/{addresses[chosen]}"
    example = f"'{example}'" if "*" in example else example
    if len(named) > 1:
        raise several_parts_error(folder, named, example)
    raise UserError(
        f"{folder}: holds the part {named[0]} beside other data; move {named[0]} elsewhere to use the rest, or give "
        f"{example} to use it alone"
    )


def several_parts_error(folder: str, parts: Iterable[str], example: str) -> UserError:
    return UserError(f"{folder}: holds the parts {', '.join(parts)}; give one of them, such as {example}")


def is_part(folder: str) -> bool:
    """Whether a folder has the name of a part."""
    return FOLDER.fullmatch(folder) is not None


def _part(file: PurePosixPath, built: bool) -> tuple[str, str]:
    """The name of a file's part, "" if it is of none, and the path that gives this part alone."""
    if len(file.parts) > 1 and (built or is_part(file.parts[0])):
        return file.parts[0], file.parts[0]
    match = OF_A_HUB.match(file.name) or FILE.search(file.name)
    if match is None:
        return "", ""
    ending = file.name[match.end() :].partition(".")[2]
    return match[0], str(file.with_name(f"{file.name[: match.end()]}*.{ending}"))
