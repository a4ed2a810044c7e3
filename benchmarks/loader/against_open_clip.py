"""Samples per second of one core: open_clip's webdataset loader, ours with equal pixels, ours with fast pixels.

All read the same JPEG shards with the transform and tokenizer of the same model, in this process without workers, in
turns within one run; processor time counts, and of several rounds the best, so that a busy machine hurts all alike.
Before that the exact pixels are compared with open_clip's, sample by sample, in training and in evaluation. Prints a
Markdown table.

Usage: python benchmarks/loader/against_open_clip.py [FOLDER of shards] [rounds]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import torch
from photo_like import write_photo_shards
from PIL import Image
from torch import Tensor

from neuclip.data.decoding import FastDecode, decode
from neuclip.data.loader import Batches
from neuclip.data.open import open_source
from neuclip.data.order import Order
from neuclip.data.source import Source
from neuclip.models import open_clip_module
from neuclip.models.build import BuiltModel, build_model
from neuclip.models.transforms import fast_crop, normalize_batch

MODEL, BATCH, SAMPLES = "ViT-B-32", 64, 1024
CROP_SCALE = (0.9, 1.0)  # the default of both


def main(shards: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    built, source = build_model(MODEL, crop_scale=CROP_SCALE), open_source(str(shards))
    print(f"{compared_pixels(built, source):,} images: exact pixels equal open_clip's to the bit\n")
    loaders: dict[str, Callable[[], Iterator[int]]] = {
        "open_clip's webdataset loader": lambda: open_clip_batches(shards, len(source)),
        "data.pixels exact": lambda: our_batches(built, source, fast=False),
        "data.pixels exact, then floats": lambda: normalised_batches(built, our_images(built, source, fast=False)),
        "data.pixels fast": lambda: our_batches(built, source, fast=True),
    }
    best = dict.fromkeys(loaders, 0.0)
    for _ in range(rounds):
        for name, loader in loaders.items():
            best[name] = max(best[name], rate(loader()))
    print("| loader | samples/s of one core | of open_clip's |\n| --- | --- | --- |")
    for name, samples in best.items():
        print(f"| {name} | {samples:,.0f} | {samples / next(iter(best.values())):.2f}x |")


def rate(batches: Iterator[int]) -> float:
    """Samples per second of the processor, after the first batch, which opens files and fills shuffle buffers."""
    next(batches)
    start, samples = time.process_time(), 0
    for size in batches:
        samples += size
        if samples >= SAMPLES:
            break
    return samples / (time.process_time() - start)


def open_clip_batches(shards: Path, samples: int) -> Iterator[int]:
    """open_clip's own training pipeline, as its trainer builds it."""
    open_clip = open_clip_module()
    from open_clip_train.data import get_wds_dataset

    pattern = f"{shards}/{{{sorted(shards.glob('*.tar'))[0].stem}..{sorted(shards.glob('*.tar'))[-1].stem}}}.tar"
    arguments = argparse.Namespace(
        train_data=pattern, train_num_samples=samples, train_data_upsampling_factors=None, dataset_resampled=False,
        batch_size=BATCH, workers=0, world_size=1, seed=0,
    )  # fmt: skip
    data = get_wds_dataset(arguments, open_clips_crop(), True, tokenizer=open_clip.get_tokenizer(MODEL))
    for images, _ in data.dataloader:
        yield len(images)


def our_images(built: BuiltModel, source: Source, *, fast: bool) -> Iterator[Tensor]:
    batches = Batches(
        source, Order(len(source), seed=0), batch_size=BATCH, seed=0, workers=0, tokenize=built.tokenize,
        decode=FastDecode(built.image_size, CROP_SCALE[0]) if fast else decode,
        transform=fast_crop(built.train_transform) if fast else built.train_transform,
    )  # fmt: skip
    return (batch.images for batch in batches.steps(first_sample=0, count=SAMPLES // BATCH + 1))


def our_batches(built: BuiltModel, source: Source, *, fast: bool) -> Iterator[int]:
    return (len(images) for images in our_images(built, source, fast=fast))


def normalised_batches(built: BuiltModel, images: Iterator[Tensor]) -> Iterator[int]:
    """What open_clip's loader has done when it gives a batch, and ours leaves to the device."""
    return (len(normalize_batch(batch, built.towers.mean, built.towers.std)) for batch in images)


def compared_pixels(built: BuiltModel, source: Source) -> int:
    """Reads the images with open_clip's transforms and ours; ends the benchmark where one value differs.

    The random crop of a training image is drawn with the image's id as seed, on both sides.
    """
    number = min(SAMPLES, len(source))
    their_crop = open_clips_crop()
    for id in range(number):
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
    return number


def open_clips_crop() -> Callable[[Image.Image], Tensor]:
    """The training transform that open_clip's own trainer uses for this model."""
    transform: Callable[[Image.Image], Tensor] = open_clip_module().image_transform(224, is_train=True, aug_cfg={})
    return transform


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given or temporary)
        if not given:
            write_photo_shards(folder, images=2000, per_shard=250)
        main(folder, rounds=int(sys.argv[2]) if len(sys.argv) > 2 else 3)
