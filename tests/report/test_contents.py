"""The files of a run as flat values, whatever is missing or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.report.contents import finite, flatten, late_median, read_contents
from tests.report.sample_runs import BATCH, STEPS, change_json, write_lines

FILES = ["settings", "records", "evaluation", "summary", "environment", "gallery", "merges"]


def test_settings_summary_and_environment_are_flat_and_settings_complete(run: RunFolder) -> None:
    contents = read_contents(run)
    assert contents.settings["train.batch_size"] == BATCH and contents.settings["optimizer.beta1"] == 0.9
    assert contents.settings["objective.update"] == "alternating"  # a default: the file does not have it
    assert contents.number("normalizer_error.estimators.method.mean") == 0.12
    assert contents.environment["versions.torch"] == "2.13.0"
    assert contents.under("skipped") == {"cannot decode": 1}
    assert (contents.name, contents.objective) == ("2026-11-16-neuclip-tiny", "NeuCLIP")


def test_only_finite_numbers_are_figures() -> None:
    odd = {"nan": float("nan"), "far": 1e300, "huge": 10**400, "no": None, "yes": True, "text": "1", "list": [1]}
    assert finite(odd | {"a": 1, "b": -0.5, "c": 1e-300}) == {"a": 1.0, "b": -0.5, "c": 1e-300}


def test_what_gives_access_to_data_is_in_no_value() -> None:
    secret = {"train": "s3://me:pass@host/a.tar?key=hidden", "list": ["https://host/b.tar?key=hidden", 3], "empty": {}}
    flat = flatten({"data": secret})
    assert flat == {"data.train": "s3://***@host/a.tar", "data.list": ["https://host/b.tar", 3], "data.empty": {}}


def test_a_run_has_finished_when_it_saw_all_whole_batches(run: RunFolder) -> None:
    contents = read_contents(run)
    assert contents.finished and contents.samples_planned == STEPS * BATCH  # of a budget that is 60 samples larger
    change_json(run.summary, samples_seen=BATCH)
    write_lines(run.records, [])
    write_lines(run.evaluation, [])
    assert not read_contents(run).finished
    run.summary.unlink()
    assert not read_contents(run).finished


def test_the_calibration_is_that_of_the_summary_or_the_median_of_the_last_quarter(run: RunFolder) -> None:
    assert read_contents(run).calibration == 1.0664
    records = [{"samples": n, "calibration": 9.0 if n < 6 else 2.0 if n < 8 else 500.0} for n in range(1, 9)]
    assert late_median(records, "calibration") == 251.0
    write_lines(run.records, [*records, {"samples": 9, "calibration": None}])
    change_json(run.summary, calibration=None)
    assert read_contents(run).calibration == 500.0


@pytest.mark.parametrize(
    ("started", "shown"),
    [("2026-11-16T21:05:09+02:00", "16 November 2026, 19:05 UTC"), ("soon", ""), (None, "")],
)
def test_the_date_is_that_of_the_start_in_utc(run: RunFolder, started: str | None, shown: str) -> None:
    change_json(run.environment, started=started)
    assert read_contents(run).started == shown


@pytest.mark.parametrize("name", FILES)
def test_any_file_may_be_missing(run: RunFolder, name: str) -> None:
    getattr(run, name).unlink(missing_ok=True)
    contents = read_contents(run)
    assert contents.samples_seen == STEPS * BATCH and contents.name


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in FILES
        for damage in (b"[1, 2]\n", b"{broken\n", b"\xff\xfe\n", b"null\n", b"[" * 5000 + b"\n")
        if (name, damage) != ("settings", b"null\n")  # empty YAML: all defaults
    ],
)
def test_a_damaged_file_is_named_in_one_line_with_what_to_do(run: RunFolder, name: str, damage: bytes) -> None:
    path = getattr(run, name)
    path.write_bytes(damage)
    with pytest.raises(UserError) as refused:
        read_contents(run)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_line_cut_off_by_a_kill_costs_only_itself(run: RunFolder) -> None:
    before = read_contents(run).records
    with run.records.open("a") as file:
        file.write('{"samples": 9')
    assert read_contents(run).records == before


def test_settings_that_no_run_can_have_and_folders_of_no_run_are_refused(run: RunFolder, tmp_path: Path) -> None:
    run.settings.write_text("objective: future\n")
    with pytest.raises(UserError, match="future"):
        read_contents(run)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"is not a run: it has no settings\.yaml"):
        read_contents(RunFolder(tmp_path / "empty"))
    with pytest.raises(UserError, match="is not a folder"):
        read_contents(RunFolder(tmp_path / "nothing"))
