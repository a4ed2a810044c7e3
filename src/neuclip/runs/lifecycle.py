"""A run from its start, or from its last checkpoint, to the point where the training loop takes over.

Functions marked collective are called by every rank.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.data.fingerprint import fingerprint
from neuclip.data.source import Source
from neuclip.distributed.collectives import all_gather_object, is_main, rank, world_size
from neuclip.distributed.error_sync import main_rank_first, on_main_rank, raise_on_main, sync_errors
from neuclip.errors import RunFailed, UserError
from neuclip.models.towers import BuiltModel
from neuclip.plan import Plan, choose_device, choose_precision
from neuclip.records import RunFolder, keep_lines, write_json, write_text_safely
from neuclip.runs.build import build_batches, build_objective, build_towers, open_training_source
from neuclip.runs.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from neuclip.runs.environment import environment, set_threads
from neuclip.settings.keys import changed_fields
from neuclip.settings.reading import read_settings
from neuclip.settings.secrets import holds_secret, without_queries
from neuclip.settings.sections import Settings
from neuclip.settings.writing import settings_as_yaml
from neuclip.training.captions import TruncatedCaptions
from neuclip.training.optimizer import TowerOptimizer
from neuclip.training.run import Run

# What may differ when a run is resumed: where and how it runs, never what it computes. The data may have moved: that
# they are the same, in the same order, is checked when they are open.
MAY_CHANGE_AT_RESUME = (
    "data.train",
    "run.device",
    "run.threads",
    "data.workers",
    "data.cache_size",
    "data.remote_timeout",
    "data.max_bad_share",
    "train.micro_batch_size",
    "evaluation.",
    "checkpoint.",
    "log.",
)


def start_run(settings: Settings) -> Run:
    """Collective. A new run in a new folder."""
    folder = RunFolder(all_gather_object(on_main_rank(lambda: str(new_folder(settings))) or "")[0])
    run = build_run(settings, folder)
    described = environment(run.device, run.precision, run.fingerprint)

    def make_folder() -> None:
        folder.path.mkdir(parents=True)
        write_settings(folder, settings)
        write_json(folder.environment, described)

    on_main_rank(make_folder)
    save(run)  # a disk that cannot hold a checkpoint says so now, not after an hour
    print_start(run)
    return run


def resume_run(settings: Settings, folder: RunFolder) -> Run:
    """Collective; on any number of ranks. Records past the last checkpoint are cut off: they are written again."""
    with sync_errors():
        check_resumable(settings, folder)
    try:
        run = build_run(settings, folder)
    except UserError as error:
        raise UserError(f"{error}; if the data were moved, add --data.train and where they are now") from error
    with sync_errors():
        state = load_checkpoint(find_checkpoint(folder))
        check_state(run, state)
        run.load_state(state)

    def update_folder() -> None:
        for path in (folder.records, folder.evaluation):
            keep_lines(path, run.samples)
        write_settings(folder, settings)  # the new place of the data, among others

    on_main_rank(update_folder)
    print_start(run)
    return run


def write_settings(folder: RunFolder, settings: Settings) -> None:
    """They are complete, or nobody could resume: only the owner may read the password or signature of an address."""
    text = settings_as_yaml(settings)
    write_text_safely(folder.settings, text, private=holds_secret(text))


def save(run: Run) -> None:
    """Collective. A checkpoint of the run, written by the main rank."""
    state, keep = run.state(), run.settings.checkpoint.keep
    on_main_rank(lambda: save_checkpoint(run.folder.checkpoints, state, samples=run.samples, keep=keep))


def build_run(settings: Settings, folder: RunFolder) -> Run:
    """Collective. Fails here, in the first seconds, for whatever in the settings cannot work."""
    source = main_rank_first(lambda: open_training_source(settings))
    with sync_errors():
        run = _build_run(settings, folder, source)
    # Ranks on several machines must see the same data: an id means one sample on all of them.
    seen = all_gather_object(f"{run.fingerprint['count']:,} samples ({run.fingerprint['sha256'][:8]})")
    if len(set(seen)) > 1:
        raise_on_main(UserError(f"ranks see different data: {', '.join(seen)}; give all of them the same files"))
    return run


def _build_run(settings: Settings, folder: RunFolder, source: Source) -> Run:
    plan = Plan.of(settings, world_size())
    device = choose_device(settings.run.device)
    precision = choose_precision(settings.run.precision, device)
    set_threads(settings.run.threads, device)
    torch.manual_seed(settings.run.seed)
    built = build_towers(settings, device)
    refuse_single_images(settings, plan, built)
    batches = build_batches(settings, source, built, plan)
    objective = build_objective(settings, built, len(source), batches.windows.order.size).to(device)
    if rank():  # weights start alike on all ranks, dropout does not
        torch.manual_seed(settings.run.seed + rank())
    return Run(
        settings=settings,
        folder=folder,
        plan=plan,
        device=device,
        precision=precision,
        source=source,
        fingerprint=fingerprint(source),
        batches=batches,
        built=built,
        objective=objective,
        optimizer=TowerOptimizer(built.towers, settings, plan, precision),
        truncated_captions=TruncatedCaptions(built.tokenize),
    )


def refuse_single_images(settings: Settings, plan: Plan, built: BuiltModel) -> None:
    """BatchNorm divides by the deviation over the images of a forward pass; one alone has none."""
    if plan.smallest_chunk == 1 and any(isinstance(module, _BatchNorm) for module in built.towers.modules()):
        local = plan.local_batch
        field, least = ("batch_size", 2 * plan.ranks) if local == 1 else ("micro_batch_size", 2 + local % 2)
        raise UserError(
            f"{settings.model.name} has BatchNorm, which cannot train on one image at a time; "
            f"give --train.{field} {least} or more"
        )


def new_folder(settings: Settings) -> Path:
    """A run never overwrites another: an existing name is an error, a default name gets a number."""
    parent = Path(settings.run.folder)
    if settings.run.name:
        folder = parent / settings.run.name
        if folder.exists():
            raise UserError(
                f"{folder} exists; give another --run.name, or continue it: neuclip train --resume {folder}"
            )
        return folder
    model = settings.model.name.removeprefix("local-dir:").rstrip("/").rpartition("/")[2].removesuffix(".json")
    stem = f"{datetime.now(tz=UTC).date().isoformat()}-{settings.objective_name}-{model}"
    names = [stem] + [f"{stem}-{number}" for number in range(2, 10_000)]
    return next(parent / name for name in names if not (parent / name).exists())


def check_resumable(settings: Settings, folder: RunFolder) -> None:
    stored = read_settings(folder.settings, [])
    changed = [key for key in changed_fields(stored, settings) if not key.startswith(MAY_CHANGE_AT_RESUME)]
    if changed:
        raise UserError(
            f"{folder.path} cannot be continued with another {', '.join(changed)}; "
            "leave the flag out, or start a new run with it"
        )


def check_state(run: Run, state: dict[str, Any]) -> None:
    """Refuses the checkpoint of another objective, model, data set or order of samples."""
    path, settings, data = run.folder.path, run.settings, without_queries(run.settings.data.train)
    for part, name in (("objective", settings.objective_name), ("model", settings.model.name)):
        stored = state[f"{part}_name"]
        if stored != name:
            raise UserError(
                f"{path} was trained with {part} {stored}, not {name}; resume with --{part}.name {stored}, "
                "or start a new run"
            )
    if state["data"] != run.fingerprint:
        raise RunFailed(
            f"the data {data} are not those that {path} was started with ({state['data']['count']} samples then, "
            f"{run.fingerprint['count']} now, or other captions); bring back the old data, or start a new run"
        )
    if state["order"] != run.order:
        raise RunFailed(
            f"{path} was trained in another order of samples ({state['order']}) than {data} gives now ({run.order}): "
            "some would come twice and some never; continue on the data where they were, local or remote, or start a "
            "new run"
        )


def print_start(run: Run) -> None:
    if not is_main():
        return
    settings, plan = run.settings, run.plan
    where = f"{run.device}" if plan.ranks == 1 else f"{plan.ranks} processes on {run.device}"
    parameters = sum(p.numel() for p in run.built.towers.parameters())
    print(
        f"{run.folder.path}\n"
        f"  {settings.objective_name} on {len(run.source):,} pairs of {without_queries(settings.data.train)}\n"
        f"  model {settings.model.name} ({parameters / 1e6:.1f} M parameters, {where})\n"
        f"  {plan.steps - run.step:,} steps of {plan.batch_size}, {f'from {run.samples:,} ' if run.step else ''}to "
        f"{plan.samples:,} samples ({plan.samples / run.epoch_samples:.1f} epochs)",
        file=sys.stderr,
    )
