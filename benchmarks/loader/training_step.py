"""A whole training step of ours against one of open_clip's own trainer: same model, loss, batch, shards and optimizer.

Both run as a user would run them, one after the other in every round, one thread for the model and one data worker.
The median time of a step counts, because open_clip's loader fills a shuffle buffer at the start of every epoch; of the
rounds the best one, so that a busy machine hurts both alike. `data-bound` is a model so small that the loader decides.

Usage: python benchmarks/loader/training_step.py [FOLDER of shards] [rounds]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from photo_like import write_photo_shards

from neuclip.records import RunFolder, read_lines

IMAGES, BATCH, WARM_UP = 2000, 64, 3


def config(width: int, layers: int) -> dict[str, Any]:
    """An open_clip model with two transformers of this size, images of 224 pixels."""
    sizes = {"width": width, "layers": layers}
    return {
        "embed_dim": width,
        "vision_cfg": {"image_size": 224, "patch_size": 32, "head_width": 32, **sizes},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "heads": width // 32, **sizes},
    }


CASES = {"compute-bound": (config(256, 6), 1280), "data-bound": (config(64, 1), 2000)}  # model, samples
THEIRS = """
import sys
from neuclip.models import open_clip_module
open_clip_module().add_model_config("bench.json")
from open_clip_train.main import main
main(sys.argv[1:])
"""


def main(shards: Path, rounds: int) -> None:
    print(f"| step | open_clip's trainer | ours, {' | ours, '.join(('exact', 'fast'))} |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for case, (model, samples) in CASES.items():
            (Path(folder) / "bench.json").write_text(json.dumps(model))
            seconds: list[list[float]] = [[], [], []]
            for number in range(rounds):
                seconds[0].append(open_clip_step(Path(folder), shards, samples, f"{case}-{number}"))
                for column, pixels in enumerate(("exact", "fast"), start=1):
                    name = f"{case}-{pixels}-{number}"
                    seconds[column].append(our_step(Path(folder), shards, samples, pixels, name))
            theirs, *ours = (min(times) for times in seconds)
            cells = " | ".join(f"{1000 * time:,.0f} ms ({theirs / time:.2f}x)" for time in ours)
            print(
                f"| {case} (width {model['embed_dim']}, batch {BATCH}) | {1000 * theirs:,.0f} ms | {cells} |",
                flush=True,
            )


def open_clip_step(folder: Path, shards: Path, samples: int, name: str) -> float:
    pattern = f"{shards}/{{00000..{len(list(shards.glob('*.tar'))) - 1:05d}}}.tar"
    flags = f"""--model bench --train-data {pattern} --train-num-samples {samples} --dataset-type webdataset
        --batch-size {BATCH} --workers 1 --epochs 1 --lr 1e-4 --wd 0.1 --warmup 5 --precision fp32
        --log-every-n-steps 1 --logs {folder} --name {name} --save-frequency 0"""
    done = run(folder, [sys.executable, "-c", THEIRS, *flags.split()])
    times = [float(value) for value in re.findall(r"Batch \(t\): ([\d.]+)", done)]
    return median(times[WARM_UP:])


def our_step(folder: Path, shards: Path, samples: int, pixels: str, name: str) -> float:
    flags = f"""--model.name bench.json --data.train {shards}
        --data.pixels {pixels} --data.workers 1 --run.threads 1 --objective.name clip --train.batch_size {BATCH}
        --train.samples {samples // BATCH * BATCH} --optimizer.learning_rate 1e-4 --optimizer.weight_decay 0.1
        --log.every 4 --evaluation.error_anchors 0
        --run.folder {folder} --run.name {name}"""
    run(folder, [sys.executable, "-m", "neuclip", "train", *flags.split()])
    records = read_lines(RunFolder(folder / name).records)
    return median(BATCH / record["samples_per_second"] for record in records[1:])


def run(folder: Path, command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(given or temporary)
        if not given:
            write_photo_shards(made, IMAGES, per_shard=250)
        main(made.absolute(), rounds=int(sys.argv[2]) if len(sys.argv) > 2 else 2)
