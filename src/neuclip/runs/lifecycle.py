"""A run from its start, or from its last checkpoint, to the point where the training loop takes over; and its saving.

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
from neuclip.files import existing_parent, read_regular, reading
from neuclip.formatting import byte_size, plural
from neuclip.machine import environment
from neuclip.progress import say
from neuclip.records import REMEDY, RunFolder, keep_up_to, read_lines, write_lines
from neuclip.runs import folder as folders
from neuclip.runs.build import build_run, open_clip_config, open_training_source, resolve
from neuclip.secrets import without_queries
from neuclip.settings.reading import changed_fields, may_change_at_resume, read_settings
from neuclip.settings.sections import Settings
from neuclip.training.run import Run

MOMENTS = 8  # bytes of AdamW's two per trained parameter, which a run has none of before its first step


@contextmanager
def open_run(settings: Settings, resume: Path | None, stop: StopRequest) -> Iterator[Run]:
    """Collective. A new run, or the run `resume`, which continues. Inside, no other process can train it."""
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
    """Collective. A new run in a new folder, which is made when everything else works."""
    path = from_main_rank(lambda: folders.choose_folder(settings))
    run = build_run(settings, open_training_source(settings))
    run.folder = RunFolder(path)
    data = run.fingerprint | {"captions": str(run.caption_counts)}

    def make() -> Path:
        check_disk(run)
        about = environment(run.device, run.precision, run.plan.ranks, data)
        return folders.make_folder(run.settings, about).path

    run.folder = RunFolder(from_main_rank(make))
    return run


def resume_run(settings: Settings, folder: RunFolder) -> Run:
    """Collective; on any number of ranks. Records past the last checkpoint are cut off: they are written again."""
    on_main_rank(lambda: check_resumable(settings, folder))
    # The main rank checks the file; a run that was killed before its first checkpoint starts from the beginning.
    state = main_rank_first(lambda: folders.load_newest(folder, check=is_main(), set_aside=is_main()) or {})
    try:
        source = open_training_source(settings)
    except UserError as error:
        raise UserError(f"{error}; if the data were moved, add --data.train and where they are now") from error
    run = build_run(settings, source, state)
    run.folder = folder
    if state:
        newest = folders.checkpoints_in(folder)[-1]  # those that are damaged were set aside
        with sync_errors(), reading(newest, "move it away to continue from the one before, or start a new run"):
            check_state(run, state)
            run.load_state(state)
    on_main_rank(lambda: tidy_folder(run))
    return run


def check_resumable(settings: Settings, folder: RunFolder) -> None:
    with reading(folder.settings, REMEDY):
        if not read_regular(folder.settings).strip():
            raise ValueError("it is empty")
    stored, objective = resolve(read_settings(folder.settings, [])), settings.objective_name
    changed = [key for key in changed_fields(stored, settings) if not may_change_at_resume(key, objective)]
    if changed:
        raise UserError(
            f"{folder.path} cannot be continued with another {', '.join(changed)}; "
            "leave the flag out, or start a new run with it"
        )


def check_state(run: Run, state: dict[str, Any]) -> None:
    """Refuses the checkpoint of another data set or order of samples."""
    path, data = run.folder.path, without_queries(run.settings.data.train)
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


def tidy_folder(run: Run) -> None:
    """Of a run that continues: nothing stays that it will write again, or that a kill left behind."""
    folder = run.folder
    folders.remove_unfinished(folder)
    check_disk(run)
    for path in (folder.records, folder.evaluation):
        keep_up_to(path, run.samples)
    with reading(folder.skipped, REMEDY):
        # What could not be indexed is listed anew: files may be repaired, or lie elsewhere.
        write_lines(folder.skipped, [fault for fault in read_lines(folder.skipped) if fault["id"] >= 0])
    folders.write_settings(folder, run.settings)  # the new place of the data, among others


def check_disk(run: Run) -> None:
    """A disk that cannot hold what the run will write is found now, not after hours."""
    folder, checkpoint = run.folder, run.settings.checkpoint
    written = sum(path.stat().st_size for path in [*folders.checkpoints_in(folder), *folder.model.glob("*")])
    needed, place = needed_bytes(run) - written, existing_parent(folder.path)
    free = shutil.disk_usage(place).free
    if free < needed:
        fewer = ", or keep fewer (--checkpoint.keep, --checkpoint.milestones)" if checkpoint.most > 2 else ""
        raise RunFailed(
            f"the disk is too full: {plural(checkpoint.most, 'checkpoint')} and the model need {byte_size(needed)}, "
            f"and {place} has {byte_size(free)}; free some space, use a larger disk{fewer}"
        )


def needed_bytes(run: Run) -> int:
    """On disk, at most: of checkpoints, and of the exported model, which comes last."""
    model = folders.tensor_bytes(run.built.towers.model.state_dict())
    checkpoint = model + MOMENTS * trained_parameters(run) + sum(run.objective.state_bytes())
    return run.settings.checkpoint.most * checkpoint + model


def trained_parameters(run: Run) -> int:
    return sum(p.numel() for p in run.built.towers.parameters() if p.requires_grad)


def describe(run: Run) -> list[str]:
    """Data, model and plan of a run, a line each."""
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
    """Collective. A checkpoint of the step that the run has reached, unless there is one, written by the main rank."""
    if run.step != run.saved_step:
        state, keep = run.state() | {folders.OWN_CONFIG: open_clip_config(run.built)}, run.settings.checkpoint.keep
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
