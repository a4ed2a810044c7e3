"""Export a model for another library, or merge it with the model it was fine-tuned from. A model card from the run's
files comes with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.data.held_out import HeldOutSets
from neuclip.data.open import local_only
from neuclip.errors import UserError
from neuclip.evaluation.embedding import Embedder
from neuclip.evaluation.held_out import evaluate_held_out
from neuclip.files import new_folder, read_json, refuse_existing, write_text
from neuclip.formatting import format_count, format_number
from neuclip.models.build import BuiltModel, image_shape
from neuclip.models.config import different_fields
from neuclip.models.export import loading_code, write_format
from neuclip.records import REMEDY, RunFolder, append_line, read_lines
from neuclip.report.measures import evaluation_tables
from neuclip.report.page import Table, markdown_table
from neuclip.runs.folder import checkpoints_in, samples_at, stored_settings
from neuclip.runs.load import open_target
from neuclip.secrets import between_commas, without_queries
from neuclip.settings.reading import changed_fields, may_change_at_resume
from neuclip.settings.sections import Settings

CURVE = tuple(step / 10 for step in range(11))
SIDES = ((64, 64), (300, 200), (90, 333))
TEXTS = (
    "a photo of a dog",
    "Two children's bicycles, 12 km from Zürich -- naïve café!",
    "a very long caption that no small context can hold, and that every tokenizer has to cut off, " * 3,
    "",
)


def result_folder(target: str, folder: str, name: str) -> Path:
    """The folder that a command writes: `folder` if it is not empty, otherwise `name` in the folder of the run."""
    if folder:
        return Path(folder)
    if RunFolder(target).settings.is_file():
        return Path(target) / name
    raise UserError(f"{target} is not the folder of a run; give the folder to write as the last argument")


def export(target: str, form: str, folder: Path) -> float:
    """Write the model of a run, a checkpoint or `local-dir:FOLDER` into a new `folder`, in the format `form`, a key of
    `FORMATS`. Returns the largest 1 - cosine between its features and those of the written files."""
    refuse_existing(folder)
    built, _ = open_target(target)
    return _write(built, form, folder, about_run(target))


def merge(base: str, run: str, weight: float, folder: Path) -> None:
    """Write (1 - weight) base + weight run as an open_clip folder. `base` and `run`: as for `neuclip eval`."""
    refuse_existing(folder)
    first, second, _ = open_pair(base, run)
    second.towers.model.load_state_dict(interpolate(_weights(first), _weights(second), weight))
    names = [Path(name.removeprefix("local-dir:")).resolve().name for name in (base, run)]
    shares = f"{1 - weight:g} of {names[0]} and {weight:g} of {names[1]}, which was fine-tuned from it"
    training = f"The weights are interpolated: {shares} (WiSE-FT)."
    about = {"title": f"{names[1]}, merged with {names[0]}", "training": training, "results": "Not evaluated yet."}
    _write(second, "open_clip", folder, about)


def measure_curve(base: str, run: str, weights: Sequence[float] = CURVE) -> list[dict[str, float]]:
    """The held-out figures of `run` at every weight: {"weight": 0.3, "SET.METRIC": ...}. Each is also written to
    merge.jsonl in the run's folder as soon as it is measured."""
    folder = RunFolder(run)
    if not folder.settings.is_file():
        raise UserError(f"--curve needs the held-out sets of a run, but {run} is not one; give the folder of a run")
    first, second, settings = open_pair(base, run)
    with local_only(run):
        sets = HeldOutSets.open(settings)
    evaluation, data = settings.evaluation, settings.data
    if not (sets.retrieval or sets.zero_shot):
        raise UserError(f"{run} has no held-out sets to measure on; give it some: --evaluation.retrieval DATA")
    start, tuned = _weights(first), _weights(second)
    folder.merges.unlink(missing_ok=True)
    lines = []
    for weight in weights:
        second.towers.model.load_state_dict(interpolate(start, tuned, weight))
        embedder = Embedder(second, evaluation.batch_size, data.workers, max_bad_share=data.max_bad_share)
        lines.append({"weight": weight, **evaluate_held_out(embedder, sets).figures})
        append_line(folder.merges, lines[-1])
    return lines


def open_pair(base: str, run: str) -> tuple[BuiltModel, BuiltModel, Settings]:
    """Both models, and the settings of the second. Raises UserError if the models cannot be interpolated."""
    (first, _), (second, settings) = open_target(base), open_target(run)
    configs = ({**built.config, "preprocessing": built.towers.model.visual.preprocess_cfg} for built in (first, second))
    if different := different_fields(*configs):
        raise UserError(
            f"{base} and {run} differ in {', '.join(different)}; only a model and what was fine-tuned from it can be "
            "merged"
        )
    if _statistics(first) != _statistics(second):
        print(
            "the model has BatchNorm: its statistics are interpolated too, but those of the merged weights would be "
            "different; measure the result before you use it",
            file=sys.stderr,
        )
    return first, second, settings


def _statistics(built: BuiltModel) -> list[list[float]]:
    """BatchNorm's running statistics. Two models have equal ones if a tower with BatchNorm was locked."""
    norms = [module for module in built.towers.model.modules() if isinstance(module, _BatchNorm)]
    return [values.tolist() for norm in norms for values in norm.buffers() if values.is_floating_point()]


