"""The examination of small generated data: what is found, what is warned of, what training would fail of."""

from __future__ import annotations

import itertools
import math
import random
import tarfile

import pytest
import torch

from neuclip.data.faults import FaultLog
from neuclip.data.open import open_source
from neuclip.data.sample import Batch, Fault
from neuclip.doctor.diagnosis import examine
from neuclip.doctor.findings import Findings
from neuclip.doctor.pairs import estimated_meeting, note_bad, share_meeting_an_equal
from neuclip.doctor.plan import note_temperature, note_warmup
from neuclip.doctor.probe import Look, look_at
from neuclip.errors import RunFailed, UserError
from neuclip.plan import warmup_steps
from neuclip.settings.reading import read_settings
from tests.data.small_shards import write_tar
from tests.images import caption, image_bytes, write_csv, write_shard, write_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """120 pairs, two of them without an image that decodes."""
    return write_shards(tmp_path_factory.mktemp("doctor") / "shapes", 120, shards=3, spoilt=(7, 80))


def examined(data, *flags: str, ranks: int = 1, sample: int | None = None):
    settings = read_settings(None, ["--data.train", str(data), "--train.batch_size", "16", *flags])
    return examine(settings, ranks=ranks, sample=sample)[0]


def remedies(findings: Findings) -> str:
    return "\n".join(str(advice) for advice in findings.warnings + findings.problems)


def test_what_the_data_is_and_what_a_run_on_it_does(shards):
    findings = examined(shards, "--train.samples", "480", "--data.workers", "2", ranks=2)
    assert (findings["data.kind"], findings["data.pairs"], findings["data.files"]) == ("tar", 120, 3)
    assert findings["data.file_bytes"] == sum(file.stat().st_size for file in shards.glob("*.tar"))
    assert (findings["plan.steps"], findings["plan.epochs"], findings["plan.batches_per_epoch"]) == (30, 4, 7.5)
    assert (findings["plan.batch_per_rank"], findings["plan.samples_per_rank"]) == (8, 240)
    assert findings["bad.reasons"] == {"image does not decode": 2}
    assert (findings["images.median_width"], findings["images.modes"]) == (32, {"RGB": 118})
    assert (findings["images.small_share"], findings["captions.median_tokens"]) == (1.0, 5)
    assert findings.ready


def test_a_look_is_a_look_and_not_a_pass(shards):
    findings = examined(shards, sample=10)
    assert (findings["sample.pairs"], findings["sample.share"]) == (10, 10 / 120)
    assert len(findings["sample.shown"]) == 3 and findings["captions.counted"] == 120


