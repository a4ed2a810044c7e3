"""All held-out figures of a pair of towers: every retrieval set and every zero-shot task, under flat keys."""

from __future__ import annotations

from dataclasses import dataclass

from neuclip.data.source import Source, open_source
from neuclip.evaluation.embedding import embed_pairs
from neuclip.evaluation.retrieval import recall
from neuclip.evaluation.zero_shot import ZeroShotTask, evaluate_task
from neuclip.models.towers import BuiltModel


@dataclass(frozen=True)
class HeldOutSets:
    """What is measured, opened once: a missing file is found before training, not after."""

    retrieval: dict[str, Source]
    zero_shot: dict[str, ZeroShotTask]

    @classmethod
    def open(cls, retrieval: tuple[str, ...], zero_shot: tuple[str, ...]) -> HeldOutSets:
        return cls(
            {address: open_source(address) for address in retrieval},
            {address: ZeroShotTask.open(address) for address in zero_shot},
        )


def evaluate_towers(built: BuiltModel, sets: HeldOutSets, *, batch_size: int, workers: int) -> dict[str, float]:
    """`{"icons-30k/new-drawings.image_to_text_recall_at_1": 0.2, ..., "icons-30k/zero-shot/groups.top1": 0.4, ...}`"""
    figures: dict[str, float] = {}
    for name, source in sets.retrieval.items():
        embedded = embed_pairs(
            built.towers,
            source,
            transform=built.transform,
            tokenize=built.tokenize,
            batch_size=batch_size,
            workers=workers,
            what=f"evaluating on {name}",
        )
        found = recall(embedded.image_features, embedded.text_features, embedded.caption_of)
        figures |= {f"{name}.{key}": value for key, value in found.items()}
    for name, task in sets.zero_shot.items():
        found = evaluate_task(
            built.towers,
            task,
            transform=built.transform,
            tokenize=built.tokenize,
            batch_size=batch_size,
            workers=workers,
        )
        figures |= {f"{name}.{key}": value for key, value in found.items()}
    return figures
