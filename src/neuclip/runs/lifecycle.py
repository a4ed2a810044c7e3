"""Start or resume a run, up to the first step of the training loop, and save checkpoints.

Functions marked collective are called by every rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from neuclip.distributed.collectives import is_main
from neuclip.distributed.ranks import StopRequest, from_main_rank, main_rank_first, on_main_rank, sync_errors
from neuclip.errors import RunFailed, UserError
from neuclip.files import existing_parent, reading
from neuclip.formatting import byte_size, plural
from neuclip.machine import environment
from neuclip.models.export import write_text_files
from neuclip.progress import say
from neuclip.records import REMEDY, RunFolder, keep_up_to, read_lines, write_lines
from neuclip.runs import folder as folders
from neuclip.runs.build import build_run, open_training_source, resolve
from neuclip.runs.load import checkpoint_source
from neuclip.secrets import without_queries
from neuclip.settings.reading import changed_fields, may_change_at_resume
from neuclip.settings.sections import Settings
from neuclip.training.run import Run

MOMENTS = 8  # bytes of AdamW's two moments per trained parameter; they do not exist before the first step


@contextmanager
def open_run(settings: Settings, resume: Path | None, stop: StopRequest) -> Iterator[Run]:
    """Start a new run, or resume the run `resume`. Inside, no other process can train it. Collective."""
    with ExitStack() as stack:
        if resume:
            on_main_rank(lambda: stack.enter_context(folders.lock(RunFolder(resume))))
            run = resume_run(settings, RunFolder(resume))
        else:
            run = start_run(settings)
            on_main_rank(lambda: stack.enter_context(folders.lock(run.folder)))
        save(run, stop)
        if is_main():
            say("\n  ".join([str(run.folder.path), *describe(run)]))
        yield run


def start_run(settings: Settings) -> Run:
    """Start a new run. Its folder is created last, when everything else has worked. Collective."""
    path = from_main_rank(lambda: folders.choose_folder(settings))
    run = build_run(settings, open_training_source(settings))
    run.folder = RunFolder(path)
    data = run.fingerprint | {"captions": str(run.caption_counts)}

    def make() -> Path:
        check_disk(run)
        about = environment(run.device, run.precision, run.plan.ranks, data)
        return folders.make_folder(run.settings, about).path

    run.folder = RunFolder(from_main_rank(make))
    # A checkpoint needs these files, and the ones that the model was built from may be deleted later.
    on_main_rank(lambda: write_text_files(run.built, run.folder.model))
    return run


def resume_run(settings: Settings, folder: RunFolder) -> Run:
    """Resume a run from its newest checkpoint, on any number of ranks. Later records are deleted, because the run will
    write them again. Collective."""
    on_main_rank(lambda: check_resumable(settings, folder))
    # Only the main rank checks the file for damage. Without a checkpoint the run starts from the beginning.
    newest = main_rank_first(lambda: folders.load_newest(folder, check=is_main(), set_aside=is_main()) or ())
    try:
        source = open_training_source(settings)
    except UserError as error:
        raise UserError(f"{error}; if the data were moved, add --data.train with their new path") from error
    with sync_errors():
        saved = checkpoint_source(newest[1], newest[0]) if newest else None
    run = build_run(settings, source, saved)
    run.folder = folder
    if newest:
        path, state = newest
        with sync_errors(), reading(path, "move it away to continue from the one before, or start a new run"):
            check_state(run, state)
            run.load_state(state)
    on_main_rank(lambda: tidy_folder(run))
    return run


def check_resumable(settings: Settings, folder: RunFolder) -> None:
    """Refuse settings that differ from the run's own and must not change when it is resumed."""
    stored, objective = resolve(folders.stored_settings(folder)), settings.objective_name
    changed = [key for key in changed_fields(stored, settings) if not may_change_at_resume(key, objective)]
    if changed:
        raise UserError(
            f"{folder.path} cannot be resumed with another {', '.join(changed)}; "
            "leave the flag out, or start a new run with it"
        )


