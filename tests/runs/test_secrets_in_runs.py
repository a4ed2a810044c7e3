"""A run on data behind a password: neither the terminal nor a file that others may read shows it."""

from __future__ import annotations

import stat

import pytest

from neuclip.cli.main import main
from tests.builders.data import write_shards
from tests.builders.models import NORMS_FILE

pytestmark = pytest.mark.slow


def test_no_output_and_no_file_of_a_run_shows_a_password_and_settings_are_private(
    server, tmp_path, monkeypatch, capfd
):  # fmt: skip
    write_shards(server.folder, [16, 16])
    address = f"{server.url.replace('://', '://me:SECRET@')}/{{00000..00001}}.tar?sign=SECRET"
    run, batch = str(tmp_path / "r"), ["--train.batch_size", "8"]
    flags = f"""--data.train {address} --evaluation.retrieval {address} --run.folder {tmp_path} --run.name r
        --run.threads 1 --data.workers 0 --model.name {NORMS_FILE} --train.samples 16 --objective clip
        --evaluation.error_anchors 0""".split()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # addresses in the settings of a run are fetched
    for arguments in (
        ["train", *flags, *batch],
        ["train", "--resume", run],
        ["eval", run],
        ["doctor", address, "--json", *batch],
        ["data", "index", address, "--json"],
    ):
        assert main(arguments) == 0, arguments
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for arguments in (
        ["eval", run],
        ["train", address],
        ["train", "--evaluation.retrieval", f"{address},,b"],
        ["eval", run, "--retrieval", f"{address},,b"],
        ["doctor", f"{address}x"],
    ):
        assert main(arguments) in (1, 2), arguments
    printed = capfd.readouterr()
    assert "SECRET" not in printed.out + printed.err and "***@127.0.0.1" in printed.err
    files = [file for file in (tmp_path / "r").rglob("*") if file.is_file()]
    assert [file.name for file in files if b"SECRET" in file.read_bytes()] == ["settings.yaml"]
    assert stat.S_IMODE((tmp_path / "r" / "settings.yaml").stat().st_mode) == 0o600
