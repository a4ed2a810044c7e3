"""What a run is measured on, opened before it starts: pairs for retrieval, zero-shot tasks."""

from __future__ import annotations

import glob
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from neuclip.data import by_name
from neuclip.data.by_image import GroupedByImage, group_by_image
from neuclip.data.clip_benchmark_layout import DATASET_TYPE, RETRIEVAL
from neuclip.data.fingerprint import count_captions
from neuclip.data.hold_out import SUFFIX
from neuclip.data.locations import expand_braces, is_there
from neuclip.data.open import data_name, open_as, open_held_out_part
from neuclip.data.sample import BadSample
from neuclip.data.source import Source
from neuclip.data.tables.columns import print_once
from neuclip.data.zero_shot import CLASSNAMES, ZeroShotTask
from neuclip.errors import UserError
from neuclip.formatting import plural
from neuclip.secrets import between_commas, without_queries
from neuclip.settings.sections import Settings

NAMED = re.compile(r"([^=/\\:?*{},]*)=(.*)", re.DOTALL)  # a name holds nothing that an address needs before its '='


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


def named(address: str) -> tuple[str, str]:
    """The name under which figures show a held-out set, and its address: NAME=ADDRESS gives both. Without a name it is
    the address, without the query of a signed URL. A path that is there is never cut.

    >>> named("flickr=wds_flickr30k"), named("s3://bucket/x.tar?id=1")
    (('flickr', 'wds_flickr30k'), ('s3://bucket/x.tar', 's3://bucket/x.tar?id=1'))
    """
    match = NAMED.fullmatch(address)
    if match is None or _is_path(address):
        return without_queries(address), address
    name, path = match[1].strip(), match[2].strip()
    if not (name and path):
        missing = "address behind" if name else "name before"
        raise UserError(f"{without_queries(address)}: no {missing} '='; give NAME=ADDRESS, or the address alone")
    return name, path


def _is_path(address: str) -> bool:
    """Whether something is there under this address, or matches it: folders are called `part=0` too."""
    first = expand_braces(between_commas(address)[0])[0]
    return is_there(Path(address)) or is_there(Path(first)) or bool(glob.glob(first))  # noqa: PTH207


@dataclass(frozen=True)
class HeldOutSets:
    """Opened once: a missing file is found before training, not after.

    The keys are the names that figures and files of a run show.
    """

    retrieval: dict[str, Source]
    zero_shot: dict[str, ZeroShotTask]

    @classmethod
    def open(cls, settings: Settings) -> HeldOutSets:
        """Those of settings.evaluation; tables and shards are read as the training data unless it says otherwise."""
        retrieval, zero_shot = (
            {address: named(address)[0] for address in addresses}
            for addresses in (settings.evaluation.retrieval, settings.evaluation.zero_shot)
        )
        _refuse_equal_names(retrieval | zero_shot)
        return cls(
            {name: open_retrieval(address, settings) for address, name in retrieval.items()},
            {name: ZeroShotTask.open(named(address)[1], name=name) for address, name in zero_shot.items()},
        )


def _refuse_equal_names(names: dict[str, str]) -> None:
    """`names`: of each address."""
    counts = Counter(names.values())
    twice = [address for address, name in names.items() if counts[name] > 1]
    if not twice:
        return
    first, second = (without_queries(named(address)[1]) for address in twice[:2])
    if first == second:
        raise UserError(
            f"{first}: several held-out sets differ only in query or password, which no figure shows; name each: "
            f"NAME={first}"
        )
    raise UserError(
        f"{names[twice[0]]}: is the name of two held-out sets, {first} and {second}; give each a name of its own"
    )


def open_retrieval(address: str, settings: Settings) -> Source:
    """A retrieval set, with or without a name before it: one sample per image, which has all its captions."""
    _, address = named(address)
    data, own = settings.data, settings.evaluation
    if address.endswith(SUFFIX) and not is_there(Path(address)):
        if not data.hold_out or address != (kept := f"{data_name(data.train)}{SUFFIX}"):
            remedy = f"give {kept}" if data.hold_out else "give --data.hold_out 1000 when you train"
            raise UserError(f"{address}: is nothing that was kept from training; {remedy}")
        source = group_by_image(open_held_out_part(settings))
        if not any(part.captions_sha256 for part in source.parts):  # of more data all captions would be read for it
            count_captions(source)
            _print_several_lines(address, source)
        return source
    columns = ("image_column", "caption_column", "caption_key")
    chosen = {name: value for name in columns if (value := getattr(own, name))}
    try:
        source = group_by_image(open_as(address, replace(data, **chosen), retrieval=True))
        _check_captions(address, source)
        _print_several_lines(address, source)
        return source
    except UserError as error:
        raise UserError(re.sub(rf"--data\.({'|'.join(columns)})", r"--evaluation.\1", str(error))) from error


def _check_captions(address: str, source: Source) -> None:
    """A wrong caption key leaves nothing to measure, which would otherwise be found after training; some images without
    a caption are left out of the figures, and counted there."""
    if isinstance(source, GroupedByImage) and len(source.left_out):
        rows, first = len(source.left_out), source.source.where(int(source.left_out[0]))
        print_once(
            f"{without_queries(address)}: {rows:,} of {len(source.source):,} rows have no caption and are left out, "
            f"the first is {first}; their images have other captions"
        )
    counts = count_captions(source)
    if not counts.without:
        return
    if counts.captions:
        print_once(
            f"{without_queries(address)}: {counts.without:,} of {plural(counts.samples, 'image')} have no caption and "
            "are skipped; give each of them one, or remove them"
        )
        return
    try:
        source[0]
        reason = "first of all " + source.where(0)
    except BadSample as bad:
        reason = f"{bad.reason}, {bad.where}"
    remedy = "it is a set for zero-shot" if (Path(address) / CLASSNAMES).is_file() else "give data with captions"
    raise UserError(f"{without_queries(address)}: no sample has a caption ({reason}); {remedy}")


def _print_several_lines(address: str, source: Source) -> None:
    """Texts of several lines may be several captions; nothing but a mark tells."""
    pieces = (piece for part in source.parts if part.texts_are_captions for piece in part.caption_pieces())
    if count := sum(b"\n" in text for piece in pieces for text in piece.first):
        print_once(
            f"{without_queries(address)}: the texts of {count:,} of {plural(len(source), 'image')} have several lines "
            f"and are read as one caption each; if every line is a caption, {'download the set and ' * source.fetches}"
            f"write the word {RETRIEVAL} into the file {DATASET_TYPE} beside the images or shards"
        )
