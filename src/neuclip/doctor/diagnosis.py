"""The examination: data, model, plan, objective, room, each noted in turn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from neuclip.data.locations import is_there, parts_of
from neuclip.data.mixture_order import order_of
from neuclip.data.open import open_training_data
from neuclip.data.source import Source
from neuclip.datasets.prepared import unprepared
from neuclip.doctor.findings import Findings
from neuclip.doctor.held_out import note_held_out
from neuclip.doctor.model import facts_of
from neuclip.doctor.objective import note_objective
from neuclip.doctor.pairs import (
    TokenCounter,
    note_bad,
    note_caption_lengths,
    note_equal_captions,
    note_images,
    note_look,
    note_source,
)
from neuclip.doctor.plan import note_loading, note_plan, note_small_batch, note_temperature, note_warmup
from neuclip.doctor.probe import Look, look_at
from neuclip.doctor.resources import note_device, note_disk, note_folder, note_memory
from neuclip.doctor.shards import note_shards
from neuclip.errors import RunFailed, UserError
from neuclip.models.facts import ModelFacts, pretrained_is_known, token_counter
from neuclip.models.hub import NotHere
from neuclip.settings.sections import Settings


def examine(settings: Settings, *, ranks: int = 1, sample: int | None = None) -> tuple[Findings, Look]:
    """What training with these settings on `ranks` processes would meet.

    >>> findings, look = examine(read_settings(None, ["--data.train", "shards"]))        # doctest: +SKIP
    >>> findings.ready, findings["data.pairs"]                                           # doctest: +SKIP
    """
    findings = Findings()
    try:
        model = facts_of(settings.model)
    except NotHere as error:
        note_failure(findings, error, "the model cannot be built")
        return findings, Look()
    source = opened(findings, settings)
    if source is None:
        return findings, Look()
    try:
        epoch = order_of(source, settings.run.seed).size
        look = look_at(source, seed=settings.run.seed, count=sample)
    except UserError as error:  # a cache that is too small, weights that leave nothing
        note_failure(findings, error, "the data cannot be read in the order of a run")
        return findings, Look()
    except RunFailed as error:  # a server that answers when asked what there is and then no more, a disk that fails
        note_failure(findings, error, "there is nothing to train on")
        return findings, Look()
    findings.note("plan", pairs_per_epoch=epoch)
    examine_data(findings, settings, source, look, model)
    examine_run(findings, settings, model, look, len(source), ranks)
    return findings, look


def opened(findings: Findings, settings: Settings) -> Source | None:
    """None, with the problem noted, for data that is there, or should be (a server that is down, a set that is not
    prepared), and cannot be used; an address of nothing is an error."""
    data = settings.data
    try:
        return open_training_data(data)
    except (UserError, RunFailed) as error:
        asked_for_nothing = isinstance(error, UserError) and not is_there(Path(data.train))
        if asked_for_nothing and not any(unprepared(part) for part, _ in parts_of(data.train)):
            raise
        note_failure(findings, error, "there is nothing to train on")
        return None


def note_failure(findings: Findings, error: Exception, why: str) -> None:
    what, _, remedy = str(error).partition("; ")
    findings.fail(what, why, remedy or "give other data")


def examine_data(findings: Findings, settings: Settings, source: Source, look: Look, model: ModelFacts) -> None:
    note_source(findings, source, settings.data)
    note_shards(findings, source)
    note_look(findings, look, source)
    note_bad(findings, look, settings, len(source))
    note_images(findings, look, model)
    note_caption_lengths(findings, look, model, counter(findings, settings, model))
    note_equal_captions(findings, source, look, settings)
    note_held_out(findings, settings, source)


def examine_run(findings: Findings, settings: Settings, model: ModelFacts, look: Look, pairs: int, ranks: int) -> None:
    note_model(findings, settings, model)
    note_plan(findings, settings, pairs, ranks)
    note_small_batch(findings, settings, model, pairs)
    note_loading(findings, settings, look)
    note_warmup(findings, settings, findings["plan.steps"])
    note_temperature(findings, settings, findings["plan.steps"])
    note_objective(findings, settings, model, pairs, ranks)
    note_device(findings, settings)
    note_memory(findings, settings, model)
    note_folder(findings, settings)
    note_disk(findings, settings, model)
    note_extras(findings, settings)


def counter(findings: Findings, settings: Settings, model: ModelFacts) -> TokenCounter | None:
    try:
        return token_counter(settings.model.name, usual=model.usual_tokenizer)
    except NotHere as error:
        note_failure(findings, error, "captions cannot be made into tokens")
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
    elif asked.pretrained and not Path(asked.pretrained).exists():
        findings.warn(
            f"model.pretrained {asked.pretrained} is a tag",
            "its weights are fetched when the run starts, unless they are here",
            "give --model.pretrained the path of a checkpoint to need no network",
        )


def note_extras(findings: Findings, settings: Settings) -> None:
    for name, asked in (("tensorboard", settings.log.tensorboard), ("wandb", settings.log.wandb)):
        if asked and find_spec(name) is None:
            findings.fail(f"log.{name} needs its extra", "it is not installed", f"pip install 'neuclip[{name}]'")
