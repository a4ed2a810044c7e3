"""Numbers that follow from the settings: steps, local batch sizes, chunks. They are computed only here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from neuclip.settings.sections import Settings


@dataclass(frozen=True)
class Plan:
    """How a run's budget is split into steps, a batch into local batches of ranks, and these into forward passes.

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
        """The number of samples the run trains on: whole batches only."""
        return self.steps * self.batch_size

    @property
    def chunks(self) -> int:
        """The number of forward passes per step and rank; they have nearly equal sizes."""
        return chunk_count(self.local_batch, self.micro_batch)

    @property
    def smallest_chunk(self) -> int:
        return self.local_batch // max(1, self.chunks)


def limit_epochs(settings: Settings, epoch_samples: int) -> Settings:
    """The settings with `train.samples` reduced to `train.epochs` epochs of this data, but to at least one batch."""
    train = settings.train
    if not train.epochs or train.samples <= train.epochs * epoch_samples:
        return settings
    return replace(settings, train=replace(train, samples=max(train.epochs * epoch_samples, train.batch_size)))


def warmup_steps(warmup: float, steps: int) -> int:
    """The number of warm-up steps. `warmup` is a share of the run if it is below 1, otherwise a number of steps."""
    return round(warmup * steps) if warmup < 1 else int(warmup)


def milestone_steps(count: int, samples: int, batch_size: int) -> tuple[int, ...]:
    """The first step at or after each of `count` equal parts of the budget; the last part ends with the last step.

    >>> milestone_steps(5, 1000, 100), milestone_steps(2, 1000, 96)
    ((2, 4, 6, 8, 10), (6, 10))
    """
    ends = (-(-part * samples // (count * batch_size)) for part in range(1, count + 1))
    return tuple(dict.fromkeys(min(step, samples // batch_size) for step in ends))


def chunk_count(pairs: int, micro_batch: int) -> int:
    """The number of forward passes for a rank's pairs; `micro_batch` 0 means no limit.

    >>> chunk_count(128, 48), chunk_count(128, 0)
    (3, 1)
    """
    return math.ceil(pairs / (micro_batch or pairs)) if pairs else 0


def stored_sides(settings: Settings, epoch_samples: int) -> list[str]:
    """The locked towers whose features are computed once and stored. Storing is useful if the run sees samples more
    than once, and possible for images only without a random crop."""
    if settings.data.stored_features == "off" or settings.train.samples <= epoch_samples:
        return []
    return [side for side in locked_sides(settings) if side == "text" or not settings.data.augments]


def locked_sides(settings: Settings) -> list[str]:
    model = settings.model
    sides = {"image": (model.image_tower, model.image_unlocked_layers)}
    sides["text"] = (model.text_tower, model.text_unlocked_layers)
    return [side for side, (mode, unlocked) in sides.items() if mode == "locked" and not unlocked]
