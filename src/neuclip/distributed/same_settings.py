"""The ranks of a run must have been given the same settings."""

from __future__ import annotations

from operator import attrgetter

from neuclip.distributed.collectives import all_gather_object
from neuclip.distributed.error_sync import raise_on_main
from neuclip.errors import UserError
from neuclip.settings.reading import OBJECTIVE_KEY, changed_fields
from neuclip.settings.sections import Settings

# What may differ: what only the main rank reads, and where and how a rank reads its data. That the data are the same is
# checked when they are open.
MAY_DIFFER = (
    "data.train",
    "data.workers",
    "data.cache_size",
    "data.remote_timeout",
    "run.folder",
    "run.name",
    "run.threads",
    "run.device",
    "evaluation.retrieval",
    "evaluation.zero_shot",
    "checkpoint.",
    "log.tensorboard",
    "log.wandb",
)


def require_same_settings(settings: Settings, *, resuming: bool) -> None:
    """Collective. Ranks with other seeds would train in two orders, and with other budgets wait for each other."""
    (first, first_resumes), *others = all_gather_object((settings, resuming))
    for rank, (other, resumes) in enumerate(others, start=1):
        if resumes != first_resumes:
            raise_on_main(UserError(f"--resume is given to some ranks only (rank 0 or rank {rank}); give it to all"))
        changed = [key for key in changed_fields(first, other) if not key.startswith(MAY_DIFFER)]
        if changed:
            key = "objective_name" if changed[0] == OBJECTIVE_KEY else changed[0]
            values = [attrgetter(key)(one) for one in (first, other)]
            raise_on_main(
                UserError(
                    f"{changed[0]} is {values[0]} on rank 0 and {values[1]} on rank {rank}; "
                    "start all ranks with the same settings"
                )
            )
