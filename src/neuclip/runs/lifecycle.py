"""A run from its start, or from its last checkpoint, to the point where the training loop takes over.

Functions marked collective are called by every rank.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.data.faults import refuse_bad_source
from neuclip.data.mixture import order_of
from neuclip.data.source import Source, fingerprint
from neuclip.distributed.collectives import all_gather_object, is_main, rank, world_size
from neuclip.distributed.error_sync import main_rank_first, on_main_rank, raise_on_main, sync_errors
from neuclip.errors import RunFailed, UserError
from neuclip.formatting import byte_size, plural
from neuclip.models.towers import BuiltModel
from neuclip.plan import Plan, checkpoint_bytes, choose_device, choose_precision, limit_epochs, storing_advice
from neuclip.records import HELD_OUT, RunFolder, keep_lines
from neuclip.runs.build import (
    absolute_paths,
    build_batches,
    build_objective,
    build_towers,
    open_clip_config,
    open_training_source,
)
from neuclip.runs.checkpoint import (
    checkpoints_in,
    load_checkpoint,
    save_checkpoint,
    set_aside_damaged,
    tensor_bytes,
)
from neuclip.runs.environment import environment, set_threads
from neuclip.runs.folder import check_new, lock, make_folder, remove_partial, restarted_run, write_settings
from neuclip.runs.pretrained import OWN_CONFIG
from neuclip.secrets import without_queries
from neuclip.settings.reading import changed_fields, may_change_at_resume, read_settings
from neuclip.settings.sections import Settings
from neuclip.training.batches import TruncatedCaptions
from neuclip.training.optimizer import TowerOptimizer
from neuclip.training.run import Run

T = TypeVar("T")


def from_main_rank(action: Callable[[], T]) -> T:
    """Collective. What `action` returns on the main rank, on all ranks."""
    return cast("T", all_gather_object(on_main_rank(action))[0])


@contextmanager
def open_run(settings: Settings, resume: Path | None) -> Iterator[Run]:
    """Collective. A new run, or one that continues, also after torchrun's restart. Inside, no other process can
    train it."""
    resume = resume or from_main_rank(lambda: restarted_run(settings))
    with ExitStack() as stack:
        if resume:
            folder = RunFolder(resume)
            on_main_rank(lambda: stack.enter_context(lock(folder)))
            run = resume_run(settings, folder)
        else:
            run = start_run(settings)
            on_main_rank(lambda: stack.enter_context(lock(run.folder)))
        yield run


def start_run(settings: Settings) -> Run:
    """Collective. A new run in a new folder."""
    path = from_main_rank(lambda: str(check_new(settings)))
    source = open_data(settings)
    settings = limit_epochs(settings, order_of(source, settings.run.seed).size)
    run = build_run(settings, RunFolder(path), source)
    described = environment(run.device, run.precision, run.fingerprint | {"captions": str(run.caption_counts)})

    def make() -> str:
        check_disk(run)
        return str(make_folder(settings, described).path)

    run.folder = RunFolder(from_main_rank(make))
    save(run)
    print_start(run)
    return run


def resume_run(settings: Settings, folder: RunFolder) -> Run:
    """Collective; on any number of ranks. Records past the last checkpoint are cut off: they are written again."""
    with sync_errors():
        check_resumable(settings, folder)
    try:
        source = open_data(settings)
    except UserError as error:
        raise UserError(f"{error}; if the data were moved, add --data.train and where they are now") from error
    on_main_rank(lambda: set_aside_damaged(folder))
    with sync_errors():
        # A run that was killed before its first checkpoint starts from the beginning.
        state = load_checkpoint(checkpoints[-1]) if (checkpoints := checkpoints_in(folder.checkpoints)) else None
    run = build_run(settings, folder, source, state)
    with sync_errors():
        if state:
            check_state(run, state)
            run.load_state(state)
    on_main_rank(lambda: update_folder(run))
    if not state:
        save(run)
    print_start(run)
    return run


def update_folder(run: Run) -> None:
    """Of a run that continues: nothing stays that it will write again, or that a kill or a bad disk left behind."""
    folder = run.folder
    remove_partial(folder)
    check_disk(run)
    kept: dict[Path, Callable[[dict[str, Any]], bool]] = {
        folder.records: lambda record: record["samples"] <= run.samples,
        folder.evaluation: lambda record: record["samples"] <= run.samples,
        # What could not be indexed is listed anew: files may be repaired, or lie elsewhere.
        folder.skipped: lambda fault: (
            len(fault["reason"] + fault["where"]) > 0 and (fault["id"] >= 0 or HELD_OUT in fault)
        ),
    }
    for path, keep in kept.items():
        if broken := keep_lines(path, keep):
            print(f"{path}: removed {plural(broken, 'line')} that could not be read", file=sys.stderr)
    write_settings(folder, run.settings)  # the new place of the data, among others


def check_disk(run: Run) -> None:
    """A disk that cannot hold what the run will write is found now, not after hours."""
    folder, checkpoint = run.folder, run.settings.checkpoint
    written = sum(path.stat().st_size for path in [*checkpoints_in(folder.checkpoints), *folder.model.glob("*")])
    needed = needed_bytes(run) - written
    place = next(place for place in (folder.path.absolute(), *folder.path.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        fewer = ", or keep fewer (--checkpoint.keep, --checkpoint.milestones)" if checkpoint.most > 2 else ""
        raise RunFailed(
            f"the disk is too full: {plural(checkpoint.most, 'checkpoint')} and the model need {byte_size(needed)}, "
            f"and {place} has {byte_size(free)}; free some space, use a larger disk{fewer}"
        )


def needed_bytes(run: Run) -> int:
    """On disk, at most: of checkpoints, and of the exported model, which comes last."""
    model = run.built.towers.model
    parameters, model_bytes = trained_parameters(run.built), tensor_bytes(model.state_dict())
    checkpoint = checkpoint_bytes(parameters, model_bytes, sum(run.objective.state_bytes()))
    return run.settings.checkpoint.most * checkpoint + model_bytes


def save(run: Run) -> None:
    """Collective. A checkpoint of the run, written by the main rank."""
    state, keep = run.state() | {OWN_CONFIG: open_clip_config(run.built)}, run.settings.checkpoint.keep
    lasting = [step * run.plan.batch_size for step in run.plan.milestones]
    on_main_rank(
        lambda: save_checkpoint(run.folder.checkpoints, state, samples=run.samples, keep=keep, milestones=lasting)
    )


def open_data(settings: Settings) -> Source:
    """Collective."""
    return main_rank_first(lambda: open_training_source(settings))


def build_run(settings: Settings, folder: RunFolder, source: Source, state: dict[str, Any] | None = None) -> Run:
    """Collective. Fails here, in the first seconds, for whatever in the settings cannot work. `state`: of the
    checkpoint from which the run will continue."""
    with sync_errors():
        run = _build_run(settings, folder, source, state)
    # Ranks on several machines must see the same data: an id means one sample on all of them.
    seen = all_gather_object(f"{run.fingerprint['count']:,} samples ({run.fingerprint['sha256'][:8]})")
    if len(set(seen)) > 1:
        raise_on_main(UserError(f"ranks see different data: {', '.join(seen)}; give all of them the same files"))
    return run


def _build_run(settings: Settings, folder: RunFolder, source: Source, state: dict[str, Any] | None) -> Run:
    plan = Plan.of(settings, world_size())
    device = choose_device(settings.run.device)
    precision = choose_precision(settings.run.precision, device)
    set_threads(settings.run.threads, device)
    torch.manual_seed(settings.run.seed)
    built = build_towers(settings, device, state)
    refuse_single_images(settings, plan, built)
    known, counts = fingerprint(source)
    refuse_bad_source(source, settings.data.max_bad_share, counts)
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
        fingerprint=known,
        caption_counts=counts,
        batches=batches,
        built=built,
        objective=objective,
        optimizer=TowerOptimizer(built.towers, settings, plan, precision),
        truncated_captions=TruncatedCaptions(built.tokenize),
    )


def refuse_single_images(settings: Settings, plan: Plan, built: BuiltModel) -> None:
    """BatchNorm divides by the deviation over the images of a forward pass; one alone has none."""
    norms = [module for module in built.towers.train().modules() if isinstance(module, _BatchNorm)]
    if plan.smallest_chunk == 1 and any(norm.training for norm in norms):
        local = plan.local_batch
        field, least = ("batch_size", 2 * plan.ranks) if local == 1 else ("micro_batch_size", 2 + local % 2)
        raise UserError(
            f"{settings.model.name} has BatchNorm, which cannot train on one image at a time; "
            f"give --train.{field} {least} or more"
        )


def check_resumable(settings: Settings, folder: RunFolder) -> None:
    stored = absolute_paths(read_settings(folder.settings, []))
    objective = settings.objective_name
    changed = [key for key in changed_fields(stored, settings) if not may_change_at_resume(key, objective)]
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


def trained_parameters(built: BuiltModel) -> int:
    return sum(p.numel() for p in built.towers.parameters() if p.requires_grad)


def print_start(run: Run) -> None:
    if not is_main():
        return
    settings, plan = run.settings, run.plan
    where = f"{run.device}" if plan.ranks == 1 else f"{plan.ranks} processes on {run.device}"
    parameters, trained = sum(p.numel() for p in run.built.towers.parameters()), trained_parameters(run.built)
    share = "" if trained == parameters else f", {trained / 1e6:.2g} M of them trained"
    start = f", from {settings.model.pretrained}" if settings.model.pretrained else ""
    print(
        f"{run.folder.path}\n"
        f"  {settings.objective_name} on {without_queries(settings.data.train)}: {run.caption_counts}\n"
        f"  model {settings.model.name} ({parameters / 1e6:.1f} M parameters{share}, {where}){start}\n"
        f"  {plan.steps - run.step:,} steps of {plan.batch_size}, {f'from {run.samples:,} ' if run.step else ''}to "
        f"{plan.samples:,} samples ({plan.samples / run.epoch_samples:.1f} epochs)",
        file=sys.stderr,
    )
    if advice := storing_advice(settings, run.epoch_samples):
        print("{}: {}; {}".format(*advice), file=sys.stderr)