def test_a_look_meets_what_the_run_reads_first(shards):
    source = open_source(str(shards))
    seeds = [[one.id for one in look_at(source, seed=seed, count=5).shown] for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_a_table_of_images_is_examined_too(tmp_path):
    findings = examined(write_csv(tmp_path, 40))
    assert (findings["data.pairs"], findings["data.files"], findings["bad.pairs"]) == (40, 1, 0)


@pytest.mark.parametrize(
    ("flags", "ranks", "told"),
    [
        (["--train.batch_size", "121"], 1, "give --train.batch_size 120 or less"),
        ([], 3, "give --train.batch_size 15 or 18"),
        (["--data.max_bad_share", "0"], 1, "--data.max_bad_share"),
        (["--model.pretrained", "nowhere.pt"], 1, "--model.pretrained"),
        (["--run.precision", "fp16", "--run.device", "cpu"], 1, "--run.precision fp32"),
        (["--evaluation.retrieval", "nowhere"], 1, "nowhere: no such file or folder"),
        (["--evaluation.retrieval", "nowhere.csv:2"], 1, "nowhere.csv: no such file or folder"),
        (["--evaluation.retrieval", "nowhere/*.tar"], 1, "no file matches this pattern"),
        (["--evaluation.zero_shot", "nowhere"], 1, "nowhere/classnames.txt: no such file"),
    ],
)
def test_what_training_would_fail_of_is_a_problem_with_its_remedy(shards, flags, ranks, told):
    findings = examined(shards, *flags, ranks=ranks)
    assert not findings.ready and len(findings.problems) == 1
    assert told in str(findings.problems[0])


def test_a_run_that_exists_is_not_overwritten(shards, tmp_path):
    (tmp_path / "first").mkdir()
    assert "another --run.name" in remedies(
        examined(shards, "--run.folder", str(tmp_path), "--run.name", "first", sample=1)
    )


def test_data_that_is_there_and_unreadable_is_a_problem_and_an_address_of_nothing_an_error(tmp_path):
    (tmp_path / "empty.tar").write_bytes(b"")
    findings = examined(tmp_path / "empty.tar")
    assert not findings.ready and "empty.tar" in findings.problems[0].what
    with pytest.raises(UserError, match="no such file"):
        examined(tmp_path / "nothing.tar")


def test_images_that_all_fail_stop_the_run_however_few(tmp_path):
    findings = examined(write_shard(tmp_path / "x.tar", range(20), spoilt=range(20)))
    assert findings["bad.stops_run"] and "images.modes" not in findings.figures


def test_captions_under_another_key_are_found_and_named_in_the_remedy(tmp_path):
    members = [("0.png", image_bytes(0)), ("0.json", b'{"url": "http://x", "text": "a cat"}')]
    shard = write_tar(tmp_path / "x.tar", [(f"{k}{name}", content) for k in range(9) for name, content in members])
    [problem] = [problem for problem in examined(shard).problems if "are bad" in problem.what]
    assert "name one with --data.caption_key text" in problem.remedy and "max_bad_share" not in problem.remedy
    assert examined(shard, "--data.caption_key", "text")["bad.pairs"] == 0


@pytest.mark.parametrize(
    ("limit", "read", "bad"), [*itertools.product((0, 0.05, 0.5, 1), (99, 100, 500), (0, 1, 37, 40, 99))]
)
def test_the_share_of_bad_pairs_is_judged_as_a_run_judges(tmp_path, limit, read, bad):
    settings = read_settings(None, ["--data.max_bad_share", str(limit)])
    look, findings = Look(read=read), Findings()
    look.faults["image does not decode"] = bad
    note_bad(findings, look, settings, pairs=10_000)
    log = FaultLog(tmp_path / "skipped.jsonl", limit)
    faults = tuple(Fault(number, "image does not decode", "x") for number in range(bad))
    try:
        log.note(Batch(torch.zeros(0), torch.zeros(0), torch.arange(read), faults))
        stopped = bad == read  # nothing is left to stand in
    except RunFailed:
        stopped = True
    assert findings["bad.stops_run"] == stopped


def test_the_share_that_meets_an_equal_caption_is_that_of_drawn_batches():
    captions = [0] * 30 + [1] * 10 + list(range(2, 62))
    draw = random.Random(0)
    met = 0
    for _ in range(4000):
        batch = draw.sample(captions, 12)
        met += sum(batch.count(caption) > 1 for caption in batch)
    counts = [30, 10, *[1] * 60]
    assert share_meeting_an_equal(counts, pairs=100, batch=12) == pytest.approx(met / 48_000, abs=0.02)
    assert share_meeting_an_equal([1, 1, 1], pairs=3, batch=3) == 0


def test_equal_captions_are_estimated_from_a_sample_without_bias():
    captions = [f"{number % 500}" for number in range(10_000)]
    exact = share_meeting_an_equal([20] * 500, pairs=10_000, batch=64)
    draw = random.Random(0)
    estimates = [estimated_meeting(draw.sample(captions, 500), 64) for _ in range(20)]
    assert sum(estimates) / 20 == pytest.approx(exact, rel=0.1)


def test_equal_captions_in_a_batch_are_warned_of_until_they_are_masked(shards):
    mask = "--objective.mask_duplicates"
    assert mask in remedies(examined(shards, sample=1))
    assert mask not in remedies(examined(shards, mask, "true", sample=1))


@pytest.mark.parametrize("warmup", [0, 0.05, 0.5, 1, 20, 500])
def test_the_warm_up_is_that_of_training(warmup):
    findings = Findings()
    note_warmup(findings, read_settings(None, ["--optimizer.warmup", str(warmup)]), steps=100)
    assert findings["plan.warmup_steps"] == warmup_steps(warmup, 100)
    assert bool(findings.warnings) == (warmup == 500)


def test_a_temperature_that_cannot_move_is_warned_of():
    def noted(*flags: str) -> Findings:
        findings = Findings()
        note_temperature(findings, read_settings(None, [*flags]), steps=100)
        return findings

    slow = noted("--temperature.learning_rate", "1e-4")
    assert slow["temperature.lowest_in_reach"] == pytest.approx(0.07 * math.exp(-0.01))
    assert slow.warnings[0].remedy == "give --temperature.learning_rate 0.015"
    assert noted("--temperature.learning_rate", "0").warnings == []
    assert noted("--temperature.learning_rate", "0.1")["temperature.lowest_in_reach"] == 0.01


def test_processes_share_the_objectives_state_and_the_activations(shards):
    alone, together = examined(shards, sample=1), examined(shards, sample=1, ranks=4)
    assert together["objective.state_bytes_per_rank"] * 4 == alone["objective.state_bytes"]
    assert together["memory.objective_bytes"] < alone["memory.objective_bytes"] / 2
    assert together["memory.activation_bytes"] * 4 == alone["memory.activation_bytes"]
    assert together["memory.towers_bytes"] == alone["memory.towers_bytes"] == 16 * alone["model.parameters"]


def test_a_mixture_is_examined_by_its_weights(shards, tmp_path):
    table = write_csv(tmp_path, 40)
    findings = examined(f"{shards}:0.5,{table}:2", "--train.samples", "560")
    assert (findings["data.kind"], findings["data.pairs"], findings["data.files"]) == ("tar+csv", 160, 4)
    assert (findings["plan.pairs_per_epoch"], findings["plan.epochs"]) == (140, 4)
    assert 0 < findings["sample.pairs"] <= 140


def test_a_folder_of_images_is_examined(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.png").write_bytes(image_bytes(number))
        (tmp_path / f"{number}.txt").write_text(caption(number))
    findings = examined(tmp_path, "--train.batch_size", "8")
    assert (findings["data.kind"], findings["data.files"], findings["data.file_bytes"]) == ("folder", 30, None)
    assert findings["captions.counted"] == 30


def test_of_remote_data_one_shard_is_fetched(shards, tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path))
    memory = fsspec.filesystem("memory")
    for shard in shards.glob("*.tar*"):  # with their indexes
        memory.pipe(f"/doctor/{shard.name}", shard.read_bytes())
    try:
        findings = examined("memory://doctor")
    finally:
        memory.rm("/doctor", recursive=True)
    assert (findings["data.kind"], findings["data.pairs"], findings["sample.chosen"]) == (
        "remote tar",
        120,
        "from one shard",
    )
    assert findings["sample.pairs"] == 40
    sizes = [shard.stat().st_size for shard in shards.glob("*.tar")]
    assert (findings["shards.number"], findings["shards.smallest"], findings["shards.kept"]) == (3, 40, 3)
    assert findings["shards.kept_bytes"] == findings["shards.fetched_bytes"] == sum(sizes)
    assert findings["shards.fetched_once"] and findings["shards.indexes_beside"]
    assert len([file for file in tmp_path.rglob("*") if file.stat().st_size > 40_000]) == 1


@pytest.mark.parametrize("address", ["file://{0}", "{0}/*.tar", "{0}/{{00000..00002}}.tar", "{0}:2,{0}"])
def test_every_way_to_name_held_out_data_is_known(shards, tmp_path, address):
    flags = ["--data.train", str(shards), "--train.batch_size", "16"]
    (tmp_path / "run.yaml").write_text(f'evaluation:\n  retrieval: ["{address.format(shards)}"]\n')
    findings, _ = examine(read_settings(tmp_path / "run.yaml", flags), sample=1)
    assert findings["evaluation.sets"] == 1 and findings.problems == []


def test_of_remote_data_whose_first_shard_is_empty_another_is_looked_at(shards, tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path))
    memory = fsspec.filesystem("memory")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    memory.pipe("/hollow/00000.tar", (tmp_path / "empty.tar").read_bytes())
    memory.pipe("/hollow/00001.tar", sorted(shards.glob("*.tar"))[0].read_bytes())
    try:
        findings = examined("memory://hollow", sample=5)
    finally:
        memory.rm("/hollow", recursive=True)
    assert (findings["data.pairs"], findings["sample.pairs"]) == (40, 5)


