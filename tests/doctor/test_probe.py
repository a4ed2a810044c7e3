"""Data that cannot be read while doctor looks at it."""

from __future__ import annotations

import errno
import json
from pathlib import Path

from neuclip.cli.main import main
from neuclip.data.tables import listed, text
from neuclip.data.tar import remote
from neuclip.doctor.diagnosis import examine
from neuclip.settings.reading import read_settings
from tests.builders.data import table


def test_a_disk_that_fails_during_the_probe_is_a_finding(tmp_path, monkeypatch):
    path = table(tmp_path, "image,caption\na.jpg,one\n")

    def fails(path: Path, most: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(listed, "read_regular", fails)
    monkeypatch.setattr(text, "read_regular", lambda path: path.read_bytes())
    findings, _ = examine(read_settings(None, ["--data.train", str(path)]))
    assert not findings.ready and "Input/output error" in findings.problems[0].what


def test_a_server_that_is_down_and_missing_packages_of_the_demo_are_findings(monkeypatch, capsys):
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)  # between tries
    settings = read_settings(None, ["--data.train", "http://127.0.0.1:9/a.tar", "--data.remote_timeout", "1"])
    findings, _ = examine(settings)
    assert not findings.ready and "127.0.0.1" in findings.problems[0].what
    monkeypatch.setattr("neuclip_icons.sources.RASTERISER_MODULE", "not_there_resvg")
    assert main(["doctor", "icons-30k", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["ready"] and "[demo]" in printed["problems"][0]["remedy"]
    assert main(["doctor", "nowhere.tar", "--json"]) == 2
    assert "no such file" in capsys.readouterr().err
