from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from neuclip.errors import RunFailed
from neuclip.records import RunFolder
from neuclip.runs.checkpoint import (
    checkpoint_name,
    checkpoints_in,
    find_checkpoint,
    load_checkpoint,
    samples_at,
    save_checkpoint,
    set_aside_damaged,
)


def save(folder: Path, samples: int, keep: int = 2) -> Path:
    return save_checkpoint(folder, {"weights": torch.full((3,), samples)}, samples=samples, keep=keep)


def test_only_the_newest_stay_and_they_load_without_running_code(tmp_path):
    for samples in (100, 20, 3000):
        save(tmp_path, samples)
    assert [path.name for path in checkpoints_in(tmp_path)] == [checkpoint_name(100), checkpoint_name(3000)]
    assert torch.equal(load_checkpoint(checkpoints_in(tmp_path)[-1])["weights"], torch.full((3,), 3000))
    assert torch.load(checkpoints_in(tmp_path)[-1], weights_only=True)


def test_milestones_stay_beside_the_newest(tmp_path):
    for samples in range(10, 70, 10):
        state = {"weights": torch.zeros(3)}
        save_checkpoint(tmp_path, state, samples=samples, keep=2, milestones=[20, 60])
    assert [samples_at(path) for path in checkpoints_in(tmp_path)] == [20, 50, 60]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_what_to_do(tmp_path, monkeypatch):
    good = save(tmp_path / "run" / "checkpoints", 100)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        RunFailed,
        match=r"the disk is full \(24 bytes needed, .* free\).*last good checkpoint is .*000100\.pt.*--resume .*run",
    ):
        save(good.parent, 200)
    assert [path.name for path in good.parent.iterdir()] == [good.name]
    assert torch.equal(load_checkpoint(good)["weights"], torch.full((3,), 100))


def test_a_damaged_checkpoint_names_the_one_before_it(tmp_path):
    save(tmp_path, 100)
    newest = save(tmp_path, 200)
    newest.write_bytes(newest.read_bytes()[:500])
    with pytest.raises(RunFailed, match=r"000200\.pt is damaged.*000100\.pt"):
        load_checkpoint(newest)


def flip_a_bit(path: Path) -> None:
    """Of the first weight."""
    content = bytearray(path.read_bytes())
    start = content.index(torch.load(path)["weights"].numpy().tobytes())
    content[start] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_that_torch_does_not_notice_is_noticed(tmp_path):
    path = save(tmp_path, 100)
    flip_a_bit(path)
    assert torch.load(path)["weights"].tolist() == [101, 100, 100]
    with pytest.raises(RunFailed, match=r"000100\.pt is damaged \(the checksum of .* differs\); there is no earlier"):
        load_checkpoint(path)


def test_the_checkpoint_before_a_damaged_one_is_used_and_that_is_said(tmp_path, capsys):
    run = RunFolder(tmp_path)
    whole, damaged = save(run.checkpoints, 100), save(run.checkpoints, 200)
    flip_a_bit(damaged)
    assert find_checkpoint(run) == whole and damaged.exists()
    assert "000200.pt is damaged" in (told := capsys.readouterr().err) and "using samples-000000000100.pt" in told
    set_aside_damaged(run)
    assert checkpoints_in(run.checkpoints) == [whole] and damaged.with_suffix(".damaged").exists()
    flip_a_bit(whole)
    with pytest.raises(RunFailed, match="no earlier one; restore it, or start a new run"):
        set_aside_damaged(run)
    assert whole.exists()
