"""The examination: data, model, plan, objective, room, each noted in turn."""

from __future__ import annotations

from pathlib import Path

from neuclip.data.mixture_order import order_of
from neuclip.data.named.builtin import builtin_names, is_builtin, unprepared
from neuclip.data.source import Source, check_there, is_there, open_training_data, parts_of
from neuclip.doctor.findings import Findings
from neuclip.doctor.look import Look, look_at
from neuclip.doctor.model import facts_of
from neuclip.doctor.objective import note_objective
from neuclip.doctor.pairs import (
    TokenCounter,
    note_bad,
    note_caption_lengths,
    note_equal_captions,
    note_look,
    note_pictures,
    note_source,
)
from neuclip.doctor.plan import note_plan, note_temperature, note_warmup
from neuclip.doctor.room import note_device, note_disk, note_memory
from neuclip.errors import AskedWrongly, RunFailed
from neuclip.models.facts import ModelFacts, pretrained_is_known, token_counter
from neuclip.settings.nearest import nearest_path
from neuclip.settings.sections import Settings


def examine(settings: Settings, *, ranks: int = 1, sample: int | None = None) -> tuple[Findings, Look]:
    """What training with these settings on `ranks` processes would meet.

    >>> findings, look = examine(read_settings(None, ["--data.train", "shards"]))        # doctest: +SKIP
    >>> findings.ready, findings["data.pairs"]                                           # doctest: +SKIP
    """
    findings = Findings()
    model = facts_of(settings.model)
    source = opened(findings, settings)
    if source is None:
        return findings, Look()
    try:
        look = look_at(source, seed=settings.run.seed, count=sample)
    except RunFailed as error:  # a server that answers when asked what there is and then no more, a disk that fails
        note_unusable(findings, error)
        return findings, Look()
    examine_data(findings, settings, source, look, model)
    examine_run(findings, settings, model, len(source), ranks)
    return findings, look


def opened(findings: Findings, settings: Settings) -> Source | None:
    """None, with the problem noted, for data that is there, or should be (a server that is down, a set that is not
    prepared), and cannot be used; an address of nothing is an error."""
    data = settings.data
    try:
        source = open_training_data(data)
        findings.note("plan", pairs_per_epoch=order_of(source, settings.run.seed).size)
        return source
    except (AskedWrongly, RunFailed) as error:
        asked_for_nothing = isinstance(error, AskedWrongly) and not is_there(Path(data.train))
        if asked_for_nothing and not any(unprepared(part) for part, _ in parts_of(data.train)):
            raise
        note_unusable(findings, error)
        return None


def note_unusable(findings: Findings, error: Exception) -> None:
    what, _, remedy = str(error).partition("; ")
    findings.fail(what, "there is nothing to train on", remedy or "give other data")


def examine_data(findings: Findings, settings: Settings, source: Source, look: Look, model: ModelFacts) -> None:
    note_source(findings, source, settings.data.train)
    note_look(findings, look, source)
    note_bad(findings, look, settings, len(source))
    note_pictures(findings, look, model)
    note_caption_lengths(findings, look, model, counter(findings, settings, model))
    note_equal_captions(findings, source, look, settings)
    note_held_out(findings, settings)


def examine_run(findings: Findings, settings: Settings, model: ModelFacts, pairs: int, ranks: int) -> None:
    note_model(findings, settings, model)
    note_plan(findings, settings, pairs, ranks)
    note_warmup(findings, settings, findings["plan.steps"])
    note_temperature(findings, settings, findings["plan.steps"])
    note_objective(findings, settings, model, pairs, ranks)
    note_device(findings, settings)
    note_memory(findings, settings, model)
    note_disk(findings, settings, model)
    folder = Path(settings.run.folder) / settings.run.name
    if settings.run.name and folder.exists():
        findings.fail(f"{folder} exists", "a run never overwrites another", "give another --run.name")


def counter(findings: Findings, settings: Settings, model: ModelFacts) -> TokenCounter | None:
    try:
        return token_counter(settings.model.name, usual=model.usual_tokenizer)
    except OSError as error:  # a vocabulary that would have to be fetched
        findings.fail(
            f"the tokenizer of {settings.model.name} is not on this machine",
            str(error).splitlines()[0].rstrip("."),
            "fetch it once while online, or give another --model.name",
        )
        return None


def note_model(findings: Findings, settings: Settings, model: ModelFacts) -> None:
    asked = settings.model
    findings.note(
        "model",
        name=asked.name,
        parameters=model.parameters,
        image_height=model.image_size[0],
        image_width=model.image_size[1],
        context_tokens=model.context_length,
        embed_dim=model.embed_dim,
    )
    if asked.pretrained and not pretrained_is_known(asked.name, asked.pretrained):
        findings.fail(
            f"model.pretrained {asked.pretrained} is neither a file nor a tag of {asked.name}",
            "there are no weights to start from",
            "give --model.pretrained the path of a checkpoint",
        )


def note_held_out(findings: Findings, settings: Settings) -> None:
    """Addresses that a run would only open after it has started to build its model."""
    asked = settings.evaluation
    named = [address for address in (*asked.retrieval, *asked.zero_shot) if address != "auto"]
    own = settings.data.train in builtin_names() and is_builtin(settings.data.train)
    brings_its_own = own and "auto" in (*asked.retrieval, *asked.zero_shot)
    findings.note("evaluation", sets=len(named), automatic=brings_its_own)
    for address in named:
        if reason := leads_nowhere(address, of_one_folder=address in asked.zero_shot):
            what, _, remedy = reason.partition("; ")
            findings.fail(what, "held-out data is opened first", remedy)
    if not (named or brings_its_own):
        findings.warn(
            "nothing is held out", "the loss alone does not tell a good model", "give --evaluation.retrieval DATA"
        )


def leads_nowhere(address: str, *, of_one_folder: bool) -> str:
    """Why a held-out address cannot be opened, as far as can be told without opening it; "" if nothing is wrong."""
    try:
        parts = [address] if of_one_folder else [part for part, _ in parts_of(address)]
        for part in parts:
            if reason := unprepared(part):
                return reason
        if not of_one_folder:
            check_there(address)
        elif not (is_builtin(address) or is_there(Path(address))):
            near = nearest_path(Path(address))
            return f"{address}: no such folder; {f'did you mean {near}?' if near else 'correct --evaluation.zero_shot'}"
    except AskedWrongly as wrong:
        return str(wrong)
    return ""
