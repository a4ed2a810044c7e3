"""Build a run from its settings: data, model, objective, batches. This file does not create or read the run's folder:
`neuclip doctor` builds a run without one. `train`, `eval` and `error` use these functions, too."""

from __future__ import annotations

import re
from dataclasses import replace
from glob import iglob
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip import objectives
from neuclip.data.by_name import is_name
from neuclip.data.decoding import FastDecode, decode, decode_rgb
from neuclip.data.faults import refuse_bad_source
from neuclip.data.held_out import named
from neuclip.data.loader import Batches, Decode, Transform
from neuclip.data.locations import expand_braces, is_remote, is_there, parts_of
from neuclip.data.mixture import order_of
from neuclip.data.open import open_training_data
from neuclip.data.source import Source, fingerprint
from neuclip.distributed.collectives import all_gather_object, rank, world_size
from neuclip.distributed.ranks import main_rank_first, raise_on_main, sync_errors
from neuclip.errors import UserError, require
from neuclip.machine import choose_device, choose_precision, set_threads
from neuclip.models.build import BuiltModel
from neuclip.models.config import ModelSource
from neuclip.models.transforms import fast_crop
from neuclip.objectives.objective import Objective
from neuclip.plan import Plan, limit_epochs
from neuclip.runs.load import build_towers, open_target, resolve_held_out, resolve_model
from neuclip.secrets import without_queries
from neuclip.settings.sections import Settings
from neuclip.training.optimizer import TowerOptimizer
from neuclip.training.run import Run

PATTERN = re.compile(r"[,{}*?\[]")
PREFIXES = ("local-dir:", "image=")  # of the path of a model or of weights


def build_run(settings: Settings, source: Source, saved: ModelSource | None = None) -> Run:
    """Build a run at step 0, without a folder. Collective. If the settings cannot work, it fails here, within seconds.
    `saved`: the model of the checkpoint from which the run will continue.

    >>> run = build_run(resolve(settings), open_training_source(settings))                          # doctest: +SKIP
    """
    with sync_errors():
        run = _build_run(limit_epochs(settings, order_of(source, settings.run.seed).size), source, saved)
    # Ranks on several machines must see the same data: an id means the same sample on all of them.
    seen = all_gather_object(f"{run.fingerprint['count']:,} samples ({run.fingerprint['sha256'][:8]})")
    if len(set(seen)) > 1:
        raise_on_main(UserError(f"ranks see different data: {', '.join(seen)}; give all ranks the same files"))
    return run


def _build_run(settings: Settings, source: Source, saved: ModelSource | None) -> Run:
    for name in ("tensorboard", "wandb"):
        if getattr(settings.log, name):
            require(f"log.{name}", name, extra=name)
    plan = Plan.of(settings, world_size())
    device = choose_device(settings.run.device)
    precision = choose_precision(settings.run.precision, device)
    set_threads(settings.run.threads, device)
    torch.manual_seed(settings.run.seed)
    built = build_towers(settings, device, saved)
    refuse_single_images(settings, plan, built)
    data_fingerprint, counts = fingerprint(source)
    refuse_bad_source(source, settings.data.max_bad_share, counts)
    batches = build_batches(settings, source, built, plan)
    objective = build_objective(settings, built, len(source), batches.windows.order.size).to(device)
    if rank():  # initial weights are equal on all ranks, dropout masks are not
        torch.manual_seed(settings.run.seed + rank())
    return Run(
        settings=settings,
        plan=plan,
        device=device,
        precision=precision,
        source=source,
        fingerprint=data_fingerprint,
        caption_counts=counts,
        batches=batches,
        built=built,
        objective=objective,
        optimizer=TowerOptimizer(built.towers, settings, plan, precision),
        reference=build_reference(settings, device),
    )


def build_reference(settings: Settings, device: torch.device) -> BuiltModel | None:
    """The frozen reference model, if the objective needs one."""
    if not settings.objective.needs_reference:
        return None
    if not settings.objective.reference:
        raise UserError(
            f"objective.reference is not set, but {settings.objective.title} needs a trained model; "
            "give --objective.reference runs/NAME, or MODEL:TAG with weights of open_clip"
        )
    built, _ = open_target(settings.objective.reference)
    built.towers.to(device).freeze()
    return built


def refuse_single_images(settings: Settings, plan: Plan, built: BuiltModel) -> None:
    """Refuse forward passes of one image if the model has BatchNorm, which divides by the deviation over images."""
    norms = [module for module in built.towers.train().modules() if isinstance(module, _BatchNorm)]
    if plan.smallest_chunk == 1 and any(norm.training for norm in norms):
        local = plan.local_batch
        field, least = ("batch_size", 2 * plan.ranks) if local == 1 else ("micro_batch_size", 2 + local % 2)
        raise UserError(
            f"{settings.model.name} has BatchNorm, which cannot train on one image at a time; "
            f"give --train.{field} {least} or more"
        )


# --- Settings -------------------------------------------------------------------------------------------------------


