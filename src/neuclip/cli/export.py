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

    Writes the model in the format of another library, loads it there and compares its features with the original's. If
    they differ, no folder is left behind. FOLDER also gets the preprocessing, the tokenizer and a model card with the
    run's figures. Without FOLDER, the model is written to a folder inside the run.

    --to: format: open_clip, transformers (a CLIPModel; ViT towers only) or onnx (image.onnx and text.onnx)

    neuclip export runs/first --to onnx
    neuclip export runs/first --to open_clip my-clip
    """
    check_target(target)
    with waiting("loading torch"):
        from neuclip.runs import export as exporting

    path = exporting.result_folder(target, folder, to)
    with waiting(f"exporting {target}"):
        difference = exporting.export(target, to, path)
    print(f"{path}: features equal those of {target} (1 - cosine at most {difference:.1e})")
    print(f"to put it on the Hugging Face hub: hf upload NAME {path}", file=sys.stderr)
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

    Averages the weights of two models: BASE, and RUN, which was fine-tuned from BASE (WiSE-FT). The merged model often
    keeps most of what BASE knew and most of what RUN learnt. It is written as an open_clip folder.
    BASE and RUN are runs, checkpoints or local-dir:FOLDER.

    --weight: weight of RUN in the average: 0 gives BASE, 1 gives RUN [default: 0.5]
    --curve: write no model; measure RUN's held-out sets at the weights 0, 0.1, ... 1 and write its merge.jsonl

    neuclip merge local-dir:start runs/tuned --curve
    neuclip merge runs/a runs/b --weight 0.3 merged
    """
    check_target(base)
    check_target(run)
    if curve and (folder or weight is not None):
        raise UserError("--curve measures all weights and writes no model; leave out --weight and the folder")
    with waiting("loading torch"):
        from neuclip.runs import export as merging

    if curve:
        return print_curve(merging.measure_curve(base, run), run)
    share = WEIGHT if weight is None else weight
    path = merging.result_folder(run, folder, f"merged-{share:g}")
    merging.merge(base, run, share, path)
    print(f"local-dir:{path}")
    return 0


def print_curve(lines: list[dict[str, float]], run: str) -> int:
    """Print a row per weight with recall@1 in both directions, or top-1 accuracy, on each held-out set; write the run's
    report, which draws them."""
    from neuclip.report.page import Table, text_table
    from neuclip.report.run_report import write_report

    shown = [key for key in lines[0] if key.endswith(CURVES)]
    rows = [[f"{line['weight']:g}", *(percent(line.get(key)) for key in shown)] for line in lines]
    print(text_table(Table("", ["weight", *shown], rows)), end="")
    print(f"Report: {write_report(RunFolder(run))}", file=sys.stderr)
    return 0
