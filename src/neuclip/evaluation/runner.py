"""All held-out figures of a pair of towers: every retrieval set and every zero-shot task, under flat keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuclip.data.faults import by_reason
from neuclip.data.held_out import HeldOutSets
from neuclip.data.sample import Fault
from neuclip.data.source import Source
from neuclip.errors import RunFailed
from neuclip.evaluation.embedding import Embedded, embed_pairs
from neuclip.evaluation.retrieval import recall
from neuclip.evaluation.unusable import TooManyBad
from neuclip.evaluation.zero_shot import evaluate_task
from neuclip.models.towers import BuiltModel


@dataclass(frozen=True)
class Evaluation:
    """`figures` under flat keys ("icons-30k/new-drawings.image_to_text_recall_at_1": 0.2); of every set one is
    `skipped`. A set of which too much is bad has no figure beside `images` and `skipped`: `refused` says why."""

    figures: dict[str, float] = field(default_factory=dict)
    embedded: dict[str, Embedded] = field(default_factory=dict)  # of retrieval sets: nobody has to compute it again
    faults: dict[str, tuple[Fault, ...]] = field(default_factory=dict)  # by set, what was left out
    refused: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, found: Mapping[str, float], source: Source, unread: Sequence[Fault]) -> None:
        self.faults[name] = (*source.faults, *unread)
        skipped = sum(fault.times for fault in self.faults[name])
        self.figures.update({f"{name}.{key}": value for key, value in (*found.items(), ("skipped", skipped))})

    def refuse(self, name: str, source: Source, refusal: TooManyBad) -> None:
        self.refused[name] = refusal.why
        self.note(name, {"images": len(source) - len(refusal.faults)}, source, refusal.faults)

    def raise_refused(self) -> None:
        """A RunFailed if a set was refused."""
        if self.refused:
            sets = "; ".join(f"{name} is not measured: {why}" for name, why in self.refused.items())
            raise RunFailed(f"{sets}; repair the data, or allow it with --max-bad-share")

    @property
    def skipped(self) -> dict[str, dict[str, int]]:
        """How many by reason, the commonest first; of the sets that have any."""
        return {name: dict(by_reason(faults).most_common()) for name, faults in self.faults.items() if faults}


def evaluate_towers(
    built: BuiltModel, sets: HeldOutSets, *, batch_size: int, workers: int, max_bad_share: float
) -> Evaluation:
    measured = Evaluation()
    how: dict[str, Any] = {
        "transform": built.transform,
        "tokenize": built.tokenize,
        "batch_size": batch_size,
        "workers": workers,
        "max_bad_share": max_bad_share,
    }
    for name, source in sets.retrieval.items():
        try:
            embedded = embed_pairs(built.towers, source, what=f"evaluating on {name}", **how)
            found = recall(embedded.image_features, embedded.text_features, embedded.caption_of)
            measured.embedded[name] = embedded
            measured.note(name, found, source, embedded.faults)
        except TooManyBad as refusal:
            measured.refuse(name, source, refusal)
    for name, task in sets.zero_shot.items():
        try:
            found, faults = evaluate_task(built.towers, task, **how)
            measured.note(name, found, task.source, faults)
        except TooManyBad as refusal:
            measured.refuse(name, task.source, refusal)
    return measured
