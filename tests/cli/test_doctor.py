"""`neuclip doctor`: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from neuclip.cli.main import main
from tests.builders.images import write_shards

KEYS = {
    "": {"ready", "problems", "warnings"},
    "data": {"address", "name", "kind", "pairs", "index_faults"},
    "sample": {"pairs", "share", "chosen", "shown", "sheet"},
    "bad": {"pairs", "share", "limit", "reasons", "stops_run"},
    "images": {
        *(f"{which}_{side}" for which in ("smallest", "median", "largest") for side in ("width", "height")),
        *("small_share", "modes", "mean_bytes"),
    },
    "captions": {
        *("several_share", "smallest_tokens", "median_tokens", "largest_tokens", "context_tokens", "cut_off_share"),
        *("equal_share", "commonest", "commonest_count", "counted", "equal_in_batch_share"),
        *("number", "fewest", "most", "missing", "different_images"),
    },
    "evaluation": {"sets", "automatic", "captions"},
    "model": {"name", "parameters", "image_height", "image_width", "context_tokens", "embed_dim"},
    "plan": {
        *("batch_size", "steps", "samples", "epochs", "batches_per_epoch", "ranks", "batch_per_rank", "micro_batch"),
        *("samples_per_rank", "workers_per_rank", "warmup_steps", "warmup_share", "pairs_per_epoch", "stored_features"),
    },
    "temperature": {"initial", "minimum", "maximum", "lowest_in_reach", "learned"},
    "objective": {
        *("name", "has_prototypes"),
        *("state_bytes", "state_bytes_per_rank", "working_bytes_per_rank"),
    },
    "fastclip": {"visits_per_pair", "steps_between_visits"},
    "neuclip": {"prototypes", "prototypes_per_batch", "steps_to_fill", "steps_between_renewals", "renewals"},
    "loading": {"cores", "pairs_per_second_and_worker"},
    "memory": {
        *("device", "precision", "towers_bytes", "activation_bytes", "objective_bytes", "loading_bytes", "total_bytes"),
        *("libraries_bytes", "together_bytes", "available_bytes", "machine_bytes"),
    },
    "disk": {"checkpoint_bytes", "needed_bytes", "free_bytes"},
}


@pytest.fixture
def shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # tempfile keeps what it read from TMPDIR
    return write_shards(Path("shapes"), 140)


def test_the_page_fits_one_screen_and_nothing_is_written_but_the_contact_sheet(shards, capsys):
    assert main(["doctor", "shapes", "--sheet", "sheet.png"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-1] == "ready: training would start" and err == ""
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    assert "140 pairs" in lines[0] and "contact sheet: sheet.png" in out
    assert Image.open("sheet.png").format == "PNG" and not Path("runs").exists()


def test_json_has_stable_flat_keys_and_nothing_else_is_on_stdout(shards, capsys):
    assert main(["doctor", "shapes", "tiny", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    sections = {
        section: {key.partition(".")[2] for key in printed if key.startswith(f"{section}.")} for section in KEYS
    }
    sections[""] = {key for key in printed if "." not in key}
    assert sections == KEYS
    assert Path(printed["sample.sheet"]).is_file()
    assert set(printed["warnings"][0]) == {"what", "why", "remedy"}


def test_a_run_that_would_fail_exits_with_1_and_ends_with_the_problem(shards, capsys):
    assert main(["doctor", "shapes", "--train.batch_size", "150", "--train.samples", "150"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "not ready: training would fail (1 problem)"
    assert lines[-2].startswith("problem     train.batch_size 150 is larger than the data set")


def test_data_that_cannot_be_opened_exits_with_1_in_json_too(shards, capsys):
    Path("broken.tar").write_bytes(b"not a tar" * 100)
    assert main(["doctor", "broken.tar", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["ready"] is False and "broken.tar" in printed["problems"][0]["what"]


def test_data_that_opens_but_cannot_be_read_is_a_problem_and_no_traceback(shards, capsys):
    pytest.importorskip("fsspec")
    for options, expected in (([], "data.cache_size 100 is too small"), (["--json"], '"ready": false')):
        assert main(["doctor", f"file://{shards.absolute()}", "--data.cache_size", "100", *options]) == 1
        out, err = capsys.readouterr()
        assert expected in out and "Traceback" not in err


def test_a_sheet_that_cannot_be_written_is_one_line(shards, capsys):
    Path("file").write_text("not a folder")
    os.mkfifo("pipe")
    for place in ("file/sheet.png", "shapes", "pipe"):
        assert main(["doctor", "shapes", "--sheet", place]) == 1
        assert "give another --sheet" in capsys.readouterr().err
    assert Path("pipe").is_fifo()  # as root, a move to /dev/null would replace the device


def test_a_link_where_the_sheet_goes_is_not_followed(shards, capsys):
    """Neither one that another user left in the shared temporary folder, nor one at the place of --sheet."""
    victim, prepared = Path("victim"), Path(f"neuclip-doctor-{os.getuid()}")
    victim.write_text("precious")
    prepared.mkdir()
    for link in (prepared / "shapes.png", Path("linked.png")):
        link.symlink_to(victim.absolute())
    assert main(["doctor", "shapes", "--json"]) == 0
    sheet = Path(json.loads(capsys.readouterr().out)["sample.sheet"])
    assert sheet.parent != prepared.absolute() and sheet.parent.stat().st_mode & 0o077 == 0
    assert main(["doctor", "shapes", "--sheet", "linked.png"]) == 0
    assert Image.open("linked.png").format == "PNG" and not Path("linked.png").is_symlink()
    assert victim.read_text() == "precious"
