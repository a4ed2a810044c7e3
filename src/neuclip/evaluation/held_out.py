"""Evaluates a model on all held-out retrieval sets and zero-shot tasks; the figures have flat keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from neuclip.data.faults import by_reason
from neuclip.data.held_out import HeldOutSets
from neuclip.data.source import Fault, Source
from neuclip.distributed.ranks import on_main_rank
from neuclip.errors import RunFailed
from neuclip.evaluation.classification import classify
from neuclip.evaluation.embedding import EmbeddedPairs, Embedder, TooManyBadSamples
from neuclip.evaluation.retrieval import recall


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. `figures` have flat keys ("icons-30k/new-drawings.image_to_text_recall_at_1": 0.2);
    every set has a figure `skipped`. A set with too many bad samples is refused: it has only the figures `images` and
    `skipped`."""

    figures: dict[str, float] = field(default_factory=dict)
    embedded: dict[str, EmbeddedPairs] = field(default_factory=dict)  # the retrieval sets, for the gallery
    faults: dict[str, tuple[Fault, ...]] = field(default_factory=dict)  # the skipped samples of each set
    refused: dict[str, str] = field(default_factory=dict)  # the reason why a set was refused

    def add(self, name: str, figures: Mapping[str, float], source: Source, unread: Sequence[Fault]) -> None:
        self.faults[name] = (*source.faults, *unread)
        skipped = sum(fault.times for fault in self.faults[name])
        self.figures.update({f"{name}.{key}": value for key, value in (*figures.items(), ("skipped", skipped))})

    def refuse(self, name: str, source: Source, refusal: TooManyBadSamples) -> None:
        self.refused[name] = refusal.reason
        self.add(name, {"images": len(source) - len(refusal.faults)}, source, refusal.faults)

    def raise_refused(self) -> None:
        """Raise RunFailed if a set was refused."""
        if self.refused:
            sets = "; ".join(f"{name} is not measured: {reason}" for name, reason in self.refused.items())
            raise RunFailed(f"{sets}; repair the data, or allow it with --max-bad-share")

    @property
    def skipped(self) -> dict[str, dict[str, int]]:
        """Skipped samples by set and reason, the most frequent reason first; only sets that have any."""
        return {name: dict(by_reason(faults).most_common()) for name, faults in self.faults.items() if faults}


def evaluate_held_out(embedder: Embedder, sets: HeldOutSets) -> Evaluation:
    """Collective. All ranks embed; only the main rank computes figures, and only its result has them."""
    evaluation = Evaluation()
    for name, source in sets.retrieval.items():
        try:
            embedded = embedder.embed_pairs(source, f"evaluating on {name}")
        except TooManyBadSamples as refusal:
            evaluation.refuse(name, source, refusal)
            continue
        evaluation.embedded[name] = embedded
        evaluation.add(name, on_main_rank(partial(recall, embedded)) or {}, source, embedded.faults)
    for name, task in sets.zero_shot.items():
        try:
            figures, faults = classify(embedder, task)
        except TooManyBadSamples as refusal:
            evaluation.refuse(name, task.source, refusal)
            continue
        evaluation.add(name, figures, task.source, faults)
    return evaluation
