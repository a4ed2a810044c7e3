"""All held-out figures of a pair of towers: every retrieval set and every zero-shot task, under flat keys."""

from __future__ import annotations

from dataclasses import dataclass

from neuclip.data.source import Source, open_source
from neuclip.evaluation.embedding import Embedded, embed_pairs
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


@dataclass(frozen=True)
class Evaluation:
    """`figures` under flat keys ("icons-30k/new-drawings.image_to_text_recall_at_1": 0.2), and the features of each
    retrieval set, so that nobody has to compute them again."""

    figures: dict[str, float]
    embedded: dict[str, Embedded]


def evaluate_towers(built: BuiltModel, sets: HeldOutSets, *, batch_size: int, workers: int) -> Evaluation:
    figures: dict[str, float] = {}
    features: dict[str, Embedded] = {}
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
        features[name] = embedded
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
    return Evaluation(figures, features)