@pytest.mark.parametrize("listed", [True, False])
def test_indexes_beside_remote_shards_are_seen_also_when_they_are_known_here(shards, tmp_path, monkeypatch, listed):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path))
    memory = fsspec.filesystem("memory")
    for shard in shards.glob("*.tar"):
        memory.pipe(f"/bare/{shard.name}", shard.read_bytes())
    address = "memory://bare" if listed else "memory://bare/{00000..00002}.tar"
    try:
        found = [examined(address, sample=1)["shards.indexes_beside"] for _ in range(2)]
        for index in shards.glob("*.index.npz"):
            memory.pipe(f"/bare/{index.name}", index.read_bytes())
        found.append(examined(address, sample=1)["shards.indexes_beside"])
    finally:
        memory.rm("/bare", recursive=True)
    assert found == [False, False, True]


def test_a_cache_that_is_too_small_is_a_problem_and_no_error(shards, tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path))
    findings = examined(f"file://{shards}", "--data.cache_size", "1kB")
    assert not findings.ready and "data.cache_size 1,000 is too small" in findings.problems[0].what
    needed = findings.problems[0].remedy.split()[2]
    assert examined(f"file://{shards}", "--data.cache_size", needed).ready


@pytest.mark.parametrize(("size", "warned"), [("48", True), ("32", False)])
def test_images_that_would_be_enlarged_are_warned_of(shards, size, warned):
    told = remedies(examined(shards, "--model.image_size", size, sample=20))
    assert ("give --model.image_size 32" in told) == warned


def test_the_speed_of_reading_is_measured(shards):
    look = look_at(open_source(str(shards)), seed=0, count=30)
    assert look.seconds > 0
    assert examined(shards, sample=30)["loading.pairs_per_second_and_worker"] > 0
