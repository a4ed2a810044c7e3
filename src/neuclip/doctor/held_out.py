"""Held-out data, opened as a run opens it: all of it, before training."""

from __future__ import annotations

from dataclasses import replace

from neuclip.data.held_out import HeldOutSets, held_out_addresses
from neuclip.data.mixture import HELD_OUT_SUFFIX, Selection
from neuclip.data.source import Source, fingerprint
from neuclip.doctor.findings import Findings
from neuclip.errors import RunFailed, UserError
from neuclip.secrets import without_queries
from neuclip.settings.sections import Settings


def note_held_out(findings: Findings, settings: Settings, source: Source, identity: dict[str, int | str]) -> None:
    """`source` is the training data, `identity` its fingerprint."""
    retrieval, zero_shot = held_out_addresses(settings)
    evaluation = settings.evaluation
    automatic = (evaluation.retrieval == ("auto",) and retrieval) or (evaluation.zero_shot == ("auto",) and zero_shot)
    findings.note("evaluation", sets=len(retrieval) + len(zero_shot), automatic=bool(automatic))
    for address in zero_shot:
        _open(findings, settings, zero_shot=(address,))
    counts: dict[str, dict[str, int]] = {}
    for address in retrieval:
        sets = _open(findings, settings, retrieval=(address,))
        opened = {} if sets is None else sets.retrieval
        counts |= {name: fingerprint(held)[1]._asdict() for name, held in opened.items()}
        others = {} if address.endswith(HELD_OUT_SUFFIX) else opened
        ungrouped = [held.source if isinstance(held, Selection) else held for held in others.values()]
        same_captions = [held for held in ungrouped if fingerprint(held)[0] == identity]
        if any(held.images_version() == source.images_version() for held in same_captions):
            findings.warn(
                f"{without_queries(address)} is both training data and evaluation.retrieval",
                "recall on it says nothing about other images",
                "keep some files out of training and give them as --evaluation.retrieval DATA",
            )
    findings.note("evaluation", captions=counts)
    if not (retrieval or zero_shot):
        findings.warn(
            "there is no held-out data",
            "the loss alone does not show quality",
            f"give --data.hold_out {min(1000, max(1, len(source) // 10))}, or --evaluation.retrieval DATA",
        )


def _open(
    findings: Findings, settings: Settings, retrieval: tuple[str, ...] = (), zero_shot: tuple[str, ...] = ()
) -> HeldOutSets | None:
    evaluation = replace(settings.evaluation, retrieval=retrieval, zero_shot=zero_shot)
    try:
        return HeldOutSets.open(replace(settings, evaluation=evaluation))
    except (UserError, RunFailed) as error:
        flag = "--evaluation.retrieval" if retrieval else "--evaluation.zero_shot"
        findings.fail_with(error, "held-out data is opened before training", f"correct {flag}")
        return None