def check_state(run: Run, state: dict[str, Any]) -> None:
    """Refuse a checkpoint with other data or another order of samples."""
    path, data = run.folder.path, without_queries(run.settings.data.train)
    if state["data"] != run.fingerprint:
        raise RunFailed(
            f"the data {data} are not those that {path} was started with ({state['data']['count']} samples then, "
            f"{run.fingerprint['count']} now, or other captions); bring back the old data, or start a new run"
        )
    if state["order"] != run.order:
        raise RunFailed(
            f"{path} was trained in another order of samples ({state['order']}) than {data} gives now ({run.order}): "
            "some would come twice and some never; give the data at their old path, local or remote, or start a new run"
        )


def tidy_folder(run: Run) -> None:
    """Prepare the folder of a resumed run: delete records past the checkpoint and leftovers of a kill."""
    folder = run.folder
    folders.remove_unfinished(folder)
    check_disk(run)
    for path in (folder.records, folder.evaluation):
        keep_up_to(path, run.samples)
    with reading(folder.skipped, REMEDY):
        # Remove samples that could not be indexed (id below 0): the run lists them again, if files are still damaged.
        write_lines(folder.skipped, [fault for fault in read_lines(folder.skipped) if fault["id"] >= 0])
    folders.write_settings(folder, run.settings)  # the data may have a new path, for example


def check_disk(run: Run) -> None:
    """Fail now, and not after hours, if the disk has too little space for the files that the run will write."""
    folder, checkpoint = run.folder, run.settings.checkpoint
    written = sum(path.stat().st_size for path in [*folders.checkpoints_in(folder), *folder.model.glob("*")])
    needed, parent = needed_bytes(run) - written, existing_parent(folder.path)
    free = shutil.disk_usage(parent).free
    if free < needed:
        fewer = ", or keep fewer (--checkpoint.keep, --checkpoint.milestones)" if checkpoint.most > 2 else ""
        raise RunFailed(
            f"the disk is too full: {plural(checkpoint.most, 'checkpoint')} and the model need {byte_size(needed)}, "
            f"but {parent} has {byte_size(free)} free; make room, use a larger disk{fewer}"
        )


def needed_bytes(run: Run) -> int:
    """The largest size on disk of the checkpoints and the exported model together."""
    model = folders.tensor_bytes(run.built.towers.model.state_dict())
    checkpoint = model + MOMENTS * trained_parameters(run) + sum(run.objective.state_bytes())
    return run.settings.checkpoint.most * checkpoint + model


def trained_parameters(run: Run) -> int:
    return sum(p.numel() for p in run.built.towers.parameters() if p.requires_grad)


def describe(run: Run) -> list[str]:
    """One line each about the data, the model and the plan of a run."""
    settings, plan = run.settings, run.plan
    where = f"{run.device}" if plan.ranks == 1 else f"{plan.ranks} ranks on {run.device}"
    parameters, trained = sum(p.numel() for p in run.built.towers.parameters()), trained_parameters(run)
    share = "" if trained == parameters else f", {trained / 1e6:.2g} M of them trained"
    start = f", from {settings.model.pretrained}" if settings.model.pretrained else ""
    return [
        f"{settings.objective_name} on {without_queries(settings.data.train)}: {run.caption_counts}",
        f"model {settings.model.name} ({parameters / 1e6:.1f} M parameters{share}, {where}){start}",
        f"{plan.steps - run.step:,} steps of {plan.batch_size}, {f'from {run.samples:,} ' if run.step else ''}to "
        f"{plan.samples:,} samples ({plan.samples / run.epoch_samples:.1f} epochs)",
    ]


def save(run: Run, stop: StopRequest) -> None:
    """Save a checkpoint of the current step, unless there is one. Collective; the main rank writes it."""
    if run.step != run.saved_step:
        state, keep = run.state() | {folders.OWN_CONFIG: run.built.saved_config}, run.settings.checkpoint.keep
        lasting = [step * run.plan.batch_size for step in run.plan.milestones]
        on_main_rank(
            lambda: folders.save_checkpoint(run.folder, state, samples=run.samples, keep=keep, milestones=lasting),
            may_stop=False,
        )
        run.saved_step = run.step
    stop.message = (
        f"stopped and saved at {run.samples:,} of {run.settings.train.samples:,} samples; "
        f"continue with: neuclip train --resume {run.folder.path}"
    )
