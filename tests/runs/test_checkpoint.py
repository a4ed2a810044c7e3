from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neuclip.errors import RunFailed
from neuclip.runs.checkpoint import checkpoint_name, checkpoints_in, load_checkpoint, save_checkpoint


def save(folder: Path, samples: int, keep: int = 2) -> Path:
    return save_checkpoint(folder, {"weights": torch.full((3,), samples)}, samples=samples, keep=keep)


def test_only_the_newest_stay_and_they_load_without_running_code(tmp_path):
    for samples in (100, 20, 3000):
        save(tmp_path, samples)
    assert [path.name for path in checkpoints_in(tmp_path)] == [checkpoint_name(100), checkpoint_name(3000)]
    assert torch.equal(load_checkpoint(checkpoints_in(tmp_path)[-1])["weights"], torch.full((3,), 3000))
    assert torch.load(checkpoints_in(tmp_path)[-1], weights_only=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_what_to_do(tmp_path):
    good = save(tmp_path / "run" / "checkpoints", 100)
    (good.parent / checkpoint_name(200)).with_suffix(".partial").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"No space left.*last good checkpoint is .*000100\.pt.*--resume .*run"):
        save(good.parent, 200)
    assert [path.name for path in good.parent.iterdir()] == [good.name]
    assert torch.equal(load_checkpoint(good)["weights"], torch.full((3,), 100))


def test_a_damaged_checkpoint_names_the_one_before_it(tmp_path):
    save(tmp_path, 100)
    newest = save(tmp_path, 200)
    newest.write_bytes(newest.read_bytes()[:500])
    with pytest.raises(RunFailed, match=r"000200\.pt cannot be read.*000100\.pt"):
        load_checkpoint(newest)
