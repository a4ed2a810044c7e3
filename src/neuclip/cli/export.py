"""`neuclip export`"""

from __future__ import annotations

from collections.abc import Sequence

from neuclip.cli.eval import check_target
from neuclip.cli.flags import Command, Flag
from neuclip.errors import UserError, proposal
from neuclip.progress import waiting

FORMATS = ("open_clip", "transformers", "onnx")

COMMAND = Command(
    usage=f"export RUN|CHECKPOINT|MODEL --to {'|'.join(FORMATS)} [FOLDER]",
    about="""Writes the model for another library and reads it back with that library: only equal features are kept.
With preprocessing, tokenizer and a model card from the run's own figures. Default: a folder in that of the run.""",
    flags=(Flag("to", str, "open_clip; transformers (CLIPModel, for ViT towers); onnx (image.onnx, text.onnx)"),),
    examples=(
        "neuclip export runs/first --to onnx",
        "neuclip export runs/first --to open_clip my-clip",
    ),
    most=2,
)


def run(arguments: Sequence[str]) -> int:
    operands, values = COMMAND.parse(arguments)
    target, given = operands[0], operands[1] if operands[1:] else ""
    form = values.get("to", "")
    if form not in FORMATS:
        raise UserError(f"--to is {form or 'missing'}; {proposal(form, [*FORMATS])}")
    check_target(target)
    with waiting("loading torch"):
        from neuclip.runs.export import export
    from neuclip.runs.export import result_folder

    folder = result_folder(target, given, form)
    with waiting(f"exporting {target}"):
        difference = export(target, form, folder)
    print(f"{folder}: features equal those of {target} (1 - cosine at most {difference:.1e})")
    print(f"To share it: hf upload NAME {folder}")
    return 0