@torch.no_grad()
def interpolate(base: dict[str, Tensor], tuned: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """(1 - weight) base + weight tuned, tensor by tensor: WiSE-FT (Wortsman et al., arXiv 2109.01903).

    Computed in float32. The temperature is stored as a logarithm, which is interpolated. BatchNorm's running statistics
    are interpolated; integers, such as its count of batches, are taken from `tuned`.

    >>> interpolate({"w": torch.zeros(2)}, {"w": torch.ones(2)}, 0.25)["w"]
    tensor([0.2500, 0.2500])
    """
    shapes, others = ({name: tensor.shape for name, tensor in state.items()} for state in (base, tuned))
    if different := sorted({name for name, _ in shapes.items() ^ others.items()}):
        raise UserError(
            f"the two models differ in {len(different):,} of their weights, the first is {different[0]}; "
            "give a model and what was fine-tuned from it"
        )
    merged = {name: torch.lerp(base[name].float(), x.float(), weight).to(x.dtype) for name, x in tuned.items()}
    return {name: merged[name] if x.is_floating_point() else x.clone() for name, x in tuned.items()}


def _weights(built: BuiltModel) -> dict[str, Tensor]:
    """A copy of the weights on the CPU. A state dict alone would change with its model."""
    return {name: tensor.detach().cpu().clone() for name, tensor in built.towers.model.state_dict().items()}


def _write(built: BuiltModel, form: str, folder: Path, about: dict[str, Any]) -> float:
    with new_folder(folder) as unfinished:
        difference = write_format(form, built, unfinished, [*map(draw, SIDES)], [*TEXTS])
        template = jinja2.Template(Path(__file__).with_name("model_card.md").read_text(encoding="utf-8"))
        about |= {"form": form, "loading": loading_code(form, built), "model": about_model(built)}
        write_text(unfinished / "README.md", template.render(about, difference=f"{difference:.0e}") + "\n")
    return difference


def draw(size: tuple[int, int]) -> Image.Image:
    """A test image with edges and gradients in all three colours."""
    red = Image.linear_gradient("L").resize(size)
    green = Image.radial_gradient("L").resize(size)
    blue = red.rotate(90).point(lambda value: 255 * (value // 32 % 2))
    return Image.merge("RGB", (red, green, blue))


# --- The model card. It must not name folders of this machine. ------------------------------------------------------


def about_model(built: BuiltModel) -> str:
    """The table with the model's sizes."""
    height, width = image_shape(built.towers.model)
    rows = {
        "parameters": format_count(sum(parameter.numel() for parameter in built.towers.model.parameters())),
        "images": f"{height} x {width} pixels",
        "texts": f"{built.tokenize(['a']).shape[1]} tokens",
        "features": format_count(built.embed_dim),
        "temperature": format_number(1 / float(built.towers.logit_scale.detach())),
    }
    return table(rows)


def about_run(target: str) -> dict[str, str]:
    """The title, the training and the results at the checkpoint. A model without a run has only a title."""
    path = Path(target)
    folder = RunFolder(path.parent.parent if path.suffix == ".pt" else path)
    if not folder.settings.is_file():
        return {"title": "CLIP model"}
    settings = stored_settings(folder)
    samples = samples_at(path if path.suffix == ".pt" else checkpoints_in(folder)[-1])
    environment = read_json(folder.environment, REMEDY) if folder.environment.exists() else {}
    facts = {
        "samples seen": format_count(samples),
        "pairs": format_count(environment.get("data", {}).get("count")),
        "neuclip, torch": ", ".join(str(environment.get("versions", {}).get(name)) for name in ("neuclip", "torch")),
        "objective.name": settings.objective_name,
    }
    lines = [line for line in read_lines(folder.evaluation) if line.get("samples") == samples]
    return {
        "title": settings.run.name or folder.path.resolve().name,
        "training": table(facts | changed_settings(settings)),
        "results": results(lines[-1]) if lines else "",
    }


def changed_settings(settings: Settings) -> dict[str, str]:
    """The settings that define the training and differ from their defaults, which the version of neuclip tells."""
    name = settings.objective_name
    changed = changed_fields(replace(Settings(), objective_name=name, objective=type(settings.objective)()), settings)
    keys = [key for key in changed if key == "data.train" or not may_change_at_resume(key, name)]
    return {key: public(attrgetter(key)(settings)) for key in keys if not key.startswith("run.")}


def results(figures: dict[str, Any]) -> str:
    parts = ((*key.rpartition("."), value) for key, value in figures.items())
    tables = evaluation_tables({f"{public(dataset)}{dot}{metric}": value for dataset, dot, metric, value in parts})
    return "\n".join(f"**{table.caption}**\n\n{markdown_table(table)}" for table in tables).rstrip()


def table(rows: dict[str, str]) -> str:
    return markdown_table(Table("", ["", ""], [[*row] for row in rows.items()], 2)).rstrip()


def public(value: Any) -> str:
    """The value of a setting as text, without secrets and without the folders of paths.

    >>> public("icons-30k,/home/me/photos.csv:2"), public((0.9, 1.0))
    ('icons-30k,photos.csv:2', '0.9, 1.0')
    """
    if isinstance(value, tuple):
        return ", ".join(map(public, value))
    parts = (part.removeprefix("local-dir:") for part in between_commas(without_queries(str(value))))
    return ",".join(Path(part).name if part.startswith("/") else part for part in parts)
