"""README.md of a model that leaves this machine: what it is, what it was trained on and how well, from the run's files.

Nothing in it names a folder of this machine. The licence is left open: it follows from the data, which only the user
knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neuclip.formatting import format_count, format_number, format_samples, percent
from neuclip.models.towers import BuiltModel, image_shape
from neuclip.records import RunFolder
from neuclip.report.contents import Figures, RunContents, finite, read_contents
from neuclip.report.measures import evaluation_tables
from neuclip.report.page import markdown_table
from neuclip.secrets import between_commas, without_queries

LOADING = {
    "open_clip": """import open_clip
model, _, transform = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")""",
    "transformers": """from transformers import CLIPModel, CLIPProcessor
model, processor = CLIPModel.from_pretrained("FOLDER"), CLIPProcessor.from_pretrained("FOLDER")
inputs = processor(text=["a photo of a dog"], images=image, return_tensors="pt", padding="max_length", truncation=True)
outputs = model(**inputs)  # outputs.image_embeds, outputs.text_embeds: rows of length 1""",
    "onnx": """import onnxruntime
from tokenizers import Tokenizer
tokens = [one.ids for one in Tokenizer.from_file("FOLDER/tokenizer.json").encode_batch(["a photo of a dog"])]
text = onnxruntime.InferenceSession("FOLDER/text.onnx").run(None, {"tokens": tokens})[0]  # rows of length 1
image = onnxruntime.InferenceSession("FOLDER/image.onnx").run(None, {"images": pixels})[0]  # see preprocessing.json""",
}
# open_clip would ask the hub for the config of a text tower of transformers; it lies in the folder.
LOADING_TEXT_TOWER = """import json, open_clip
text = json.load(open("FOLDER/open_clip_config.json"))["model_cfg"]["text_cfg"]
text |= {"hf_model_name": "FOLDER", "hf_model_pretrained": False}  # from this folder, not from the hub
model, _, transform = open_clip.create_model_and_transforms("local-dir:FOLDER", text_cfg=text)
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")"""
NOTES = {
    "transformers": "Its centre crop may lie one pixel beside open_clip's where the margin is odd, and it does not "
    "repair HTML entities and wrongly decoded letters in texts.",
}
LICENCE = """## Licence

Not chosen yet. It depends on the terms of the training data and of the weights that training started from; write it
here and as `license:` into the first lines of this file."""


def model_card(target: str, built: BuiltModel, form: str, difference: float) -> str:
    """Markdown. `difference`: the largest 1 - cosine found when the export was checked."""
    run, samples = run_of(target)
    check = f"Checked on export: features equal those of the original (1 - cosine at most {difference:.0e})."
    parts = [
        header(form),
        f"# {run.name if run else 'CLIP model'}",
        "A CLIP model: images and texts become vectors, and those that belong together point the same way.",
        about_model(built),
        *(
            about_run(run, samples)
            if run
            else ["## Training\n\nUnknown: this model was exported from its weights alone."]
        ),
        f"## Use\n\n```python\n{loading(form, built)}\n```\n\n{check} {NOTES.get(form, '')}".rstrip(),
        LICENCE,
    ]
    return "\n\n".join(parts) + "\n"


def merged_card(built: BuiltModel, base: str, run: str, weight: float) -> str:
    """Of a model between two others, which has no figures of its own yet."""
    names = [Path(name.removeprefix("local-dir:")).resolve().name for name in (base, run)]
    parts = [
        header("open_clip"),
        f"# {names[1]}, merged with {names[0]}",
        f"Weights: {1 - weight:g} of {names[0]} and {weight:g} of {names[1]}, which was fine-tuned from it (WiSE-FT). "
        "Not evaluated yet.",
        about_model(built),
        f"## Use\n\n```python\n{loading('open_clip', built)}\n```",
        LICENCE,
    ]
    return "\n\n".join(parts) + "\n"


def loading(form: str, built: BuiltModel) -> str:
    if form == "open_clip" and built.config["text_cfg"].get("hf_model_name"):
        return LOADING_TEXT_TOWER
    return LOADING[form]