def resolve(settings: Settings) -> Settings:
    """The settings as a run stores them: the model and the held-out sets replace `auto` and empty names, and paths are
    absolute, so that they work from any folder. Names and URLs stay as they are."""
    settings = resolve_model(resolve_held_out(settings))
    model, evaluation, objective = settings.model, settings.evaluation, settings.objective
    if objective.needs_reference:
        objective = replace(objective, reference=absolute_path(objective.reference))  # type: ignore[call-arg]
    is_file = model.name.startswith("local-dir:") or model.name.endswith(".json")  # a name is no folder
    return replace(
        settings,
        data=replace(settings.data, train=absolute_address(settings.data.train)),
        model=replace(
            model,
            name=absolute_path(model.name) if is_file else model.name,
            pretrained=absolute_path(model.pretrained),
        ),
        objective=objective,
        evaluation=replace(
            evaluation,
            retrieval=tuple(map(absolute_address, evaluation.retrieval)),
            zero_shot=tuple(map(absolute_address, evaluation.zero_shot)),
        ),
    )


def absolute_path(path: str) -> str:
    """The absolute path of a model or of weights. If nothing is there, the path stays as the user wrote it, for the
    error message.

    >>> absolute_path("image=/data/lite0.pth"), absolute_path("openai")
    ('image=/data/lite0.pth', 'openai')
    """
    prefix = next((prefix for prefix in PREFIXES if path.startswith(prefix)), "")
    bare = path.removeprefix(prefix)
    return f"{prefix}{Path(bare).absolute()}" if bare and is_there(Path(bare)) else path


def absolute_address(address: str) -> str:
    """The absolute paths of data: of each part between commas, with its weight. A held-out set may have a name before
    its path.

    >>> absolute_address("icons-30k,/data/a.csv:2,s3://bucket/{00..19}.tar:3")
    'icons-30k,/data/a.csv:2,s3://bucket/{00..19}.tar:3'
    """
    if not address:
        return ""
    name, path = named(address)
    parts = [f"{_absolute_part(part)}{f':{weight}' if weight > 1 else ''}" for part, weight in parts_of(path)]
    return f"{name}={','.join(parts)}" if path != address else ",".join(parts)


def _absolute_part(part: str) -> str:
    if is_name(part) or is_remote(part):
        return part
    if is_there(Path(part)):
        return str(Path(part).absolute())
    folder, first = Path.cwd(), expand_braces(part)[0]
    match = next(iglob(first, recursive=True), None)  # noqa: PTH207
    # If the working folder's name looks like a pattern, it must not become part of this pattern.
    return part if match is None or Path(first).is_absolute() or PATTERN.search(str(folder)) else str(folder / part)


# --- Data -----------------------------------------------------------------------------------------------------------


def open_training_source(settings: Settings) -> Source:
    """Open the training data; refuse data on which no run can start. Collective."""
    data, batch_size = settings.data, settings.train.batch_size
    if not data.train:
        raise_on_main(UserError("data.train is not set; give --data.train icons-30k, shards, or a CSV file"))
    source = main_rank_first(lambda: open_training_data(settings))
    with sync_errors():
        refuse_bad_source(source, data.max_bad_share)
        if len(source) == 1:
            raise UserError(
                f"{without_queries(data.train)} has one sample, but a contrastive loss compares samples; give two or "
                "more"
            )
        if len(source) < batch_size:
            remaining = f" without the {data.hold_out} that are held out" if data.hold_out else ""
            fewer = ", or a smaller --data.hold_out" if data.hold_out else ""
            raise UserError(
                f"train.batch_size {batch_size} is larger than the data set ({len(source)} samples in "
                f"{without_queries(data.train)}{remaining}); give --train.batch_size {len(source)} or less{fewer}"
            )
    return source


def image_preparation(settings: Settings, built: BuiltModel) -> tuple[Decode, Transform]:
    """How training turns the bytes of an image into the input of the image tower: the decoder and the transform."""
    if not settings.data.augments:
        return decode_rgb, built.transform  # as in evaluation
    if settings.data.pixels == "fast":
        return FastDecode(built.image_size, settings.data.crop_scale[0]), fast_crop(built.train_transform)
    return decode, built.train_transform


def build_batches(settings: Settings, source: Source, built: BuiltModel, plan: Plan) -> Batches:
    decoder, transform = image_preparation(settings, built)
    return Batches(
        source,
        order_of(source, settings.run.seed),
        batch_size=plan.batch_size,
        decode=decoder,
        transform=transform,
        tokenize=built.tokenize,
        seed=settings.run.seed,
        workers=settings.data.workers,
        rank=rank(),
        ranks=plan.ranks,
    )


def build_objective(settings: Settings, built: BuiltModel, dataset_size: int, epoch_samples: int = 0) -> Objective:
    """The objective of a run. `epoch_samples`: samples per epoch of weighted data; 0: the size of the data set."""
    return objectives.build_objective(
        settings.objective_name,
        settings.objective,
        embed_dim=built.embed_dim,
        dataset_size=dataset_size,
        epoch_samples=epoch_samples,
        total_samples=Plan.of(settings).samples,
    )
