"""Writing a zero-shot task in the folder layout of CLIP_benchmark's webdataset classification sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from neuclip.data.tar.writing import write_tar


def write_zero_shot_folder(
    folder: Path, images: Iterable[tuple[bytes, int]], class_names: Sequence[str], templates: Sequence[str]
) -> None:
    """Write classnames.txt (line = label), the templates, and test/0.tar with (png, label) in the given order."""
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in class_names), encoding="utf-8")
    (folder / "zeroshot_classification_templates.txt").write_text("".join(f"{line}\n" for line in templates))
    (folder / "test" / "nshards.txt").write_text("1\n")
    members = ((("png", png), ("cls", str(label).encode())) for png, label in images)
    write_tar(folder / "test" / "0.tar", enumerate(members))