def header(form: str) -> str:
    """What the Hugging Face hub reads."""
    return f"---\nlibrary_name: {form}\npipeline_tag: zero-shot-image-classification\ntags: [clip, neuclip]\n---"


def run_of(target: str) -> tuple[RunContents | None, int]:
    """The run of a target and the samples that its model has seen; None for a model without a run."""
    from neuclip.runs.checkpoint import find_checkpoint

    path = Path(target)
    folder = RunFolder(path.parent.parent if path.suffix == ".pt" else path)
    if not folder.settings.is_file():
        return None, 0
    checkpoint = path if path.suffix == ".pt" else find_checkpoint(folder)
    return read_contents(folder), int(re.sub(r"\D", "", checkpoint.stem) or 0)


def about_model(built: BuiltModel) -> str:
    height, width = image_shape(built.towers.model)
    parameters = sum(parameter.numel() for parameter in built.towers.model.parameters())
    rows = {
        "parameters": format_count(parameters),
        "images": f"{height} x {width} pixels",
        "texts": f"{built.tokenize(['a']).shape[1]} tokens",
        "features": format_count(built.embed_dim),
        "temperature": format_number(1 / float(built.towers.logit_scale.detach())),
    }
    return f"## Model\n\n{table(['', ''], rows.items())}"


def about_run(run: RunContents, samples: int) -> Iterator[str]:
    setting, environment = run.settings.get, run.environment.get
    rows = {
        "data": public(str(setting("data.train") or "unknown")),
        "pairs": format_count(finite(run.environment).get("data.count")),
        "fingerprint of the captions": str(environment("data.sha256", ""))[:16],
        "method": run.objective,
        "started from": public(str(setting("model.pretrained") or setting("model.name") or "")),
        "image tower, text tower": ", ".join(str(setting(f"model.{side}_tower") or "") for side in ("image", "text")),
        "samples seen": format_samples(samples),
        "batch size": format_count(setting("train.batch_size")),
        "learning rate, weight decay": ", ".join(
            format_number(setting(f"optimizer.{name}")) for name in ("learning_rate", "weight_decay")
        ),
        "seed": str(setting("run.seed")),
        "neuclip, torch": ", ".join(str(environment(f"versions.{package}", "")) for package in ("neuclip", "torch")),
    }
    yield f"## Training\n\n{table(['', ''], ((name, value) for name, value in rows.items() if value.strip(', ')))}"
    measured = [evaluation for evaluation in run.evaluations if evaluation["samples"] == samples]
    yield f"## Results\n\n{results(measured[-1]) if measured else 'Not measured at this point of the training.'}"
    yield f"## Limits\n\n{limits(run, bool(measured))}"


def results(figures: Figures) -> str:
    parts = ((*key.rpartition("."), value) for key, value in figures.items())
    tables = evaluation_tables({f"{public(dataset)}{dot}{metric}": value for dataset, dot, metric, value in parts})
    shown = [f"**{one.caption}**\n\n{markdown_table(one)}" for one in tables]
    return "\n".join(shown).rstrip() or "No held-out set was given."


def limits(run: RunContents, measured: bool) -> str:
    lines = ["It repeats what its captions say, with their mistakes and prejudices; nobody has looked for these."]
    lines.append("The figures hold for images and captions like those of the sets above." if measured else "")
    if truncated := run.last("truncated_captions"):
        lines.append(f"{percent(truncated)} of the captions filled the context, and may have been cut off.")
    if skipped := sum(finite(run.under("skipped")).values()):
        lines.append(f"{skipped:,.0f} training samples could not be used.")
    lines += [f"{public(name)} was not measured." for name in run.under("not_measured")]
    return "\n".join(f"- {line}" for line in lines if line)


def table(heading: list[str], rows: Any) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def public(address: str) -> str:
    """An address without secrets, and without the folders of this machine.

    >>> public("icons-30k,/home/me/photos.csv:2")
    'icons-30k,photos.csv:2'
    """
    parts = between_commas(without_queries(address))
    local = [part.removeprefix("local-dir:") for part in parts]
    return ",".join(Path(part).name if part.startswith("/") else part for part in local)
