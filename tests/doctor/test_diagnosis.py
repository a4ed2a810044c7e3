"""The examination of small generated data: figures, warnings, and problems that would make training fail."""

from __future__ import annotations

import tarfile

import pytest

from neuclip.data.open import open_source
from neuclip.doctor.diagnosis import examine
from neuclip.doctor.findings import Findings
from neuclip.doctor.probe import probe_samples
from neuclip.errors import UserError
from neuclip.settings.reading import read_settings
from tests.builders.data import write_tar
from tests.builders.images import caption, image_bytes, write_csv, write_shard, write_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """120 pairs, two of them without an image that decodes."""
    return write_shards(tmp_path_factory.mktemp("doctor") / "shapes", 120, shards=3, spoilt=(7, 80))


@pytest.fixture
def remote():
    """A file system in memory; memory://doctor is its folder of shards."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    yield memory
    memory.rm("/doctor", recursive=True)


def examined(data, *flags: str, ranks: int = 1, sample: int | None = None):
    settings = read_settings(None, ["--data.train", str(data), "--train.batch_size", "16", *flags])
    return examine(settings, ranks=ranks, sample=sample)[0]


def remedies(findings: Findings) -> str:
    return "\n".join(str(advice) for advice in findings.warnings + findings.problems)


def test_the_figures_are_those_of_the_data_and_of_the_run(shards):
    findings = examined(shards, "--train.samples", "480", "--data.workers", "2", ranks=2)
    assert (findings["data.kind"], findings["data.pairs"]) == ("tar", 120)
    assert (findings["plan.steps"], findings["plan.epochs"], findings["plan.batches_per_epoch"]) == (30, 4, 7.5)
    assert (findings["plan.batch_per_rank"], findings["plan.samples_per_rank"]) == (8, 240)
    assert findings["bad.reasons"] == {"image does not decode": 2}
    assert (findings["images.median_width"], findings["images.modes"]) == (32, {"RGB": 118})
    assert (findings["images.small_share"], findings["captions.median_tokens"]) == (1.0, 5)
    assert findings.ready


def test_only_a_sample_of_the_images_is_read_but_all_captions_are_counted(shards):
    findings = examined(shards, sample=10)
    assert (findings["sample.pairs"], findings["sample.share"]) == (10, 10 / 120)
    assert len(findings["sample.shown"]) == 3 and findings["captions.counted"] == 120


def test_the_sample_is_what_a_run_with_this_seed_reads_first(shards):
    source = open_source(str(shards))
    seeds = [[one.id for one in probe_samples(source, seed=seed, count=5).shown] for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_a_table_of_images_is_examined_too(tmp_path):
    findings = examined(write_csv(tmp_path, 40))
    assert (findings["data.pairs"], findings["bad.pairs"]) == (40, 0)


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        (["--train.batch_size", "121"], 1, "give --train.batch_size 120 or less"),
        ([], 3, "give --train.batch_size 15 or 18"),
        (["--data.max_bad_share", "0"], 1, "--data.max_bad_share"),
        (["--model.pretrained", "nowhere.pt"], 1, "--model.pretrained"),
        (["--run.precision", "fp16", "--run.device", "cpu"], 1, "--run.precision fp32"),
        (["--evaluation.retrieval", "nowhere"], 1, "nowhere: no such file or folder"),
        (["--evaluation.retrieval", "nowhere.csv:2"], 1, "nowhere.csv: no such file or folder"),
        (["--evaluation.retrieval", "nowhere/*.tar"], 1, "no file matches"),
        (["--evaluation.zero_shot", "nowhere"], 1, "nowhere: no such folder"),
    ],
)
def test_what_would_make_training_fail_is_one_problem_with_a_remedy(shards, flags, ranks, expected):
    findings = examined(shards, *flags, ranks=ranks)
    assert not findings.ready and len(findings.problems) == 1
    assert expected in str(findings.problems[0])


def test_a_run_that_exists_is_not_overwritten(shards, tmp_path):
    (tmp_path / "first" / "checkpoints").mkdir(parents=True)
    assert "another --run.name" in remedies(
        examined(shards, "--run.folder", str(tmp_path), "--run.name", "first", sample=1)
    )


def test_unreadable_data_is_a_problem_and_a_path_that_does_not_exist_an_error(tmp_path):
    (tmp_path / "empty.tar").write_bytes(b"")
    findings = examined(tmp_path / "empty.tar")
    assert not findings.ready and "empty.tar" in findings.problems[0].what
    with pytest.raises(UserError, match="no such file"):
        examined(tmp_path / "nothing.tar")


def test_data_without_a_single_good_image_stops_the_run(tmp_path):
    findings = examined(write_shard(tmp_path / "x.tar", range(20), spoilt=range(20)))
    assert findings["bad.stops_run"] and "images.modes" not in findings.figures


def test_the_remedy_names_the_key_under_which_captions_are_found(tmp_path):
    members = [("0.png", image_bytes(0)), ("0.json", b'{"url": "http://x", "text": "a cat"}')]
    shard = write_tar(tmp_path / "x.tar", [(f"{k}{name}", content) for k in range(9) for name, content in members])
    [problem] = [problem for problem in examined(shard).problems if "are bad" in problem.what]
    assert "name one with --data.caption_key text" in problem.remedy and "max_bad_share" not in problem.remedy
    assert examined(shard, "--data.caption_key", "text")["bad.pairs"] == 0


def test_equal_captions_in_a_batch_are_warned_of_until_they_are_masked(shards):
    mask = "--objective.mask_duplicates"
    assert mask in remedies(examined(shards, sample=1))
    assert mask not in remedies(examined(shards, mask, "true", sample=1))


def test_ranks_share_the_state_of_the_objective_and_the_activations(shards):
    alone, together = examined(shards, sample=1), examined(shards, sample=1, ranks=4)
    assert together["objective.state_bytes_per_rank"] * 4 == alone["objective.state_bytes"]
    saved = alone["objective.state_bytes_per_rank"] - together["objective.state_bytes_per_rank"]
    assert alone["memory.objective_bytes"] - together["memory.objective_bytes"] >= saved > 0
    assert together["memory.activation_bytes"] * 4 == alone["memory.activation_bytes"]
    assert together["memory.towers_bytes"] == alone["memory.towers_bytes"] == 16 * alone["model.parameters"]


def test_a_mixture_is_examined_by_its_weights(shards, tmp_path):
    table = write_csv(tmp_path, 40)
    findings = examined(f"{shards},{table}:2", "--train.samples", "800")
    assert (findings["data.kind"], findings["data.pairs"]) == ("tar+csv", 160)
    assert (findings["plan.pairs_per_epoch"], findings["plan.epochs"]) == (200, 4)
    assert 0 < findings["sample.pairs"] <= 160


def test_a_folder_of_images_is_examined(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.png").write_bytes(image_bytes(number))
        (tmp_path / f"{number}.txt").write_text(caption(number))
    findings = examined(tmp_path, "--train.batch_size", "8")
    assert (findings["data.kind"], findings["data.pairs"]) == ("folder", 30)
    assert findings["captions.counted"] == 30


def test_of_remote_data_only_one_shard_is_downloaded(shards, cache, remote):
    for shard in shards.glob("*.tar*"):  # with their indexes
        remote.pipe(f"/doctor/{shard.name}", shard.read_bytes())
    findings = examined("memory://doctor")
    assert (findings["data.kind"], findings["data.pairs"]) == ("remote tar", 120)
    assert (findings["sample.chosen"], findings["sample.pairs"]) == ("from one shard", 40)
    assert findings["shards.number"] == 3
    assert len([file for file in cache.rglob("*") if file.stat().st_size > 40_000]) == 1


@pytest.mark.parametrize("address", ["file://{0}", "{0}/*.tar", "{0}/{{00000..00002}}.tar", "{0}:2,{0}/../shapes"])
def test_held_out_data_may_be_given_in_every_form(shards, tmp_path, address):
    flags = ["--data.train", str(shards), "--train.batch_size", "16"]
    (tmp_path / "run.yaml").write_text(f'evaluation:\n  retrieval: ["{address.format(shards)}"]\n')
    findings, _ = examine(read_settings(tmp_path / "run.yaml", flags), sample=1)
    assert findings["evaluation.sets"] == 1 and findings.problems == []


def test_an_empty_first_remote_shard_is_passed_over(shards, tmp_path, remote):
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    remote.pipe("/doctor/00000.tar", (tmp_path / "empty.tar").read_bytes())
    remote.pipe("/doctor/00001.tar", min(shards.glob("*.tar")).read_bytes())
    findings = examined("memory://doctor", sample=5)
    assert (findings["data.pairs"], findings["sample.pairs"]) == (40, 5)


def test_a_cache_that_is_too_small_is_a_problem_and_its_remedy_works(shards):
    pytest.importorskip("fsspec")
    findings = examined(f"file://{shards}", "--data.cache_size", "1kB")
    assert not findings.ready and "data.cache_size 1,000 is too small" in findings.problems[0].what
    needed = findings.problems[0].remedy.split()[2]
    assert examined(f"file://{shards}", "--data.cache_size", needed).ready


@pytest.mark.parametrize(("size", "warned"), [("48", True), ("32", False)])
def test_images_that_would_be_upscaled_are_warned_of(shards, size, warned):
    advice = remedies(examined(shards, "--model.image_size", size, sample=20))
    assert ("give --model.image_size 32" in advice) == warned


def test_the_speed_of_reading_is_measured(shards):
    probe = probe_samples(open_source(str(shards)), seed=0, count=30)
    assert probe.seconds > 0
    assert examined(shards, sample=30)["loading.pairs_per_second_and_worker"] > 0
