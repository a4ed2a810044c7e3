"""Held-out data, opened as the run opens it: before anything else, and all of it."""

from __future__ import annotations

from neuclip.data.held_out import HeldOutSets, held_out_addresses
from neuclip.data.source import Source
from neuclip.doctor.findings import Findings
from neuclip.errors import RunFailed, UserError
from neuclip.settings.secrets import without_queries
from neuclip.settings.sections import Settings


def note_held_out(findings: Findings, settings: Settings, source: Source) -> None:
    """`source` is what is trained on."""
    retrieval, zero_shot = held_out_addresses(settings)
    asked = settings.evaluation
    automatic = bool(asked.retrieval == ("auto",) and retrieval) or bool(asked.zero_shot == ("auto",) and zero_shot)
    findings.note("evaluation", sets=len(retrieval) + len(zero_shot), automatic=automatic)
    for address in zero_shot:
        _opened(findings, (), (address,))
    for address in retrieval:
        sets = _opened(findings, (address,), ())
        if sets and any(source.places() & held.places() for held in sets.retrieval.values()):
            findings.warn(
                f"{without_queries(address)} is trained on, and evaluation.retrieval too",
                "recall on it does not tell how the model does on other images",
                "keep some files apart, and give those as --evaluation.retrieval DATA",
            )
    if not (retrieval or zero_shot):
        findings.warn(
            "nothing is held out", "the loss alone does not tell a good model", "give --evaluation.retrieval DATA"
        )


def _opened(findings: Findings, retrieval: tuple[str, ...], zero_shot: tuple[str, ...]) -> HeldOutSets | None:
    try:
        return HeldOutSets.open(retrieval, zero_shot)
    except (UserError, RunFailed) as error:
        what, _, remedy = str(error).partition("; ")
        flag = "--evaluation.retrieval" if retrieval else "--evaluation.zero_shot"
        findings.fail(what, "held-out data is opened first", remedy or f"correct {flag}")
        return None
