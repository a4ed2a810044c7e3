"""What a run is measured on, opened before it starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from neuclip.data.open import check_listed_images, open_source
from neuclip.data.source import Source
from neuclip.data.zero_shot_task import ZeroShotTask
from neuclip.datasets.catalogue import HeldOut, held_out
from neuclip.datasets.catalogue import is_name as is_dataset_name
from neuclip.datasets.catalogue import names as dataset_names
from neuclip.errors import UserError
from neuclip.settings.secrets import without_queries
from neuclip.settings.sections import Settings


def asked_sets(settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Addresses for retrieval and for zero-shot. `auto` becomes the test parts that a built-in data set brings; other
    data bring none."""
    name, asked = settings.data.train, settings.evaluation
    brought = held_out(name) if name in dataset_names() and is_dataset_name(name) else HeldOut((), ())
    retrieval = brought.retrieval if asked.retrieval == ("auto",) else asked.retrieval
    return retrieval, brought.zero_shot if asked.zero_shot == ("auto",) else asked.zero_shot


@dataclass(frozen=True)
class HeldOutSets:
    """What is measured, opened once: a missing file is found before training, not after.

    Their names are their addresses, as the figures and files of a run may show them.
    """

    retrieval: dict[str, Source]
    zero_shot: dict[str, ZeroShotTask]

    @classmethod
    def open(cls, retrieval: tuple[str, ...], zero_shot: tuple[str, ...]) -> HeldOutSets:
        names = Counter(without_queries(address) for address in set(retrieval))
        if twice := [name for name, count in names.items() if count > 1]:
            raise UserError(
                f"{twice[0]}: several held-out sets differ only behind the question mark, which no figure shows; write "
                "each address into a list of its own (a.txt, b.txt) and give these"
            )
        sources = {without_queries(address): open_source(address) for address in retrieval}
        for source in sources.values():
            check_listed_images(source)
        return cls(sources, {address: ZeroShotTask.open(address) for address in zero_shot})
