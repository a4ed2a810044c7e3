"""The examination: data, model, plan, objective and resources."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from neuclip.data.by_name import is_name
from neuclip.data.locations import is_there, parts_of
from neuclip.data.mixture import order_of
from neuclip.data.open import open_training_data
from neuclip.data.source import Source, fingerprint
from neuclip.doctor.findings import Findings
from neuclip.doctor.held_out import note_held_out
from neuclip.doctor.model import cached_facts
from neuclip.doctor.objective import note_objective
from neuclip.doctor.pairs import (
    note_bad,
    note_caption_counts,
    note_caption_lengths,
    note_equal_captions,
    note_images,
    note_probe,
    note_source,
)
from neuclip.doctor.plan import note_batch_size, note_loading, note_plan, note_storing, note_temperature, note_warmup
from neuclip.doctor.probe import SampleProbe, probe_samples
from neuclip.doctor.resources import note_device, note_disk, note_folder, note_memory
from neuclip.errors import RunFailed, UserError
from neuclip.models.facts import ModelFacts
from neuclip.models.failures import pretrained_is_here, pretrained_is_known
from neuclip.models.hub import NotHere
from neuclip.plan import limit_epochs
from neuclip.settings.sections import Settings


def examine(settings: Settings, *, ranks: int = 1, sample: int | None = None) -> tuple[Findings, SampleProbe]:
    """What training with these settings on `ranks` ranks would do, and what would go wrong.

    >>> findings, probe = examine(read_settings(None, ["--data.train", "shards"]))        # doctest: +SKIP
    >>> findings.ready, findings["data.pairs"]                                            # doctest: +SKIP
    """
    findings = Findings()
    try:
        model = cached_facts(settings.model)
    except NotHere as error:
        findings.fail_with(error, "the model cannot be built")
        return findings, SampleProbe()
    source = open_data(findings, settings)
    if source is None:
        return findings, SampleProbe()
    try:
        epoch = order_of(source, settings.run.seed).size
        probe = probe_samples(source, seed=settings.run.seed, count=sample)
    except (UserError, RunFailed) as error:  # a cache that is too small, weights that leave nothing, a failing server
        findings.fail_with(error, "the data cannot be read as in a run")
        return findings, SampleProbe()
    findings.note("plan", pairs_per_epoch=epoch)
    settings = limit_epochs(settings, epoch)
    examine_data(findings, settings, source, probe, model)
    examine_run(findings, settings, model, probe, len(source), ranks)
    return findings, probe


def open_data(findings: Findings, settings: Settings) -> Source | None:
    """None, with a problem noted, if the data exists or should exist (a server is down, packages of the demo's
    data are missing) but cannot be used. A path that does not exist is an error."""
    data = settings.data
    try:
        return open_training_data(settings)
    except (UserError, RunFailed) as error:
        missing = isinstance(error, UserError) and not is_there(Path(data.train))
        if missing and not any(is_name(part) for part, _ in parts_of(data.train)):
            raise
        findings.fail_with(error, "there is no data to train on")
        return None


def examine_data(findings: Findings, settings: Settings, source: Source, probe: SampleProbe, model: ModelFacts) -> None:
    identity, counts = fingerprint(source)
    note_source(findings, source, settings.data)
    note_probe(findings, probe, source)
    note_bad(findings, probe, settings, len(source))
    note_images(findings, probe, model)
    note_caption_counts(findings, source, counts)
    note_caption_lengths(findings, probe, settings, model)
    note_equal_captions(findings, source, probe, settings)
    note_held_out(findings, settings, source, identity)


def examine_run(
    findings: Findings, settings: Settings, model: ModelFacts, probe: SampleProbe, pairs: int, ranks: int
) -> None:
    note_model(findings, settings, model)
    note_plan(findings, settings, pairs, ranks)
    note_batch_size(findings, settings, model, pairs)
    note_loading(findings, settings, probe)
    note_storing(findings, settings)
    note_warmup(findings)
    note_temperature(findings, settings, findings["plan.steps"])
    note_objective(findings, settings, model, pairs, ranks)
    note_device(findings, settings)
    note_memory(findings, settings, model)
    note_folder(findings, settings)
    note_disk(findings, settings, model)
    note_extras(findings, settings)


def note_model(findings: Findings, settings: Settings, model: ModelFacts) -> None:
    name, pretrained = settings.model.name, settings.model.pretrained
    findings.note(
        "model",
        name=name,
        parameters=model.parameters,
        image_height=model.image_size[0],
        image_width=model.image_size[1],
        context_tokens=model.context_length,
        embed_dim=model.embed_dim,
    )
    if pretrained and not pretrained_is_known(name, pretrained):
        findings.fail(
            f"model.pretrained {pretrained} is neither a file nor a tag of {name}",
            "there are no weights to start from",
            "give --model.pretrained the path of a checkpoint",
        )
    elif pretrained and not pretrained_is_here(pretrained):
        findings.warn(
            f"model.pretrained {pretrained} is a tag",
            "its weights are downloaded when the run starts, unless they are cached",
            "to need no network, give --model.pretrained the path of a checkpoint",
        )


def note_extras(findings: Findings, settings: Settings) -> None:
    for name, wanted in (("tensorboard", settings.log.tensorboard), ("wandb", settings.log.wandb)):
        if wanted and find_spec(name) is None:
            findings.fail(f"log.{name} needs a package", "it is not installed", f"pip install 'neuclip[{name}]'")
