"""The numbers that follow from the settings: steps, shares of ranks, chunks. Computed here and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from neuclip.settings.sections import Settings


@dataclass(frozen=True)
class Plan:
    """How a run's budget is cut into steps, a batch into shares of ranks, and a share into forward passes.

    >>> Plan.of(read_settings(None, ["--train.samples", "1000", "--train.batch_size", "64"]), ranks=2).steps
    15
    """

    ranks: int
    batch_size: int  # pairs per step over all ranks
    steps: int
    warmup_steps: int
    local_batch: int  # pairs per step and rank
    micro_batch: int  # pairs per forward pass, at most
    milestones: tuple[int, ...] = ()  # steps after which a checkpoint is kept for good

    @classmethod
    def of(cls, settings: Settings, ranks: int = 1) -> Plan:
        train = settings.train
        steps, local = train.samples // train.batch_size, train.batch_size // ranks
        return cls(
            ranks=ranks,
            batch_size=train.batch_size,
            steps=steps,
            warmup_steps=warmup_steps(settings.optimizer.warmup, steps),
            local_batch=local,
            micro_batch=min(local, train.micro_batch_size or local),
            milestones=milestone_steps(settings.checkpoint.milestones, train.samples, train.batch_size),
        )

    @property
    def samples(self) -> int:
        """What the run sees: whole batches only."""
        return self.steps * self.batch_size

    @property
    def chunks(self) -> int:
        """Forward passes per step and rank, of nearly equal size."""
        return chunk_count(self.local_batch, self.micro_batch)

    @property
    def smallest_chunk(self) -> int:
        return self.local_batch // max(1, self.chunks)


def limit_epochs(settings: Settings, epoch_samples: int) -> Settings:
    """With `train.samples` as `train.epochs` limits it on this data; one batch at least."""
    train = settings.train
    if not train.epochs or train.samples <= train.epochs * epoch_samples:
        return settings
    return replace(settings, train=replace(train, samples=max(train.epochs * epoch_samples, train.batch_size)))


def warmup_steps(warmup: float, steps: int) -> int:
    """`warmup` below 1 is a share of the run, from 1 on a number of steps."""
    return round(warmup * steps) if warmup < 1 else int(warmup)


def milestone_steps(count: int, samples: int, batch_size: int) -> tuple[int, ...]:
    """The first steps at or past each of `count` equal parts of the budget; whole batches may end before the last.

    >>> milestone_steps(5, 1000, 100), milestone_steps(2, 1000, 96)
    ((2, 4, 6, 8, 10), (6, 10))
    """
    ends = (-(-part * samples // (count * batch_size)) for part in range(1, count + 1))
    return tuple(dict.fromkeys(min(step, samples // batch_size) for step in ends))


def chunk_count(pairs: int, micro_batch: int) -> int:
    """Into how many forward passes a rank cuts its pairs; 0 means no limit.

    >>> chunk_count(128, 48), chunk_count(128, 0)
    (3, 1)
    """
    return math.ceil(pairs / (micro_batch or pairs)) if pairs else 0


def stored_sides(settings: Settings, epoch_samples: int) -> list[str]:
    """The locked towers whose features are computed once and stored: where a run sees samples more than once, and
    nothing is drawn anew for each time."""
    if settings.data.stored_features == "off" or settings.train.samples <= epoch_samples:
        return []
    return [side for side in locked_sides(settings) if side == "text" or not settings.data.augments]


def locked_sides(settings: Settings) -> list[str]:
    model = settings.model
    sides = {"image": (model.image_tower, model.image_unlocked_layers)}
    sides["text"] = (model.text_tower, model.text_unlocked_layers)
    return [side for side, (mode, unlocked) in sides.items() if mode == "locked" and not unlocked]
