"""What a run is measured on, opened before it starts: pairs for retrieval, zero-shot tasks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from neuclip.data import by_name
from neuclip.data.hold_out import SUFFIX
from neuclip.data.locations import is_there
from neuclip.data.open import data_name, open_as, open_held_out_part
from neuclip.data.sample import BadSample
from neuclip.data.source import Source
from neuclip.data.zero_shot import ZeroShotTask
from neuclip.errors import UserError
from neuclip.settings.secrets import without_queries
from neuclip.settings.sections import Settings


def held_out_addresses(settings: Settings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Addresses for retrieval and for zero-shot. `auto` means the test parts of a data set by name; other data have
    none. What data.hold_out keeps is measured too, unless `none` is given."""
    name, evaluation = settings.data.train, settings.evaluation
    retrieval, zero_shot = evaluation.retrieval, evaluation.zero_shot
    known = name in by_name.names() and by_name.is_name(name)
    kept = (f"{data_name(name)}{SUFFIX}",) if settings.data.hold_out else ()
    if retrieval == ("auto",):
        retrieval = (*(by_name.held_out(name).retrieval if known else ()), *kept)
    elif retrieval and not any(address.endswith(SUFFIX) for address in retrieval):
        retrieval = (*retrieval, *kept)
    if zero_shot == ("auto",):
        zero_shot = by_name.held_out(name).zero_shot if known else ()
    return retrieval, zero_shot


@dataclass(frozen=True)
class HeldOutSets:
    """Opened once: a missing file is found before training, not after.

    The keys are addresses without the queries of signed URLs, as figures and files of a run may show them.
    """

    retrieval: dict[str, Source]
    zero_shot: dict[str, ZeroShotTask]

    @classmethod
    def open(cls, settings: Settings) -> HeldOutSets:
        """Those of settings.evaluation; tables and shards are read as the training data unless it says otherwise."""
        retrieval, zero_shot = settings.evaluation.retrieval, settings.evaluation.zero_shot
        names = Counter(without_queries(address) for address in set(retrieval))
        if twice := [name for name, count in names.items() if count > 1]:
            raise UserError(
                f"{twice[0]}: several held-out sets differ only in query or password, which no figure shows; write "
                "each address into a list of its own (a.txt, b.txt) and give these"
            )
        sources = {without_queries(address): open_retrieval(address, settings) for address in retrieval}
        return cls(sources, {address: ZeroShotTask.open(address) for address in zero_shot})


def open_retrieval(address: str, settings: Settings) -> Source:
    data, own = settings.data, settings.evaluation
    if address.endswith(SUFFIX) and not is_there(Path(address)):
        if not data.hold_out or address != (kept := f"{data_name(data.train)}{SUFFIX}"):
            remedy = f"give {kept}" if data.hold_out else "give --data.hold_out 1000 when you train"
            raise UserError(f"{address}: is nothing that was kept from training; {remedy}")
        return open_held_out_part(settings)
    columns = ("image_column", "caption_column", "caption_key")
    chosen = {name: value for name in columns if (value := getattr(own, name))}
    try:
        source = open_as(address, replace(data, **chosen))
        _refuse_no_captions(address, source)
        return source
    except UserError as error:
        raise UserError(re.sub(rf"--data\.({'|'.join(columns)})", r"--evaluation.\1", str(error))) from error


def _refuse_no_captions(address: str, source: Source) -> None:
    """A wrong caption key leaves nothing to measure, which would otherwise be found after training."""
    if any(len(piece.first.bytes) for piece in source.caption_pieces()):
        return
    try:
        source[0]
        reason = "first of all " + source.where(0)
    except BadSample as bad:
        reason = f"{bad.reason}, {bad.where}"
    raise UserError(f"{without_queries(address)}: no sample has a caption ({reason}); give data with captions")
