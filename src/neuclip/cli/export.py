"""`neuclip export`, `neuclip merge`"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from neuclip.cli.command import check_target
from neuclip.errors import UserError
from neuclip.formatting import percent
from neuclip.progress import waiting
from neuclip.records import RunFolder

WEIGHT = 0.5
CURVES = (".image_to_text_recall_at_1", ".text_to_image_recall_at_1", ".top1")


def export(target: str, folder: str = "", *, to: Literal["open_clip", "transformers", "onnx"]) -> int:
    """neuclip export RUN|CHECKPOINT|MODEL --to open_clip|transformers|onnx [FOLDER]

    Writes the model for another library, loads it there and compares the features; a folder that differs is not kept.
    With preprocessing, tokenizer and a model card from the run's own figures. Default: a folder in that of the run.

    --to: open_clip; transformers (CLIPModel, for ViT towers); onnx (image.onnx, text.onnx)

    neuclip export runs/first --to onnx
    neuclip export runs/first --to open_clip my-clip
    """
    check_target(target)
    with waiting("loading torch"):
        from neuclip.runs import export as exporting

    place = exporting.result_folder(target, folder, to)
    with waiting(f"exporting {target}"):
        difference = exporting.export(target, to, place)
    print(f"{place}: features equal those of {target} (1 - cosine at most {difference:.1e})")
    print(f"to put it on the Hugging Face hub: hf upload NAME {place}", file=sys.stderr)
    return 0


def merge(
    base: str,
    run: str,
    folder: str = "",
    *,
    weight: Annotated[float | None, {"at_least": 0, "at_most": 1}] = None,
    curve: bool = False,
) -> int:
    """neuclip merge BASE RUN [FOLDER] [--weight 0.5]

    Writes the model between one that was fine-tuned and the result (WiSE-FT), as an open_clip folder.
    It often keeps most of what BASE knew and of what RUN learnt. BASE and RUN: runs, checkpoints or local-dir:FOLDER.

    --weight: share of RUN: 0 is BASE, 1 is RUN [default: 0.5]
    --curve: write no model, but measure RUN's held-out sets at 0, 0.1, ... 1, into its merge.jsonl

    neuclip merge local-dir:start runs/tuned --curve
    neuclip merge runs/a runs/b --weight 0.3 merged
    """
    check_target(base)
    check_target(run)
    if curve and (folder or weight is not None):
        raise UserError("--curve measures at every weight and writes no model; leave out --weight and the folder")
    with waiting("loading torch"):
        from neuclip.runs import export as merging

    if curve:
        return print_curve(merging.measure_curve(base, run), run)
    share = WEIGHT if weight is None else weight
    place = merging.result_folder(run, folder, f"merged-{share:g}")
    merging.merge(base, run, share, place)
    print(f"local-dir:{place}")
    return 0


def print_curve(lines: list[dict[str, float]], run: str) -> int:
    """One row per weight: recall@1 in both directions, or top-1 accuracy, of each held-out set. The report draws it."""
    from neuclip.report.page import Table, text_table
    from neuclip.report.run_report import write_report

    shown = [key for key in lines[0] if key.endswith(CURVES)]
    rows = [[f"{line['weight']:g}", *(percent(line.get(key)) for key in shown)] for line in lines]
    print(text_table(Table("", ["weight", *shown], rows)), end="")
    print(f"Report: {write_report(RunFolder(run))}", file=sys.stderr)
    return 0
