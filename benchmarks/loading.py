"""Compares the data loader with open_clip's webdataset loader, and a training step with open_clip's trainer, on JPEG
shards."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from benchmarks.photo_like import write_photo_shards
from benchmarks.table import Row
from neuclip.data.decoding import FastDecode, decode
from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import Order
from neuclip.data.source import Source
from neuclip.models import open_clip_module
from neuclip.models.build import BuiltModel, build_model
from neuclip.models.transforms import fast_crop, normalize_batch
from neuclip.records import RunFolder, read_lines

MODEL, BATCH, SAMPLES = "ViT-B-32", 64, 1024
CROP_SCALE = (0.9, 1.0)  # the default of both
IMAGES, WARM_UP, ROUNDS = 2000, 3, 2


def loaders() -> Iterator[Row]:
    """Both loaders read the same shards with the transform and tokenizer of the same model, without workers."""
    with tempfile.TemporaryDirectory() as name:
        shards = Path(name)
        write_photo_shards(shards, IMAGES, per_shard=250)
        built, source = build_model(MODEL, crop_scale=CROP_SCALE), open_source(str(shards))
        _compare_pixels(built, source)
        for pixels, goal in (("exact", 0.75), ("fast", 0.36)):
            yield Row(
                f"{SAMPLES:,} samples, data.pixels {pixels}",
                "open_clip's webdataset loader",
                lambda fast=pixels == "fast": _seconds(_our_batches(built, source, fast=fast)),
                lambda: _seconds(_open_clip_batches(shards, len(source))),
                goal,
            )


def _seconds(batches: Iterator[int]) -> float:
    """Processor seconds for SAMPLES, after the first batch, which opens files and fills shuffle buffers."""
    next(batches)
    start, samples = time.process_time(), 0
    for size in batches:
        samples += size
        if samples >= SAMPLES:
            break
    return (time.process_time() - start) * SAMPLES / samples


def _open_clip_batches(shards: Path, samples: int) -> Iterator[int]:
    """open_clip's own training pipeline, as its trainer builds it."""
    open_clip = open_clip_module()
    from open_clip_train.data import get_wds_dataset

    arguments = argparse.Namespace(
        train_data=_pattern(shards), train_num_samples=samples, train_data_upsampling_factors=None,
        dataset_resampled=False, batch_size=BATCH, workers=0, world_size=1, seed=0,
    )  # fmt: skip
    data = get_wds_dataset(arguments, _open_clips_crop(), True, tokenizer=open_clip.get_tokenizer(MODEL))
    for images, _ in data.dataloader:
        yield len(images)


def _pattern(shards: Path) -> str:
    return f"{shards}/{{00000..{len(list(shards.glob('*.tar'))) - 1:05d}}}.tar"


def _our_batches(built: BuiltModel, source: Source, *, fast: bool) -> Iterator[int]:
    batches = Batches(
        source, Order(len(source), seed=0), batch_size=BATCH, seed=0, workers=0, tokenize=built.tokenize,
        decode=FastDecode(built.image_size, CROP_SCALE[0]) if fast else decode,
        transform=fast_crop(built.train_transform) if fast else built.train_transform,
    )  # fmt: skip
    return (len(batch.images) for batch in batches.steps(first_sample=0, count=SAMPLES // BATCH + 1))


def _compare_pixels(built: BuiltModel, source: Source) -> None:
    """Exit if the exact pixels differ from open_clip's, in training or in evaluation.

    Both sides draw the random crop of a training image with the image's id as the seed.
    """
    their_crop = _open_clips_crop()
    for id in range(min(256, len(source))):
        content = source[id].image
        for name, ours, theirs in (
            ("training", built.train_transform, their_crop),
            ("evaluation", built.transform, built.float_transform),
        ):
            torch.manual_seed(id)
            floats = normalize_batch(ours(decode(content))[None], built.towers.mean, built.towers.std)[0]
            torch.manual_seed(id)
            if not torch.equal(floats, theirs(Image.open(BytesIO(content)))):
                sys.exit(f"sample {id}: pixels for {name} differ from open_clip's")


def _open_clips_crop() -> Callable[[Image.Image], Tensor]:
    """The training transform that open_clip's own trainer uses for this model."""
    transform: Callable[[Image.Image], Tensor] = open_clip_module().image_transform(224, is_train=True, aug_cfg={})
    return transform


def training_steps() -> Iterator[Row]:
    """Both trainers as a user would run them, with one thread for the model and one data worker. The median step
    counts."""
    cases = {"compute-bound": (_config(256, 6), 1280, 1.0), "data-bound": (_config(64, 1), IMAGES, 0.8)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photo_shards(folder / "shards", IMAGES, per_shard=250)
        for case, (model, samples, goal) in cases.items():
            (folder / f"{case}.json").write_text(json.dumps(model))
            yield Row(
                f"whole step, {case}, batch {BATCH}",
                "open_clip's trainer",
                lambda case=case, samples=samples: _best(_our_step, folder, case, samples),
                lambda case=case, samples=samples: _best(_open_clip_step, folder, case, samples),
                goal,
            )


def _config(width: int, layers: int) -> dict[str, Any]:
    """An open_clip model with two transformers of this size, images of 224 pixels."""
    sizes = {"width": width, "layers": layers}
    return {
        "embed_dim": width,
        "vision_cfg": {"image_size": 224, "patch_size": 32, "head_width": 32, **sizes},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "heads": width // 32, **sizes},
    }


def _best(step: Callable[[Path, str, int, str], float], folder: Path, case: str, samples: int) -> float:
    return min(step(folder, case, samples, f"{step.__name__}-{case}-{number}") for number in range(ROUNDS))


OPEN_CLIP = """
import sys
from neuclip.models import open_clip_module
open_clip_module().add_model_config(sys.argv.pop(1))
from open_clip_train.main import main
main(sys.argv[1:])
"""


def _open_clip_step(folder: Path, case: str, samples: int, name: str) -> float:
    flags = f"""--model {case} --train-data {_pattern(folder / "shards")} --train-num-samples {samples}
        --dataset-type webdataset --batch-size {BATCH} --workers 1 --epochs 1 --lr 1e-4 --wd 0.1 --warmup 5
        --precision fp32 --log-every-n-steps 1 --logs {folder} --name {name} --save-frequency 0"""
    output = _run(folder, [sys.executable, "-c", OPEN_CLIP, f"{case}.json", *flags.split()])
    return median([float(value) for value in re.findall(r"Batch \(t\): ([\d.]+)", output)][WARM_UP:])


def _our_step(folder: Path, case: str, samples: int, name: str) -> float:
    flags = f"""--model.name {case}.json --data.train {folder / "shards"} --data.workers 1 --run.threads 1
        --objective.name clip --train.batch_size {BATCH} --train.samples {samples // BATCH * BATCH}
        --optimizer.learning_rate 1e-4 --optimizer.weight_decay 0.1 --log.every 4 --evaluation.error_anchors 0
        --run.folder {folder} --run.name {name}"""
    _run(folder, [sys.executable, "-m", "neuclip", "train", *flags.split()])
    records = read_lines(RunFolder(folder / name).records)
    return median(BATCH / record["samples_per_second"] for record in records[1:])


def _run(folder: Path, command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr
